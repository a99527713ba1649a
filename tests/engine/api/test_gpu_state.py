"""A GPU's state as read through NVML, here through a fake of it."""

from types import SimpleNamespace
from typing import Any

from pilotlight.engine.api.gpu_state import states_of


class FakeNvml:
    """A fake of NVML. If `broken`, every call fails as for a GPU that is lost."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, num_gpus: int = 1, broken: bool = False, has_ecc: bool = True) -> None:
        self.num_gpus, self.broken, self.has_ecc = num_gpus, broken, has_ecc

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.broken:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return {1: 1755, 2: 2619}[kind]

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 612_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, gpu: int, kind: int) -> int:
        return 61 + gpu

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, counter: int) -> int:
        if not self.has_ecc:
            raise self.NVMLError("Not Supported")
        return 2

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:
        return 0x4 | 0x1  # two reasons: the power cap, and an idle GPU

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=3 << 30, total=80 << 30)


def test_clocks_power_heat_errors_and_what_slows_it_are_read() -> None:
    first, second = states_of(FakeNvml(num_gpus=2))
    assert (first["sm_clock_mhz"], first["memory_clock_mhz"]) == (1755, 2619)
    assert (first["power_watts"], first["power_limit_watts"]) == (612.5, 700)
    assert (first["temperature_celsius"], second["temperature_celsius"]) == (61, 62)
    assert first["ecc_uncorrected_errors"] == 2
    assert (first["slowed_by_power_cap"], first["slowed_by_hardware_heat"]) == (1, 0)
    assert first["memory_used_bytes"] == 3 << 30


def test_values_that_a_device_does_not_know_are_left_out_and_the_rest_is_reported() -> None:
    (state,) = states_of(FakeNvml(has_ecc=False))
    assert "ecc_uncorrected_errors" not in state
    assert state["power_watts"] == 612.5


def test_a_lost_gpu_is_not_the_clients_error() -> None:
    assert states_of(FakeNvml(broken=True)) == ()

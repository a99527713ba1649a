"""A site's devices: models are spread over them, each has its own budget and cores, and unusable devices are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.serve_command import Served
from pilotlight.runtime.hosts.cores import divided
from pilotlight.runtime.hosts.devices import check_devices, is_surely_cpu
from pilotlight.runtime.hosts.gpus import Gpu
from pilotlight.runtime.hosts.launch import host_config
from pilotlight.sites.config import ConfigError
from tests.asgi import call
from tests.runtime.conftest import site_config
from tests.runtime.two_devices import CHAT, ask, entries, make_pair

__all__ = ["entries", "make_pair"]


async def test_models_are_spread_over_the_devices(make_pair: Callable[..., Any], entries: list[dict[str, Any]]) -> None:
    async with make_pair(models=entries) as pair:
        for entry in entries:
            assert (await call(pair.site.app, CHAT, ask(entry["name"]))).status == 200
        assert [len(loaded) for loaded in pair.loaded] == [2, 2]
        processes = (await call(pair.site.app, "/status")).json["processes"]
        assert [(p["role"], p["device"]) for p in processes[1:]] == [("engine", "cpu")] * 2


async def test_every_device_has_a_budget_of_its_own(
    make_pair: Callable[..., Any], entries: list[dict[str, Any]]
) -> None:
    async with make_pair(models=entries, engine={"weights_gib": 1500 / 2**30}) as pair:
        for entry in entries * 2:
            for other in entries:
                for replica in pair.replicas(other["name"]):
                    replica.awake_since = 0.0  # the minimum stay of all is over
            assert (await call(pair.site.app, CHAT, ask(entry["name"]))).status == 200
            assert all(len(loaded) <= 1 for loaded in pair.loaded)
        assert [len(loaded) for loaded in pair.loaded] == [1, 1]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"devices": ["cuda:0", "cuda:0"]}, "'cuda:0' is named twice"),
        ({"devices": ["cuda:0", "gpu"]}, "'gpu' does not name one device: use cpu or cuda:N"),
        ({"devices": ["cuda"]}, "'cuda' does not name one device"),
        ({"devices": ["cpu", "cuda:0"]}, "name CPUs only or GPUs only"),
        ({"devices": ["cpu"], "device": "cpu"}, "device and devices are both set"),
        ({"devices": []}, "at least 1 item"),
        ({"devices": [["cuda:0", "cuda:1"], "cuda:1"]}, "'cuda:1' is named twice"),
        ({"devices": [["cpu", "cuda:0"]]}, "name CPUs only or GPUs only"),
        ({"devices": [["cpu", "tpu"]]}, "'tpu' does not name one device"),
        (
            {"devices": [["ray:cpu", "cpu"]]},
            "'ray:cpu' comes first in its brackets, but engine hosts run on the site's own machine",
        ),
        ({"devices": ["ray:cpu"]}, "'ray:cpu' comes first"),
        ({"devices": [["cpu", "ray:cuda"]]}, "name CPUs only or GPUs only"),
        ({"devices": [["cpu", "ray:cpu"]], "ray_address": "there"}, "ray_address"),
        ({"hosts": [{"devices": ["cpu", "tpu"]}]}, "'tpu' does not name one device"),
        ({"hosts": [{"device": "cpu", "devices": ["cpu", "cpu"]}]}, "device and devices are both set"),
        ({"devices": [[]]}, "at least 1 item"),
        ({"devices": [["cpu", "cpu", "cpu"]], "stages": 2}, "3 devices cannot be divided into 2 equal stages"),
        ({"devices": ["cpu", "cpu"], "stages": 2}, "stages needs a group of devices"),
        ({"devices": [["cpu", "cpu"]], "redundant_experts": 2}, "redundant_experts needs expert_parallel"),
        (
            {"devices": [["cpu", "cpu"]], "expert_parallel": True, "redundant_experts": 3},
            "redundant_experts is 3, but must be a multiple of 2",
        ),
        ({"devices": [["cpu", "cpu"]], "data_parallel": 2}, "data_parallel needs expert_parallel: set it"),
        (
            {"devices": [["cpu"] * 4], "expert_parallel": True, "data_parallel": 3},
            "data_parallel is 3, but must divide the 4 devices",
        ),
        ({"device": "gpu"}, "'gpu' is not a device: use auto, cpu, cuda or cuda:N"),
    ],
)
def test_devices_that_make_no_sense_are_refused(model_directory: Path, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        site_config(model_directory, engine=engine)


def test_a_host_that_can_only_use_the_cpu_starts_for_it(model_directory: Path) -> None:
    engine = site_config(model_directory, engine={"device": "auto"}).engine
    assert host_config(engine, ("auto",), "ams1", None).device == ("cpu" if is_surely_cpu("auto") else "auto")
    assert host_config(engine, ("cuda:1",), "ams1", None).device == "cuda:1"


def test_devices_in_brackets_are_one_host(model_directory: Path) -> None:
    engine = site_config(model_directory, engine={"devices": [["cpu", "cpu"], "cpu"]}).engine
    assert engine.device_groups == (("cpu", "cpu"), ("cpu",))
    first, second = (host_config(engine, group, "ams1", None) for group in engine.device_groups)
    assert (first.device, first.group) == ("cpu", ("cpu", "cpu"))
    assert (second.device, second.group) == ("cpu", ()), "alone, it is no group"
    staged = site_config(model_directory, engine={"devices": [["cpu", "cpu"], "cpu"], "stages": 2}).engine
    assert [host_config(staged, group, "ams1", None).stages for group in staged.device_groups] == [2, 1]
    by_experts = {"devices": [["cpu", "cpu"], "cpu"], "expert_parallel": True, "redundant_experts": 4}
    copied = site_config(model_directory, engine=by_experts).engine
    assert [host_config(copied, group, "ams1", None).redundant_experts for group in copied.device_groups] == [4, 0]
    spread = {"devices": [["cpu"] * 4, "cpu"], "stages": 2, "expert_parallel": True, "data_parallel": 2}
    whole = site_config(model_directory, engine=spread).engine
    assert [host_config(whole, group, "ams1", None).data_parallel for group in whole.device_groups] == [2, 1]


def test_ranks_on_other_machines_take_none_of_this_ones_cores(model_directory: Path) -> None:
    table = {"devices": [["cpu", "ray:cpu", "ray:cpu"], "cpu"], "ray_address": "10.0.0.5:6379"}
    engine = site_config(model_directory, engine=table).engine
    first, second = (host_config(engine, group, "ams1", None) for group in engine.device_groups)
    assert (first.far_ranks, first.near_ranks, first.ray_address) == ((1, 2), (0,), "10.0.0.5:6379")
    assert second.far_ranks == ()


def test_hosts_with_roles_may_have_several_devices(model_directory: Path) -> None:
    hosts = [{"device": "cpu", "role": "prefill"}, {"devices": ["cpu", "cpu"], "role": "decode"}]
    engine = site_config(model_directory, engine={"hosts": hosts, "kv_host_gib": 0.1}).engine
    assert engine.device_groups == (("cpu",), ("cpu", "cpu"))
    assert engine.roles == ("prefill", "decode")


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, ["cpu", "ray:cpu"]), (4, ["cpu", "ray:cpu", "ray:cpu", "ray:cpu"])]
)
def test_serve_has_one_cpu_here_and_leaves_the_others_to_ray(ranks: int, expected: list[str]) -> None:
    table = Served("ember", "127.0.0.1", 8000, device="cpu", tp=2, pp=ranks // 2, ray="auto").engine
    assert (table["devices"], table["ray_address"]) == ([expected], "auto")


def test_serve_leaves_to_ray_what_gpus_are_missing_here() -> None:
    served = Served("ember", "127.0.0.1", 8000, tp=3, ray="auto", read_gpus=lambda: 2 * (Gpu("one", 1 << 30),))
    assert served.engine["devices"] == [["cuda:0", "cuda:1", "ray:cuda"]]
    with pytest.raises(CliError, match="this one has 2 of the 2 of --tp 2 --pp 1: leave it out"):
        _ = served._replace(tp=2).engine


def test_a_model_that_is_to_sleep_in_host_memory_cannot_be_shared(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="devices that share a model read their parts from disk: use auto or disk"):
        site_config(
            model_directory,
            engine={"devices": [["cpu", "cpu"]]},
            models=[{"name": "m", "source": str(model_directory), "residency": "host"}],
        )


def test_gpus_that_the_machine_does_not_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    with pytest.raises(ConfigError, match=r"'cuda:0' cannot be used: this machine shows no NVIDIA GPU"):
        check_devices(["cuda:0"], root=tmp_path, read_gpus=lambda: None)
    with pytest.raises(ConfigError, match=r"shows no NVIDIA GPU; correct engine\.device"):
        check_devices(["cuda"], root=tmp_path, read_gpus=lambda: None)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    check_devices(["cuda:0", "cuda:1"], root=tmp_path, read_gpus=lambda: None)
    check_devices(["cuda"], root=tmp_path, read_gpus=lambda: None)
    with pytest.raises(ConfigError, match=r"'cuda:2' cannot be used: this machine shows 2, cuda:0 to cuda:1"):
        check_devices(["cuda:0", "cuda:2"], root=tmp_path, read_gpus=lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match="this machine shows one, cuda:0"):
        check_devices(["cuda:0", "cuda:1"], root=tmp_path, read_gpus=lambda: None)
    check_devices(["cpu", "cpu"], root=tmp_path, read_gpus=lambda: None)
    check_devices(["auto"], root=tmp_path, read_gpus=lambda: None)


def test_cores_are_divided_between_sockets(tmp_path: Path) -> None:
    for node, cores in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    assert divided([1, 1], tmp_path, range(8)) == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert divided([1] * 4, tmp_path, range(8)) == [{0, 1}, {4, 5}, {2, 3}, {6, 7}]
    assert divided([1, 3], tmp_path, range(8)) == [{0, 1}, {2, 3, 4, 5, 6, 7}], "each rank has as many"
    assert divided([1, 1], tmp_path, {5}) == [None, None], "one core cannot be divided"


def test_auto_is_surely_a_cpu_only_where_no_kind_of_gpu_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    assert is_surely_cpu("cpu", tmp_path, lambda: None)
    assert is_surely_cpu("auto", tmp_path, lambda: None)
    assert not is_surely_cpu("cuda", tmp_path, lambda: None)
    for name in ("nvidia0", "kfd", "dxg"):
        (tmp_path / "dev" / name).touch()
        assert not is_surely_cpu("auto", tmp_path, lambda: None)
        assert is_surely_cpu("cpu", tmp_path, lambda: None)
        (tmp_path / "dev" / name).unlink()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (tmp_path / "dev" / "nvidia0").touch()
    assert is_surely_cpu("auto", tmp_path, lambda: None)

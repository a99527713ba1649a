"""`pilotlight plan`: which devices a model fits on, computed only from its config.json."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import orjson
from rich.console import Console
from rich.table import Table

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import Dtype, KvDtype
from pilotlight.engine.planning.devices import GIB, Device, DeviceSet, parse_devices
from pilotlight.engine.planning.model_plan import PlannedModel, read_model
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.planning.planner import ModelPlan, Workload, described, make_plan
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.hosts.devices import this_machine
from pilotlight.runtime.models.sources import SourceError, local_directory

_SHOWN = 5  # number of splits in the table
_WIDTH = 110  # minimum width of the table in columns


class PlanRequest(NamedTuple):
    """The options of a plan."""

    model: str
    devices: str = "this-machine"
    context_length: int | None = None
    dtype: str = "auto"
    batch: int = 64
    price_per_hour: float | None = None  # price of one device
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    kv_dtype: str = "auto"
    is_lossless: bool = False

    @property
    def wanted(self) -> Parallelism | None:
        """The requested split, or None to search for the best one."""
        if self.tp is self.pp is self.ep is None:
            return None
        return Parallelism(*(degree or 1 for degree in (self.tp, self.pp, self.ep)))


def _measured_cpu(dtype: str) -> Device:
    import torch  # takes a second, which a plan for GPUs does not need

    from pilotlight.engine.planning.cpu_speed import measured_cpu

    return measured_cpu(getattr(torch, dtype))


def plan(
    question: PlanRequest,
    as_json: bool = False,
    measure: Callable[[str], Device] = _measured_cpu,
    here: Callable[[], DeviceSet] = this_machine,
) -> None:
    """Print the plan.

    `measure` returns this machine's CPU with its speed in a dtype, `here` this machine's devices. Raises CliError.
    """
    for option, given, known in (("dtype", question.dtype, Dtype), ("kv-dtype", question.kv_dtype, KvDtype)):
        if given not in get_args(known):
            raise CliError(f"--{option} must be one of {', '.join(get_args(known))}, not {given}.")
    try:
        devices = parse_devices(question.devices, here)
        model = read_model(_config_of(question.model), question.dtype, on_cpu=devices.device.is_cpu)
        if devices.device.is_cpu:
            devices = devices._replace(device=measure(model.dtype))
        model = model._replace(kv_dtype=cast(KvDtype, question.kv_dtype))
        if question.is_lossless:
            model = _in_12_bits(model, devices)
        found = make_plan(model, devices, Workload.of(model, question.context_length, question.batch), question.wanted)
    except (CheckpointError, SourceError) as error:
        raise CliError(str(error)) from None
    told = described(found, question.price_per_hour)
    if as_json:
        print(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
    else:
        _show(found, told)


def _in_12_bits(model: PlannedModel, devices: DeviceSet) -> PlannedModel:
    """Return the model with its matrices in 12 bits.

    Raises CliError if a site would not store them in 12 bits."""
    if not devices.device.is_cpu or model.dtype != "bfloat16" or model.quantization is not None:
        format = model.quantization.method if model.quantization else model.dtype
        raise CliError(
            f"--lossless is for plain bfloat16 weights on a CPU, but this plan is for {format} on {devices}; leave it out, or say --dtype bfloat16 "
            "--devices cpu."
        )
    return model._replace(is_lossless=True)


def _config_of(source: str) -> Path:
    """Return the directory or file that describes the model.

    For a hub id this is its config.json, downloaded unless it is in the cache."""
    path = Path(source).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path
    directory = local_directory(source)
    if directory is not None:
        return directory
    from huggingface_hub import snapshot_download  # unlike hf_hub_download it fails at once without a network

    try:
        return Path(snapshot_download(source, allow_patterns=["config.json"]))
    except Exception as error:  # the hub's library has many exceptions; each one's text names the problem
        raise SourceError(f"the config.json of {source} cannot be downloaded: {error}") from error


def _show(found: ModelPlan, told: dict[str, Any]) -> None:
    billions = told["parameters"] / 1e9
    print(
        f"{told['architecture']}: {billions:,.1f} billion parameters, {told['dtype']}, {told['format']}; on {told['devices']} with a context of "
        f"{told['context_length']:,} tokens"
    )
    table = Table(
        "split",
        "weights/rank",
        "step",
        "reserved",
        "KV/rank",
        "KV tokens",
        "ms to first",
        "ms/token",
        "tokens/s",
        "$/M tokens",
    )
    for split in told["splits"][:_SHOWN]:
        rank, speed = min(split["ranks"], key=lambda one: one["kv_bytes"]), split.get("speed")
        taken = rank["activations_bytes"] + rank["tables_bytes"]
        sizes = [
            f"{size / GIB:.2f}" for size in (rank["weights_bytes"], taken, rank["reserved_bytes"], rank["kv_bytes"])
        ]
        paces = ["-"] * 3
        if speed is not None:
            paces = [f"{speed['ttft_s'] * 1e3:,.0f}", f"{speed['token_s'] * 1e3:,.1f}", f"{speed['tokens_per_s']:,.0f}"]
        cost = split.get("cost_per_million_tokens")
        name = f"tp {split['tp']} pp {split['pp']} ep {split['ep']}" + (f" dp {split['dp']}" if split["dp"] > 1 else "")
        table.add_row(name, *sizes, f"{split['total_kv_tokens']:,}", *paces, "-" if cost is None else f"{cost:.2f}")
    Console(width=max(Console().width, _WIDTH)).print(table)
    print("Sizes are in GiB, for the rank that needs most.")
    for split in found.splits[:_SHOWN]:
        print(f"- {split.parallelism}: {found.reason(split)}")
    for refused in told["refused"][:_SHOWN]:
        print(f"- tp {refused['tp']}, pp {refused['pp']}, ep {refused['ep']}: {refused['reason']}")
    device = found.devices.device
    print(f"Speeds are predicted from {device.source} and shares of them that are {device.efficiency.source}.")

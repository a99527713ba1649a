"""`pilotlight serve`: one site with one model and no router, like the server of other engines."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec.structs import replace
from rich.console import Console

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.start_progress import ServerStart, StartProgress
from pilotlight.runtime.cli.up import POLL_S, require_free
from pilotlight.runtime.hosts.devices import ReadGpus
from pilotlight.runtime.hosts.gpus import installed_gpus
from pilotlight.runtime.models.sources import SourceError, local_directory, name_of, source_of
from pilotlight.sites.accounts import KeysFile
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.key_files import key_config, new_key
from pilotlight.sites.rules import is_loopback
from pilotlight.sites.site import SiteConfig, load_keys
from pilotlight.wire.credentials import bearer_token

_PATHS = {
    "chat": "chat/completions",
    "completion": "completions",
    "embedding": "embeddings",
    "classification": "classify",
    "rerank": "rerank",
}
_ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "completion": {"prompt": "Once upon a time", "max_tokens": 32},
    "embedding": {"input": "Hello"},
    "classification": {"input": "Hello"},
    "rerank": {"query": "What burns?", "documents": ["the pilot light", "a lake"]},
}


_CPU_KV_GIB = 1.0
ORIGIN = "pilotlight serve"
_KEY = re.compile(rf"{ORIGIN}: (?:engine|models\.0)\.(\w+)")  # a key of the site, as an error names it
_OPTIONS = {
    "context_tokens": "max_model_len",
    "adapters": "adapter",
}  # options whose names differ from those of their keys
NO_KEYS = KeysFile()
# Serves a site until a stop signal and returns the exit status. Arguments: the site, a log level, the file of keys, and a function that reads the
# site again.
RunSite = Callable[[SiteConfig, int, Path | None, Callable[[Path], SiteConfig]], int]


class Served(NamedTuple):
    """The options of `pilotlight serve`: one model, its devices and its address."""

    model: str
    host: str
    port: int
    name: str | None = None  # name in requests; by default the last part of the model's path
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    kv_gib: float | None = None
    num_prefill: int = 0  # hosts that compute prompts for the others
    num_decode: int = 0  # hosts that answer; if both numbers are 0, one host does both
    tool_format: str | None = None  # None to detect it from the chat template
    max_model_len: int | None = None
    tp: int = 1
    lossless: str = "auto"
    kv_dtype: str = "auto"
    pp: int = 1
    adapters: tuple[str, ...] = ()  # each is NAME=DIRECTORY
    expert_parallel: bool = False
    redundant_experts: int = 0
    dp: int = 1
    speculate: str | None = None  # None for the default of a site's file
    ray: str | None = None  # HOST:PORT of a cluster with more devices, or "auto"; None if all are here
    read_gpus: ReadGpus = installed_gpus

    @property
    def engine(self) -> dict[str, Any]:
        """Return the [engine] table of a site's file with the devices of the model.

        Raises CliError if options contradict each other, or need more devices."""
        ranks = self.tp * self.pp * self.dp
        split: dict[str, Any] = {
            "stages": self.pp,
            "expert_parallel": self.expert_parallel,
            "redundant_experts": self.redundant_experts,
            "data_parallel": self.dp,
        }
        if self.redundant_experts and not self.expert_parallel:
            raise CliError("--redundant-experts needs --expert-parallel: give that as well.")
        if self.expert_parallel and self.tp == self.dp == 1:
            raise CliError(
                "--expert-parallel divides a layer's experts among the devices of --tp or --dp: give either more than one."
            )
        if self.dp > 1 and not self.expert_parallel:
            raise CliError("--dp spreads whole experts over its devices: give --expert-parallel as well.")
        if self.is_split and ranks > 1:
            raise CliError(
                "--tp, --pp and --dp share a model among devices of one host, but each host of --prefill and --decode has one device: drop either."
            )
        if self.is_split:
            return {"hosts": self._hosts(), "kv_host_gib": self.kv_gib or _CPU_KV_GIB}
        if self.ray is not None:
            split["ray_address"] = self.ray
        elif ranks == 1:
            return {"device": self.device}
        if self.device not in ("auto", "cpu", "cuda"):
            raise CliError(
                f"--tp {self.tp} --pp {self.pp} --dp {self.dp} computes on {ranks} devices, and --device {self.device} is only one: leave it out."
            )
        return {"devices": [self._group(ranks)], **split}

    def _group(self, ranks: int) -> list[str]:
        """Return the devices of all ranks. Raises CliError if Ray is requested but no device is missing here."""
        if self.ray is None:
            return ["cpu"] * ranks if self._is_on_cpu else [f"cuda:{i}" for i in range(ranks)]
        here = ["cpu"] if self._is_on_cpu else [f"cuda:{i}" for i in range(len(self.read_gpus() or ()))]
        if not here or len(here) >= ranks:
            raise CliError(
                f"--ray adds devices of other machines, but this one has {len(here)} of the {ranks} of --tp {self.tp} --pp {self.pp}: "
                + ("leave it out." if here else "use --device cpu.")
            )
        return here + ["ray:cpu" if self._is_on_cpu else "ray:cuda"] * (ranks - len(here))

    @property
    def _is_on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and not self.read_gpus())

    @property
    def source(self) -> str:
        """The model's source (runtime/models/sources.py)."""
        return source_of(self.model)

    def site(self, known: KeysFile = NO_KEYS, open_to_all: bool = False) -> SiteConfig:
        """Return a site with only this model."""
        name = self.name or name_of(self.source)
        kv_gib = _CPU_KV_GIB if self.kv_gib is None and self._is_on_cpu else self.kv_gib
        cache = {} if kv_gib is None else {"kv_gib": kv_gib}
        threads = {} if self.threads is None else {"threads": self.threads}
        given = {"tool_format": self.tool_format, "context_tokens": self.max_model_len, "speculate": self.speculate}
        options = {key: value for key, value in given.items() if value is not None}
        values = {
            "name": "local",
            "place": {"city": "here", "latitude": 0.0, "longitude": 0.0},
            "listen": {"host": self.host, "port": self.port},
            "door": {"require_key": bool(known.keys), "open_to_all": open_to_all},
            **msgspec.to_builtins(known),
            "engine": {**self.engine, **cache, **threads},
            "models": [
                {
                    "name": name,
                    "source": self.source,
                    "dtype": self.dtype,
                    "lossless": self.lossless,
                    "kv_dtype": self.kv_dtype,
                    "adapters": [_adapter(given) for given in self.adapters],
                    **options,
                }
            ],
        }
        try:
            return parse(SiteConfig, values, ORIGIN)
        except ConfigError as error:
            raise CliError(_KEY.sub(lambda found: _option_of(found[1]), str(error))) from None

    @property
    def is_split(self) -> bool:
        return bool(self.num_prefill or self.num_decode)

    def _hosts(self) -> list[dict[str, str]]:
        """Return the hosts with their roles: each on its own GPU, or else all on the CPU."""
        roles = ["prefill"] * self.num_prefill + ["decode"] * self.num_decode
        on_gpus = self.device.startswith("cuda") or (self.device == "auto" and bool(self.read_gpus()))
        return [{"device": f"cuda:{i}" if on_gpus else "cpu", "role": role} for i, role in enumerate(roles)]


def _option_of(key: str) -> str:
    return f"--{_OPTIONS.get(key, key).replace('_', '-')}"


def _adapter(given: str) -> dict[str, str]:
    name, _, path = given.partition("=")
    if not name or not path:
        raise CliError(f"--adapter {given} is not NAME=DIRECTORY.")
    return {"name": name, "path": path}


class Clients(NamedTuple):
    """The options that decide which clients are served."""

    api_key: str | None = None
    keys_file: Path | None = None
    open_to_all: bool = False

    def known(self) -> KeysFile:
        """Return the clients' accounts and keys. Raises ConfigError, and CliError for an unusable key."""
        known = KeysFile() if self.keys_file is None else load_keys(self.keys_file)
        if self.api_key is not None:
            if not bearer_token(f"Bearer {self.api_key}"):
                raise CliError(
                    "The key must have no spaces and be printable ASCII; `pilotlight keys create` makes one."
                )
            known = replace(known, keys=(*known.keys, key_config("api-key", self.api_key, ("admin",))))
        return known


def serve(served: Served, clients: Clients, run: RunSite) -> int:
    """Serve until a stop signal; return the exit status."""
    known = clients.known()
    if not (known.keys or clients.open_to_all or is_loopback(served.host)):
        raise CliError(
            f"{served.host} can be reached from other machines: give --api-key KEY or --keys FILE (`pilotlight keys create`), or "
            "--open-to-all to serve every client."
        )
    own_key, own = new_key("pilotlight-serve", ("admin",))  # this command's own key, to watch the start

    def site_of(known: KeysFile) -> SiteConfig:
        return served.site(replace(known, keys=(*known.keys, own)) if known.keys else known, clients.open_to_all)

    site = site_of(known)
    try:
        local_directory(served.source)
    except SourceError as error:
        raise CliError(str(error)) from None
    require_free(served.host, served.port)
    start = Start(site, own_key if known.keys else "")
    threading.Thread(target=start.show, daemon=True).start()
    logging.getLogger("pilotlight.reload").setLevel(logging.WARNING)
    # The terminal shows the progress, so the server logs nothing; clients get the errors.
    status = run(site, logging.CRITICAL, clients.keys_file, lambda _: site_of(clients.known()))
    if start.failure is not None:
        raise CliError(start.failure)
    return status


class Start:
    """Shows the server's start from a separate thread, and stops a server that cannot become ready."""

    def __init__(self, site: SiteConfig, admin_key: str = "") -> None:
        self.failure: str | None = None
        self._model = site.models[0]
        self._is_open = not admin_key
        self._device = " + ".join(site.engine.device_groups[0])
        if self._device == "auto":
            self._device = "cuda" if installed_gpus() else "cpu"
        self._url = site.listen.url()
        self._api = Api(self._url, key=admin_key)
        self._server = ServerStart(site.name, self._url, publishes_status=True, admin_key=admin_key)

    def show(self) -> None:
        print(f"Serving {self._model.source} as {self._model.name}.", flush=True)
        progress = StartProgress(Console(), [self._server])
        with progress.shown():
            while not progress.poll():
                if self._server.failure is not None:
                    self.failure = self._server.failure
                    os.kill(os.getpid(), signal.SIGTERM)  # lets the server in the main thread shut down in order
                    return
                time.sleep(POLL_S)
        print("\n".join(self._introduction()), flush=True)

    def _introduction(self) -> Iterator[str]:
        """Yield lines that describe the model, with an example request."""
        model, *adapted = self._api.get_json("/v1/models")["data"]
        room = (
            ""
            if model["type"] in ("embedding", "rerank", "classification")
            else f", KV cache of {model['kv_cache_tokens']:,} tokens"
        )
        context = f"context of {model['context_length']:,} tokens"
        yield f"{model['id']}: {model['dtype']}, {context}{room}, on {self._device}."
        url = f"{self._url}/v1/{_PATHS[model['type']]}"
        if adapted:
            yield f"Adapters: {', '.join(entry['id'] for entry in adapted)}."
        yield f"Ready: {url}"
        yield f"Open {self._url}/ in a browser to see it and to talk to it."
        key = "" if self._is_open else " -H 'authorization: Bearer KEY'"
        body = orjson.dumps({"model": model["id"], **_ASKED[model["type"]]}).decode()
        yield f"Try: curl {url}{key} -H 'content-type: application/json' -d '{body}'"

"""The product in a simulated network: one router, three sites, and clients, each as a simulated process.

Servers, applications, probes, dispatch, supervisors and the engine's client are the product's, unchanged; sockets, clocks and engine hosts are
simulated.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast
from unittest.mock import patch

import aiohttp
import orjson
import starlette.routing
from prometheus_client import Counter, Histogram

from load_tests.random_checkpoint import EMBER, ember_vocab
from pilotlight.edge_router.app import RouterApp
from pilotlight.edge_router.app import build_app as build_router
from pilotlight.edge_router.forwarding import timeouts
from pilotlight.edge_router.serve import serving
from pilotlight.engine.planning.model_plan import planned_weights_bytes
from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.page.feed import Feed
from pilotlight.runtime.app import SiteApp
from pilotlight.runtime.app import build_app as build_site
from pilotlight.runtime.models import wakes
from pilotlight.runtime.serve import serve_app
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.config import parse
from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import SiteConfig
from pilotlight.wire.sse import EventDecoder
from tests.simulation.engine_double import Answers, DoubleLauncher
from tests.simulation.virtual_network import Address, Listener, Network
from tests.simulation.virtual_time import PROCESS, Process

SECRET = "the secret of the simulated network"
PORT = 8780
ROUTER_HOST, CLIENTS_HOST = "127.0.2.1", "127.0.2.2"
SITES = {
    "ams1": ("127.0.1.1", 0.008, {"city": "Amsterdam", "latitude": 52.31, "longitude": 4.76}),
    "iad1": ("127.0.1.2", 0.08, {"city": "Washington", "latitude": 38.94, "longitude": -77.46}),
    "sin1": ("127.0.1.3", 0.16, {"city": "Singapore", "latitude": 1.36, "longitude": 103.99}),
}  # host, latency to the router in seconds, place
RELAY = {
    "first_byte_timeout_s": 20.0, "answer_timeout_s": 60.0, "idle_timeout_s": 12.0, "drain_timeout_s": 5.0,
}  # fmt: skip
UP_WITHIN_S = 120.0
WORD = "coordinates "  # of most characters per token, because encoding takes time

Kind = Literal["stream", "whole"]


class Member:
    """A simulated machine with one process, a router or a site, that can be started again."""

    def __init__(self, network: Network, name: str, host: str) -> None:
        self.network = network
        self.name, self.host = name, host
        self.process = Process(name, host)
        self.stop = asyncio.Event()
        self.served: asyncio.Task[None] | None = None
        self.clock_ahead_s = 0.0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{PORT}"

    @property
    def listener(self) -> socket.socket:
        address: Address = (self.host, PORT)
        return cast(socket.socket, Listener(address))

    @property
    def is_up(self) -> bool:
        return self.served is not None and not self.served.done() and self.process.state != "dead"

    def start(self) -> None:
        if not self.is_up:
            self.process = Process(self.name, self.host)
            self.process.clock_ahead_s = self.clock_ahead_s
            self.stop = asyncio.Event()
            self.served = self.network.start(self.process, self.serve())

    def kill(self) -> None:
        self.network.kill(self.process)

    async def serve(self) -> None:
        raise NotImplementedError

    def step_clock(self, seconds: float) -> None:
        self.clock_ahead_s += seconds
        self.process.clock_ahead_s = self.clock_ahead_s


class SiteMember(Member):
    def __init__(self, network: Network, name: str, answers: Answers, *, devices: int) -> None:
        super().__init__(network, name, SITES[name][0])
        self.app: SiteApp | None = None
        self.launchers: list[DoubleLauncher] = []
        self._answers = answers
        values: dict[str, Any] = {
            "name": name,
            "place": SITES[name][2],
            "listen": {"host": self.host, "port": PORT},
            "engine": {"devices": ["cpu"] * devices, "standby": False, "weights_host_gib": 0.0},
            "limits": {"request_timeout_s": 90.0, "drain_timeout_s": 4.0},
            "responses": {"max_gib": 0.0},
            "models": [{"name": "ember", "source": "embedded:ember", "residency": "device"}],
        }
        self._config = parse(SiteConfig, values, "the simulation")

    async def serve(self) -> None:
        devices = range(len(self._config.engine.all_devices))
        self.launchers = [DoubleLauncher(self.network, self.process, device, self._answers) for device in devices]
        self.app = build_site(
            self._config,
            launchers=self.launchers,
            hop_secret=SECRET,
            url=self.url,
            timings=SiteTimings(clock=time.time),
        )
        await serve_app(self.app, self.listener, stop=self.stop)

    def kill(self) -> None:
        super().kill()
        for launcher in self.launchers:  # engine hosts end with their site
            for host in launcher.living:
                host.end("its parent has ended")

    def held(self) -> list[str]:
        """Return a sentence for each count of unfinished work at the site that is not zero."""
        if not self.is_up or self.app is None:
            return [f"{self.name} is down"]
        site = self.app.site
        counts = {
            "permits": site.admission.inflight,
            "reserved tokens": sum(site.admission.reserved.values()),
            "sequences": sum(host.num_open for launcher in self.launchers for host in launcher.living),
            "users of the model": site.models.states["ember"].demand.users,
            "assigned sequences": sum(each.work.sequences for each in site.models.states["ember"].replicas),
        }
        return [f"{self.name} holds {count} {what}" for what, count in counts.items() if count]


class RouterMember(Member):
    def __init__(self, network: Network) -> None:
        super().__init__(network, "router", ROUTER_HOST)
        self.app: RouterApp | None = None
        sites = [
            {"name": name, "url": f"http://{host}:{PORT}", "place": place} for name, (host, _, place) in SITES.items()
        ]
        values: dict[str, Any] = {
            "listen": {"host": ROUTER_HOST, "port": PORT},
            "place": SITES["ams1"][2],
            "relay": RELAY,
            "responses": {"max_gib": 0.0},
            "sites": sites,
        }
        self._config = parse(NetworkConfig, values, "the simulation")

    async def serve(self) -> None:
        self.app = build_router(self._config)
        async with serving(self.app, self._config, self.listener):
            await self.stop.wait()
            await self.app.edge.proxy.drain(self._config.relay.drain_timeout_s)
            self.app.edge.tunnels.end()

    def states(self) -> dict[str, str]:
        if self.app is None:
            return {}
        return {name: backend.state for name, backend in self.app.edge.backends.items()}

    def held(self) -> list[str]:
        """Return a sentence for each count of unfinished work at the router that is not zero."""
        if not self.is_up or self.app is None:
            return ["the router is down"]
        proxy = self.app.edge.proxy
        registry = proxy.metrics.registry
        held = [f"the router relays {len(proxy.under_way)} requests"] if proxy.under_way else []
        if registry.get_sample_value("pilotlight_router_open_requests"):
            held.append("the router counts open requests")
        for backend in self.app.edge.backends.values():
            view = backend.view()
            counts = (view.outstanding, view.pending_requests, view.pending_tokens, view.unanswered_tokens)
            if any(counts):
                held.append(f"the router counts {counts} for {view.name}")
        return held


@dataclass
class Heard:
    """One request and the response as its client received it."""

    seed: int
    kind: Kind
    sent_at: float
    status: int = 0
    text: str = ""
    finish: str | None = None
    is_done: bool = False
    error: str | None = None  # the code of the error in the response
    why: str = ""  # the message of that error
    cut: str | None = None  # the error of a connection that ended before the answer
    has_left: bool = False  # the client left before the end
    ended_at: float | None = None

    @property
    def is_complete(self) -> bool:
        return self.is_done and self.error is None and self.cut is None

    def add(self, data: bytes) -> None:
        """Add an event of a stream."""
        fields = orjson.loads(data)
        if "error" in fields:
            self.error, self.why = fields["error"]["code"], fields["error"]["message"]
            return
        for choice in fields["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish


@dataclass
class World:
    network: Network
    answers: Answers
    router: RouterMember
    sites: dict[str, SiteMember]
    clients: Process
    heard_by: type[Heard]  # the clients' reader of responses
    asking: list[asyncio.Task[None]] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)  # exceptions that the product caught and logged

    @property
    def members(self) -> "list[RouterMember | SiteMember]":
        return [self.router, *self.sites.values()]

    def ask(self, seed: int, kind: Kind, num_words: int) -> asyncio.Task[None]:
        """Send a request; its response is recorded in `heard`."""
        heard = self.heard_by(seed, kind, self.network.now)
        self.heard.append(heard)
        task = self.network.start(self.clients, self._hear(heard, num_words))

        # Not in the task itself, which may be cancelled before its first step.
        def end(task: asyncio.Task[None]) -> None:
            heard.has_left = task.cancelled()
            heard.ended_at = self.network.now

        task.add_done_callback(end)
        self.asking.append(task)
        return task

    async def _hear(self, heard: Heard, num_words: int) -> None:
        body = {
            "model": "ember", "stream": heard.kind == "stream", "max_tokens": 200, "seed": heard.seed,
            "messages": [{"role": "user", "content": f"{heard.seed} " + WORD * num_words}],
        }  # fmt: skip
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(f"{self.router.url}/v1/chat/completions", json=body) as answer,
            ):
                heard.status = answer.status
                if answer.content_type == "text/event-stream":
                    await _hear_stream(heard, answer)
                else:
                    _hear_whole(heard, orjson.loads(await answer.read()))
        except aiohttp.ClientError as error:
            heard.cut = f"{type(error).__name__}: {error}"

    async def until_healthy(self) -> bool:
        deadline = self.network.now + UP_WITHIN_S
        while self.router.states() != dict.fromkeys(SITES, "healthy"):
            if self.network.now > deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    def heal(self) -> None:
        """Restore all links and hosts, resume suspended processes, and start stopped sites again."""
        for member in self.members:
            link = self.network.link(ROUTER_HOST, member.host)
            if link.is_cut:
                self.network.mend(link)
            self.network.resume(member.process)
        for name, site in self.sites.items():
            self.network.link(ROUTER_HOST, site.host).latency_s = SITES[name][1]
            for launcher in site.launchers:
                launcher.have_no_room(None, fails_loads=False)
                for host in launcher.living:
                    self.network.resume(host.process)
            site.start()


async def _hear_stream(heard: Heard, answer: aiohttp.ClientResponse) -> None:
    decoder = EventDecoder()
    async for chunk in answer.content.iter_any():
        for event in decoder.feed(chunk):
            if heard.is_done or heard.error:
                heard.error = "something follows the end"
            elif event.is_done:
                heard.is_done = True
            elif event.data is not None:
                heard.add(event.data)
    if not heard.is_done and heard.error is None:
        heard.cut = "the stream ended without a final event"


def _hear_whole(heard: Heard, fields: dict[str, Any]) -> None:
    if "error" in fields:
        heard.error, heard.why = fields["error"]["code"], fields["error"]["message"]
        return
    (choice,) = fields["choices"]
    heard.text, heard.finish, heard.is_done = choice["message"]["content"], choice["finish_reason"], True


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(EMBER)


def new_world(network: Network, *, devices: int, heard_by: type[Heard]) -> World:
    """Return a world whose members are not started; `devices` is the number of devices of ams1."""
    (eos,) = _tokenizer().encode("<|im_end|>", add_special_tokens=False)
    answers = Answers(_tokenizer(), eos, ember_vocab())
    sites = {name: SiteMember(network, name, answers, devices=devices if name == "ams1" else 1) for name in SITES}
    for host, latency_s, _ in SITES.values():
        network.link(ROUTER_HOST, host).latency_s = latency_s
    network.link(ROUTER_HOST, CLIENTS_HOST).latency_s = 0.004
    return World(network, answers, RouterMember(network), sites, Process("clients", CLIENTS_HOST), heard_by)


class _OrderedSet(dict[Any, None]):
    """A set in the order of insertion; that of a `set` of objects depends on their addresses."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


@contextmanager
def adapted() -> Iterator[None]:
    """Replace parts of the product on which no promise depends.

    Files are read once for all schedules and nothing is measured for operators, because both take time. Requests are checked in one order, so that
    a seed always runs the same steps.
    """
    with ExitStack() as stack:
        for owner, name, new in _ADAPTED:
            stack.enter_context(patch.object(owner, name, new, create=name == "set"))
        yield


_ADAPTED: tuple[tuple[Any, str, Any], ...] = (
    (ssl, "create_default_context", cache(ssl.create_default_context)),
    (ChatTemplate, "from_directory", cache(ChatTemplate.from_directory)),
    (Tokenizer, "from_directory", cache(Tokenizer.from_directory)),
    (wakes, "planned_weights_bytes", cache(planned_weights_bytes)),
    (starlette.routing, "compile_path", cache(starlette.routing.compile_path)),
    (Feed, "tick", lambda feed: None),
    (Counter, "inc", lambda counter, amount=1: None),
    (Histogram, "observe", lambda histogram, amount: None),
    (timeouts, "set", _OrderedSet),
)


class _Exceptions(logging.Handler):
    """A log handler that collects the exceptions that living processes log."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        if record.exc_info and (process is None or process.state != "dead"):
            name = "the world" if process is None else process.name
            self._world.logged.append(f"{name} logged {record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def noting_exceptions(world: World) -> Iterator[None]:
    handler = _Exceptions(world)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)

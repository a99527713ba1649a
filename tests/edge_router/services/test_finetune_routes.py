"""A router's answers to requests for fine-tunes, while its sites answer, refuse or fail."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pilotlight.edge_router.backends.site_control import SiteAnswer
from pilotlight.edge_router.requests.request import Head
from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.edge_router.services.finetune_registry import SiteFinetunes
from pilotlight.edge_router.services.finetune_routes import RoutedFinetunes
from pilotlight.sites.network import RelayConfig
from pilotlight.wire.credentials import tenant_of
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.finetunes import INTERNAL_PATH, Finetune, FinetuneList
from pilotlight.wire.hop.headers import ACCOUNT

PATH = "/client/v4/accounts/a/ai/finetunes"
OWNER = tenant_of(Head("GET", PATH, PATH, [("authorization", "Bearer ann")]).owner, None).owner
LOST = SiteAnswer(0, b"no answer within 600 s")
TAKEN = SiteAnswer(200, b'{"result": {}, "success": true}')


def kept(*, is_whole: bool, id: str = "7", name: str = "tone") -> Finetune:
    return Finetune(id, OWNER, "", "tiny", name, is_whole=is_whole)


class Sites:
    """Two sites, of which ams1 is nearer than iad1.
    `lists` are their lists of adapters, `answers` their answers to a POST."""

    def __init__(self, *has: str, is_whole: bool = False) -> None:
        self.has = {name: [kept(is_whole=is_whole)] if name in has else [] for name in ("ams1", "iad1")}
        self.answers: dict[str, SiteAnswer] = dict.fromkeys(self.has, TAKEN)
        self.posted: list[tuple[str, str, dict[str, str]]] = []
        self.carried: list[tuple[str, str]] = []
        self.backends: Any = {name: self._backend(name, ms) for name, ms in (("iad1", 90.0), ("ams1", 5.0))}
        nobodys: Any = SimpleNamespace(accounts=(), models=())
        self.finetunes = SiteFinetunes(
            self.backends, DataPlaces(nobodys), cast("Any", SimpleNamespace(exchange=self.exchange, secret=""))
        )
        proxy: Any = SimpleNamespace(
            config=RelayConfig(), parser=SimpleNamespace(secret="s"), admission=self, handle=lambda client, work: work
        )
        self.routes = RoutedFinetunes(proxy, self.finetunes)

    def _backend(self, name: str, ms: float) -> Any:
        view = SimpleNamespace(model=lambda model: SimpleNamespace(name=model) if model == "tiny" else None)
        status = SimpleNamespace(finetunes="one")
        return SimpleNamespace(
            name=name, state="healthy", status=status, round_trip=SimpleNamespace(ms=ms), view=lambda: view
        )

    async def exchange(self, method: str, site: str, path: str, body: bytes = b"", **options: Any) -> SiteAnswer:
        if (method, path) == ("GET", INTERNAL_PATH):
            return SiteAnswer(200, msgspec.json.encode(FinetuneList("one", tuple(self.has[site]), ())))
        if method == "POST":
            self.posted.append((site, path, dict(options["headers"])))
            if path.endswith("finetune-assets") and self.answers[site].status == 200:
                self.has[site] = [kept(is_whole=True)]
            return self.answers[site]
        self.carried.append((method, site))
        if method == "PUT":
            self.has[site] = [kept(is_whole=True)]
        return SiteAnswer(200, b"a file")

    async def ask(self, method: str, body: bytes = b"", id: str | None = None, *, is_file: bool = False) -> Any:
        headers = [(b"authorization", b"Bearer ann"), (b"content-type", b"x/y"), (b"x-other", b"z")]
        path = PATH + (f"/{id}" if id else "") + ("/finetune-assets" if is_file else "")
        received = asyncio.Queue[Any]()
        received.put_nowait({"type": "http.request", "body": body})
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.routes({"type": "http", "method": method, "path": path, "headers": headers}, received.get, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def admit(self, head: Head, address: str) -> Any:
        return nullcontext()

    async def refusal(self, *asked: Any, **options: Any) -> str:
        with pytest.raises(ApiError) as refused:
            await self.ask(*asked, **options)
        return f"{refused.value.word}: {refused.value.message}"


NEW = b'{"model": "tiny", "name": "new"}'


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        (("PUT",), f"method_not_allowed: {PATH} does not take PUT"),
        (("GET", b"", "7"), "method_not_allowed: "),
        (("POST", b"", "7"), "method_not_allowed: "),
        (("POST", b"{"), "malformed_json: the body is not valid JSON: "),
        (("POST", b"[]"), "invalid_request: the body must be an object such as"),
        (("POST", b'{"model": "", "name": "new"}'), "invalid_request: the body must be an object such as"),
        (("POST", b'{"model": 7, "name": "new"}'), "invalid_request: the body must be an object such as"),
        (("POST", b'{"model": "tiny", "name": ""}'), "invalid_request: the body must be an object such as"),
        (("POST", b'{"model": "tiny", "name": 7}'), "invalid_request: the body must be an object such as"),
        (("POST", b'{"model": "tiny", "name": "tone"}'), "conflict: there is a fine-tune named 'tone' already"),
        (
            ("POST", b'{"model": "other", "name": "new"}'),
            "no_site_available: no site that accepts fine-tunes and serves",
        ),
        (("DELETE", b"", "8"), "not_found: there is no fine-tune '8'"),
    ],
)
async def test_what_a_router_cannot_do_is_named(asked: Any, refusal: str) -> None:
    sites = Sites("ams1")
    assert (await sites.refusal(*asked)).startswith(refusal)
    assert sites.posted == []


async def test_the_nearest_site_that_answers_judges_what_is_created() -> None:
    sites = Sites()
    assert await sites.ask("POST", NEW) == (200, json.loads(TAKEN.body))
    sites.answers["ams1"] = SiteAnswer(400, b'{"errors": []}')
    assert await sites.ask("POST", NEW) == (400, {"errors": []}), "a refusal is forwarded"
    assert [site for site, _, _ in sites.posted] == ["ams1", "ams1"]
    sites.answers["ams1"] = LOST
    assert (await sites.ask("POST", NEW))[0] == 200
    (_, path, headers) = sites.posted[-1]
    assert path == "/client/v4/accounts/-/ai/finetunes"
    assert headers == {"authorization": "Bearer ann", "content-type": "x/y"}
    assert ACCOUNT not in headers
    sites.answers["iad1"] = LOST
    told = await sites.refusal("POST", NEW)
    assert told.startswith("no_site_available: no site that accepts fine-tunes and serves 'tiny' is reachable; ams1: ")
    assert "; iad1: " in told


async def test_a_file_goes_to_a_site_that_has_its_fine_tune_and_from_there_to_the_others() -> None:
    sites = Sites("iad1")
    status, told = await sites.ask("POST", b"file", "tone", is_file=True)
    assert (status, told["messages"], told["success"]) == (200, [], True)
    assert [(site, path) for site, path, _ in sites.posted] == [
        ("iad1", "/client/v4/accounts/-/ai/finetunes/7/finetune-assets")
    ]
    assert sites.carried == [("GET", "iad1"), ("PUT", "ams1")]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (LOST, "upstream_lost: the site ams1 was lost: "),
        (SiteAnswer(400, b'{"errors": [{"message": "a pickled file"}]}'), None),
    ],
)
async def test_a_file_that_a_site_did_not_take_goes_nowhere(answer: SiteAnswer, told: str | None) -> None:
    sites = Sites("ams1")
    sites.answers["ams1"] = answer
    if told is None:
        assert await sites.ask("POST", b"file", "7", is_file=True) == (400, json.loads(answer.body))
    else:
        assert (await sites.refusal("POST", b"file", "7", is_file=True)).startswith(told)
    assert sites.carried == []


async def test_a_file_whose_site_is_away_waits() -> None:
    sites = Sites("ams1")
    await sites.finetunes.look()
    sites.backends["ams1"].state = "unhealthy"
    told = await sites.refusal("POST", b"file", "7", is_file=True)
    assert told == "no_site_available: no site that has tone is reachable: send its file again later"


async def test_what_one_site_cannot_hand_on_another_one_does() -> None:
    sites = Sites("ams1", "iad1", is_whole=True)
    sites.has["iad1"] = []
    await sites.finetunes.look()
    assert sites.finetunes.holders(OWNER, "tone") == sites.finetunes.holders(OWNER, "7") == {"ams1"}
    assert [site.name for site in sites.finetunes.with_one("7")] == ["ams1"]

    async def refuse(method: str, site: str, path: str, *_: Any, **options: Any) -> SiteAnswer:
        if path == INTERNAL_PATH:
            return await sites.exchange(method, site, path)
        return SiteAnswer(500, b'{"errors": [{"message": "its disk is broken"}]}')

    sites.finetunes.orders = cast("Any", SimpleNamespace(exchange=refuse))
    assert await sites.finetunes.spread(kept(is_whole=True)) == ["iad1 does not have it: ams1: its disk is broken"]
    assert await sites.finetunes.remove(kept(is_whole=True)) == [
        "ams1 still has it, until it returns: its disk is broken"
    ]


async def test_wrong_reports_of_a_site_leave_the_earlier_state(caplog: pytest.LogCaptureFixture) -> None:
    sites = Sites("ams1", is_whole=True)
    await sites.finetunes.look()
    for answer in (SiteAnswer(503, b"{}"), SiteAnswer(200, b"[]")):

        async def wrong(*_: Any, answer: SiteAnswer = answer, **options: Any) -> SiteAnswer:
            return answer

        sites.finetunes.orders = cast("Any", SimpleNamespace(exchange=wrong))
        await sites.finetunes.look()
        assert sites.finetunes.holders(OWNER, "tone") == {"ams1"}
    assert "does not list its fine-tunes" in caplog.text
    assert "lists its fine-tunes in an unreadable form" in caplog.text

"""The command by which a machine joins, as an operator gets it from a running router."""

import json
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.app import RouterApp, build_app
from pilotlight.runtime.cli.network.network_folder import init
from pilotlight.sites.joining.authority import new_pair
from pilotlight.sites.joining.tokens import JoinToken, TokenError, Tokens
from pilotlight.sites.network import load_network
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from tests.asgi import Exchange, call
from tests.edge_router.builders import network


async def join_line(app: RouterApp, key: str, **fields: object) -> Exchange:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return await call(app, "/manage/join", method="POST", body=json.dumps(fields).encode(), **headers)


async def test_a_line_of_the_running_router_is_good_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "net"
    init(folder, "fd00::1", 8443, ("Oslo", 59.9, 10.7), 5)
    key = capsys.readouterr().out.split("\n")[0]
    monkeypatch.setenv(HOP_SECRET_ENV, "a secret of sixteen bytes or more")
    app = build_app(load_network(folder / "network.toml"), file=folder / "network.toml")
    assert (await join_line(app, "nothing")).status == 401
    answer = await join_line(app, key, minutes=10)
    assert answer.status == 201, answer.body
    command, verb, url, token = answer.json["line"].split(" ")
    assert (command, verb, url) == ("pilotlight", "join", "https://[fd00::1]:8443")
    tokens, secret = Tokens(folder), JoinToken.parse(token).secret
    tokens.redeem(secret, "osl2")
    with pytest.raises(TokenError, match="used by osl2"):
        tokens.redeem(secret, "osl3")
    session = await call(app, "/page/session", method="GET", body=b"", authorization=f"Bearer {key}")
    assert session.json["adds_machines"]
    (folder / "host").unlink()
    assert "cannot be used: No such file" in (await join_line(app, key)).json["error"]["message"]


class Joining:
    """A network in a folder, its router, and a token for one machine."""

    def __init__(self, folder: Path) -> None:
        init(folder, "router", 8443, ("Oslo", 59.9, 10.7), 5)
        self.file = folder / "network.toml"
        self._app = build_app(load_network(self.file), file=self.file)
        self._token = Tokens(folder).create(10, "0" * 64)

    async def join(self, url: str = "https://osl2:8443/", latitude: float = 59.9) -> Exchange:
        place = {"city": "Oslo", "latitude": latitude, "longitude": 10.7}
        asked = {"token": self._token.secret, "name": "osl2", "url": url, "place": place}
        body = json.dumps({**asked, "certificate_request": new_pair("osl2").request.decode()}).encode()
        return await call(self._over_tls, "/network/join", body=body)

    async def _over_tls(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "scheme": "https"}, receive, send)


@pytest.fixture
def joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Joining:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(HOP_SECRET_ENV, "a secret of sixteen bytes or more")
    return Joining(tmp_path / "net")


@pytest.mark.parametrize(
    ("url", "latitude", "says"),
    [
        ("https://ann@osl2:8443", 59.9, "url: must be http(s)://host[:port]"),
        ("https://osl2:8443?a", 59.9, "url: must be http(s)://host[:port]"),
        ("https://osl2:8443", 91.0, "place.latitude"),
    ],
)
async def test_a_machine_that_would_make_the_routers_file_invalid_does_not_join(
    joining: Joining, url: str, latitude: float, says: str
) -> None:
    before = joining.file.read_bytes()
    answer = await joining.join(url, latitude)
    assert (answer.status, says in answer.json["error"]["message"]) == (400, True), answer.body
    assert joining.file.read_bytes() == before
    assert (await joining.join()).status == 200, "the token is still valid"
    assert [(site.name, site.url) for site in load_network(joining.file).sites] == [("osl2", "https://osl2:8443")]


async def test_an_error_in_the_routers_file_costs_a_machine_no_token(joining: Joining) -> None:
    before = joining.file.read_text()
    joining.file.write_text(f"no_such_key = 1\n{before}")
    answer = await joining.join()
    assert (answer.status, "the router's file has an error" in answer.json["error"]["message"]) == (500, True)
    joining.file.write_text(before)
    assert (await joining.join()).status == 200


async def test_a_name_that_the_routers_file_has_got_meanwhile_costs_a_machine_no_token(joining: Joining) -> None:
    before = joining.file.read_text()
    place = "{ city = 'Oslo', latitude = 59.9, longitude = 10.7 }"
    joining.file.write_text(f"{before}\n[[sites]]\nname = 'osl2'\nurl = 'https://other:8443'\nplace = {place}\n")
    answer = await joining.join()
    assert (answer.status, "has a site named 'osl2' already" in answer.json["error"]["message"]) == (400, True)
    joining.file.write_text(before)
    assert (await joining.join()).status == 200


async def test_a_network_that_no_machine_may_join_offers_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    app = build_app(network({"ams1": "http://127.0.0.1:1"}))
    assert (await join_line(app, "any")).status == 404
    session = await call(app, "/page/session", method="GET", body=b"")
    assert not session.json["adds_machines"]

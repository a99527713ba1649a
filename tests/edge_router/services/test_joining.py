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


@pytest.mark.parametrize(
    ("url", "latitude", "says"),
    [
        ("https://ann@osl2:8443", 59.9, "url: must be http(s)://host[:port]"),
        ("https://osl2:8443?a", 59.9, "url: must be http(s)://host[:port]"),
        ("https://osl2:8443", 91.0, "place.latitude"),
    ],
)
async def test_a_machine_that_would_make_the_routers_file_invalid_does_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, latitude: float, says: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(HOP_SECRET_ENV, "a secret of sixteen bytes or more")
    folder = tmp_path / "net"
    init(folder, "router", 8443, ("Oslo", 59.9, 10.7), 5)
    file = folder / "network.toml"
    app, before = build_app(load_network(file), file=file), file.read_bytes()
    token = Tokens(folder).create(10, "0" * 64)

    async def join(url: str, latitude: float) -> Exchange:
        place = {"city": "Oslo", "latitude": latitude, "longitude": 10.7}
        asked = {"token": token.secret, "name": "osl2", "url": url, "place": place}
        body = json.dumps({**asked, "certificate_request": new_pair("osl2").request.decode()}).encode()
        return await call(over_tls, "/network/join", body=body)

    async def over_tls(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "scheme": "https"}, receive, send)

    answer = await join(url, latitude)
    assert (answer.status, says in answer.json["error"]["message"]) == (400, True), answer.body
    assert file.read_bytes() == before
    assert (await join("https://osl2:8443/", 59.9)).status == 200, "the token is still valid"
    assert [(site.name, site.url) for site in load_network(file).sites] == [("osl2", "https://osl2:8443")]


async def test_a_network_that_no_machine_may_join_offers_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    app = build_app(network({"ams1": "http://127.0.0.1:1"}))
    assert (await join_line(app, "any")).status == 404
    session = await call(app, "/page/session", method="GET", body=b"")
    assert not session.json["adds_machines"]

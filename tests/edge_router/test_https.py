"""HTTPS: the certificate is read again when its files change, without effect on open connections."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.network import NetworkConfig
from pilotlight.wire.http.certificate import Certificate
from pilotlight.wire.http.listen import ListenError, loop_factory
from tests.edge_router.builders import network
from tests.edge_router.fakes import DONE, event, raw_stream, router, sites
from tests.edge_router.forwarding.test_websockets import echo

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl's command"),
]


def write(folder: Path) -> dict[str, str]:
    """Write a new self-signed certificate and its key."""
    files = {"tls_certificate": str(folder / "chain.pem"), "tls_key": str(folder / "key.pem")}
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*command.split(), "-out", files["tls_certificate"], "-keyout", files["tls_key"]],
        check=True,
        capture_output=True,
    )
    return files


def trusting(files: dict[str, str]) -> aiohttp.TCPConnector:
    """Return a connector that trusts only the certificate of the current files."""
    return aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=files["tls_certificate"]))


async def test_a_new_certificate_is_served_to_new_connections_and_open_streams_continue(tmp_path: Path) -> None:
    files = write(tmp_path)
    listen = {"port": 0, **files}
    async with sites("ams1") as fakes, router(fakes, tables={"listen": listen}) as running:
        url = running.url.replace("http://", "https://")
        fakes[0].behave = raw_stream(event(0), end="on command")
        body = {"model": "ember", "stream": True}
        async with (
            aiohttp.ClientSession(connector=trusting(files)) as before,
            before.post(url + "/v1/chat/completions", json=body) as response,
        ):
            assert await response.content.readany() == event(0)
            write(tmp_path)
            async with aiohttp.ClientSession(connector=trusting(files)) as after:
                async with asyncio.timeout(60):
                    while True:
                        try:
                            async with after.get(url + "/livez") as alive:
                                assert alive.status == 200
                                break
                        except aiohttp.ClientConnectorCertificateError:
                            await asyncio.sleep(0.1)
            fakes[0].go_on.set()
            assert await response.read() == event(99) + DONE


def test_half_of_a_new_pair_is_not_taken(tmp_path: Path) -> None:
    files = write(tmp_path)
    certificate = Certificate(Path(files["tls_certificate"]), Path(files["tls_key"]))
    assert not certificate.look()
    chain = tmp_path / "chain.pem"
    good = chain.read_bytes()
    (tmp_path / "other").mkdir()
    chain.write_bytes(Path(write(tmp_path / "other")["tls_certificate"]).read_bytes())
    assert not certificate.look()
    chain.unlink()
    assert not certificate.look()
    chain.write_bytes(good)
    assert certificate.look()


@pytest.mark.parametrize("listen", [{"tls_key": "k"}, {"tls_certificate": "c"}])
def test_a_certificate_needs_its_key(listen: dict[str, str]) -> None:
    base = msgspec.to_builtins(network({"ams1": "http://x:1"}))
    with pytest.raises(ConfigError, match="belong together"):
        parse(NetworkConfig, {**base, "listen": {"port": 0, **listen}}, "file")


def test_files_that_are_no_certificate_stop_the_start_by_name(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("nonsense")
    (tmp_path / "k").write_text("nonsense")
    with pytest.raises(ListenError, match="tls_certificate"):
        Certificate(tmp_path / "c", tmp_path / "k")


@pytest.mark.parametrize("factory", [None, loop_factory()])
def test_websockets_pass_through_https_on_either_event_loop(tmp_path: Path, factory: Any) -> None:
    files = write(tmp_path)

    async def run() -> None:
        async with sites("ams1") as fakes, router(fakes, tables={"listen": {"port": 0, **files}}) as running:
            fakes[0].behave = echo
            url = running.url.replace("http://", "https://") + "/fn/f/ws"
            async with aiohttp.ClientSession(connector=trusting(files)) as client, client.ws_connect(url) as socket:
                for size in (1, 70_000, 1_000_000):
                    await socket.send_bytes(b"b" * size)
                    assert await socket.receive_bytes(timeout=60) == b"b" * size
                await socket.send_str("close")
                await socket.receive(timeout=60)
                assert socket.close_code == 4002
            await running.until(lambda: not running.server.connections)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())

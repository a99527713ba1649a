"""Servers that the command line asks: their URLs, and why they cannot be reached."""

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.sites.joining.authority import Authority, new_pair


@pytest.mark.parametrize(
    "url", ["ftp://h", "", "http://", "http://h:x", "http://h:70000", "http://[::1", "..", "x" * 70]
)
def test_what_is_no_url_is_refused_with_one_that_is(url: str) -> None:
    with pytest.raises(CliError, match="is not a URL like"):
        Api(url)


def test_a_scheme_may_be_left_out() -> None:
    assert Api("h:1").url == "http://h:1"


@pytest.mark.process
def test_a_host_that_is_misspelt_is_named() -> None:
    with pytest.raises(CliError, match=r"^http://rooter\.invalid:8787 cannot be found \(.+\): check its name\.$"):
        Api("http://rooter.invalid:8787").get_json("/status")


@pytest.mark.process
def test_a_refused_key_is_named_by_its_variable() -> None:
    body = b'{"error": {"message": "this needs a key"}}'

    def serve() -> None:
        with listener.accept()[0] as client:
            client.recv(4096)
            client.sendall(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(
            CliError, match=r"^this needs a key \(PILOTLIGHT_API_KEY has the key that this command sends\)$"
        ):
            Api(f"http://127.0.0.1:{listener.getsockname()[1]}", 10.0).get_json("/status")
        serving.join()


@pytest.mark.process
def test_the_certificate_of_an_own_authority_is_refused_with_the_way_to_trust_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, pair = Authority.make(tmp_path, "127.0.0.1"), new_pair("127.0.0.1")
    (tmp_path / "key.pem").write_bytes(pair.key)
    (tmp_path / "own.pem").write_bytes(authority.issue(pair.request, "127.0.0.1"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")

    def serve() -> None:
        for _ in range(2):
            accepted = listener.accept()[0]
            with suppress(OSError), context.wrap_socket(accepted, server_side=True) as client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            accepted.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(CliError, match=r"SSL_CERT_FILE to the network's authority\.pem"):
            Api(url, 10.0).get_json("/status")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert Api(url, 10.0).get_json("/status") == {}
        serving.join()

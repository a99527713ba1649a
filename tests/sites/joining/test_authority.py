"""Certificates of a network's authority, as TLS clients check them."""

import ssl
from pathlib import Path

import pytest

from pilotlight.sites.joining.authority import Authority, new_pair


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Shake hands in memory. Raises ssl.SSLError if the client refuses the server's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="10.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    waiting = set(ends)
    while waiting:
        for end in ends:
            try:
                end.do_handshake()
                waiting.discard(end)
            except ssl.SSLWantReadError:
                pass


def serving(folder: Path, authority: Authority) -> ssl.SSLContext:
    """Return the TLS context of a server with a new certificate of the authority."""
    pair = new_pair("10.0.0.1")
    folder.mkdir()
    (folder / "key").write_bytes(pair.key)
    (folder / "pem").write_bytes(authority.issue(pair.request, "10.0.0.1"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "pem", folder / "key")
    return context


def trusting(*authorities: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata="".join(each.pem.decode() for each in authorities))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    return context


def made(folder: Path) -> Authority:
    folder.mkdir()
    return Authority.make(folder, "router.example")


def test_clients_that_follow_rfc_5280_strictly_accept_a_certificate(tmp_path: Path) -> None:
    authority = made(tmp_path / "a")
    handshake(serving(tmp_path / "s", authority), trusting(authority))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving(tmp_path / "t", made(tmp_path / "b")), trusting(authority))


def test_certificates_of_two_authorities_of_one_network_are_trusted_together(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old"), made(tmp_path / "new")
    for i, issuer in enumerate((old, new)):
        server = serving(tmp_path / f"server{i}", issuer)
        for both in ((old, new), (new, old)):
            handshake(server, trusting(*both))

"""The commands that make and change a network's folder."""

import itertools
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.x509 import IPAddress, SubjectAlternativeName, load_pem_x509_certificate, load_pem_x509_certificates

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.network.network_folder import (
    init,
    remove,
    renew,
    revoke,
    rotate,
    rotate_authority,
    show,
    token,
)
from pilotlight.sites.joining.network_file import add_site
from pilotlight.sites.joining.tokens import Tokens
from pilotlight.sites.network import load_network
from pilotlight.wire.hop.headers import Hop, hop_is_genuine, sign_hop

PLACE = {"city": "Oslo", "latitude": 59.9, "longitude": 10.7}
HOP = Hop("GET", "/status", "r1", "ams1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init(tmp_path / "net", "10.0.0.1", 8443, ("Oslo", 59.9, 10.7), 5)
    return tmp_path / "net"


def test_a_new_network_is_read_as_it_was_written_and_is_its_owners_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "net"
    init(folder, "10.0.0.1", 8443, ("Oslo", 59.9, 10.7), 5)
    network = load_network(folder / "network.toml")
    assert (network.place.city, network.listen.port, network.door.require_key) == ("Oslo", 8443, True)
    assert network.sites == ()
    assert len(network.hop.secret()) == 64
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.iterdir()))
    key, *_, line = capsys.readouterr().out.strip().split("\n")
    assert key.startswith("pl-")
    assert line.startswith("pilotlight join https://10.0.0.1:8443 pj-")
    with pytest.raises(CliError, match="holds a network already"):
        init(folder, "10.0.0.1", 8443, ("Oslo", 59.9, 10.7), 5)


def test_one_more_machine_gets_a_token_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    token(folder, 5)
    assert capsys.readouterr().out.startswith("pilotlight join https://10.0.0.1:8443 pj-")
    first, second = Tokens(folder).kept()
    revoke(folder, second.id)
    with pytest.raises(CliError, match="has no token nothing"):
        revoke(folder, "nothing")
    add_site(folder / "network.toml", "osl2", "https://10.0.0.2:8790", PLACE)
    show(folder)
    out = capsys.readouterr().out
    assert "https://10.0.0.2:8790" in out
    assert "revoked" in out
    assert first.id in out
    remove(folder, "osl2")
    assert not load_network(folder / "network.toml").sites


def test_a_secret_is_rotated_in_three_steps_without_a_refusal(folder: Path) -> None:
    file = folder / "secret"
    seen = [file.read_text()]
    for _ in range(3):
        rotate(folder)
        seen.append(file.read_text())
    assert len(seen[3]) == 64
    assert seen[3] != seen[0]
    for before, after in itertools.pairwise(seen):  # some processes have restarted with the new file, others not
        for signer, believer in ((before, after), (after, before)):
            assert hop_is_genuine(sign_hop(signer, 0.0, HOP), believer, 0.0, HOP)
    assert not hop_is_genuine(sign_hop(seen[0], 0.0, HOP), seen[3], 0.0, HOP)


def test_the_routers_certificate_is_renewed_in_place(folder: Path) -> None:
    before = (folder / "router.pem").read_bytes()
    renew(folder)
    assert (folder / "router.pem").read_bytes() != before
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "router.pem", folder / "router.key")


def test_a_sites_certificate_is_made_for_the_host_in_the_routers_file(folder: Path) -> None:
    add_site(folder / "network.toml", "osl2", "https://10.0.0.2:8790", PLACE)
    with pytest.raises(CliError, match="has no site 'osl3'; it has osl2"):
        renew(folder, "osl3")
    renew(folder, "osl2")
    certificate = load_pem_x509_certificate((folder / "osl2.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    assert [str(each) for each in names.get_values_for_type(IPAddress)] == ["10.0.0.2"]
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / "osl2.pem", folder / "osl2.key")


def test_an_authority_is_replaced_in_three_steps_at_which_all_certificates_are_trusted(folder: Path) -> None:
    add_site(folder / "network.toml", "osl2", "https://10.0.0.2:8790", PLACE)
    renew(folder, "osl2")
    seen = [(Path(folder / "authority.pem").read_bytes(), (folder / "osl2.pem").read_bytes())]
    for step in range(3):
        rotate_authority(folder)
        if step == 1:
            renew(folder, "osl2")
        seen.append(((folder / "authority.pem").read_bytes(), (folder / "osl2.pem").read_bytes()))
    for before, after in itertools.pairwise(seen):  # some processes have restarted with the new files, others not
        for authorities, certificate in ((before[0], after[1]), (after[0], before[1]), after):
            assert is_issued_by_one_of(authorities, certificate)
    assert not is_issued_by_one_of(seen[0][0], seen[3][1])
    assert not is_issued_by_one_of(seen[3][0], seen[0][1])
    assert is_issued_by_one_of(seen[3][0], (folder / "router.pem").read_bytes())
    assert not (folder / "next").exists()


def test_a_step_that_was_interrupted_is_taken_again(folder: Path) -> None:
    rotate_authority(folder)
    (old, new) = load_pem_x509_certificates((folder / "authority.pem").read_bytes())
    certificate = folder / "router.pem"
    certificate.unlink()
    certificate.mkdir()  # so that it cannot be written
    with pytest.raises(CliError, match="cannot be written"):
        rotate_authority(folder)
    certificate.rmdir()
    rotate_authority(folder)
    assert load_pem_x509_certificates((folder / "authority.pem").read_bytes()) == [new, old]
    load_pem_x509_certificate(certificate.read_bytes()).verify_directly_issued_by(new)
    rotate_authority(folder)
    assert load_pem_x509_certificates((folder / "authority.pem").read_bytes()) == [new]


def is_issued_by_one_of(authorities: bytes, certificate: bytes) -> bool:
    leaf = load_pem_x509_certificate(certificate)
    for authority in load_pem_x509_certificates(authorities):
        with suppress(InvalidSignature, ValueError):  # ValueError: the issuer has another name
            leaf.verify_directly_issued_by(authority)
            return True
    return False


def test_a_folder_without_a_network_is_said_to_be_none(tmp_path: Path) -> None:
    for command in (
        lambda: token(tmp_path, 5),
        lambda: rotate(tmp_path),
        lambda: renew(tmp_path),
        lambda: rotate_authority(tmp_path),
    ):
        with pytest.raises(CliError):
            command()


@pytest.mark.parametrize(
    "host", ["https://router.example", "router.example:8443", "router.exämple", "[::1]", "a b", ""]
)
def test_what_is_no_host_makes_no_network(host: str, tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"^--host: .* is not a host name"):
        init(tmp_path / "net", host, 8443, ("Oslo", 59.9, 10.7), 5)
    assert not (tmp_path / "net").exists()
    init(tmp_path / "net", "::1", 8443, ("Oslo", 59.9, 10.7), 5)


def test_a_city_may_have_any_letters(tmp_path: Path) -> None:
    city = '𠮷野 "Zürich" \\ 😀'
    init(tmp_path / "net", "10.0.0.1", 8443, (city, 34.4, 135.9), 5)
    file = tmp_path / "net" / "network.toml"
    add_site(file, "ams1", "https://10.0.0.2:8790", PLACE | {"city": city})
    network = load_network(file)
    assert [network.place.city, *(site.place.city for site in network.sites)] == [city, city]

"""Joining a network: tokens that work once, certificates, changes of the router's file, and refusals."""

import concurrent.futures
import os
import ssl
import tomllib
from pathlib import Path

import pytest
from cryptography import x509

from pilotlight.sites.config import ConfigError
from pilotlight.sites.joining.authority import Authority, AuthorityError, fingerprint_of, new_pair
from pilotlight.sites.joining.network_file import add_site, remove_site
from pilotlight.sites.joining.tokens import JoinToken, TokenError, Tokens

PLACE = {"city": 'Oslo "north"', "latitude": 59.9, "longitude": -10.7}


def test_a_token_is_good_once(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    made = tokens.create(10, "f" * 64)
    assert JoinToken.parse(f" {made}\n") == made
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        tries = [pool.submit(tokens.redeem, made.secret, f"site{i}") for i in range(8)]
    errors = [str(each.exception()) for each in tries if each.exception() is not None]
    assert len(errors) == 7
    assert all("this token is used by site" in error for error in errors)
    assert made.secret not in (tmp_path / "tokens.json").read_text()
    assert (tmp_path / "tokens.json").stat().st_mode & 0o777 == 0o600


def test_a_token_that_is_unknown_revoked_or_too_old_opens_nothing(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    with pytest.raises(TokenError, match="not known here"):
        tokens.redeem("pj-guessed", "site")
    revoked, late = tokens.create(10, "f" * 64), tokens.create(-0.01, "f" * 64)
    assert tokens.revoke(tokens.kept()[0].id)
    assert not tokens.revoke("none")
    with pytest.raises(TokenError, match="this token is revoked"):
        tokens.redeem(revoked.secret, "site")
    with pytest.raises(TokenError, match="this token is expired"):
        tokens.redeem(late.secret, "site")


@pytest.mark.parametrize("text", ["", "pj-half", "pj-x.short", "pl-key." + "f" * 64])
def test_what_is_no_token_is_said_to_be_none(text: str) -> None:
    with pytest.raises(TokenError, match="paste the whole line"):
        JoinToken.parse(text)


def test_used_tokens_are_forgotten_after_a_month(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    tokens.create(-31 * 24 * 60, "f" * 64)  # it expired 31 days ago
    tokens.create(1, "f" * 64)
    assert len(tokens.kept()) == 1


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    (tmp_path / "network").mkdir()
    return Authority.make(tmp_path / "network", "test")


@pytest.mark.parametrize("host", ["10.0.0.5", "::1", "ams1.example"])
def test_a_certificate_is_for_one_host_and_its_key(authority: Authority, tmp_path: Path, host: str) -> None:
    pair = new_pair(host)
    (tmp_path / "pem").write_bytes(authority.issue(pair.request, host))
    (tmp_path / "key").write_bytes(pair.key)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "pem", tmp_path / "key")
    leaf = x509.load_pem_x509_certificate((tmp_path / "pem").read_bytes())
    leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.pem))
    (name,) = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert str(name.value) == host
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_authority_keeps_its_key_to_itself_and_is_known_by_its_fingerprint(authority: Authority) -> None:
    folder = authority.file.parent
    assert (folder / "authority.key").stat().st_mode & 0o777 == 0o600
    assert fingerprint_of(authority.pem) == Authority(folder).fingerprint
    (folder / "authority.pem").write_text("nonsense")
    with pytest.raises(AuthorityError, match="cannot be used"):
        Authority(folder)


def test_a_request_that_its_own_key_has_not_signed_gets_no_certificate(authority: Authority) -> None:
    for request in (b"nonsense", authority.pem):
        with pytest.raises(AuthorityError, match="not a certificate request"):
            authority.issue(request, "10.0.0.5")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "network.toml"
    path.write_text(
        '# mine\n[[sites]]     # the first\nname = "a"\nurl = "http://a:1"\n\n[relay]\nmax_tries = 2  # two\n'
    )
    path.chmod(0o640)
    return path


def test_sites_come_and_go_and_all_beside_them_stays(file: Path) -> None:
    before = file.read_text()
    add_site(file, "b", "https://b:1", PLACE)
    assert tomllib.loads(file.read_text())["sites"][1] == {"name": "b", "url": "https://b:1", "place": PLACE}
    assert file.read_text().startswith(before)
    assert file.stat().st_mode & 0o777 == 0o640
    remove_site(file, "a")
    assert [site["name"] for site in tomllib.loads(file.read_text())["sites"]] == ["b"]
    assert "# mine" in file.read_text()
    assert "max_tries = 2  # two" in file.read_text()
    remove_site(file, "b")
    assert "sites" not in tomllib.loads(file.read_text())


def test_a_name_that_is_taken_or_unknown_and_a_file_of_another_form_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a site named 'a' already"):
        add_site(file, "a", "https://a:1", PLACE)
    with pytest.raises(ConfigError, match="no site named 'c'; it has a"):
        remove_site(file, "c")
    inline = tmp_path / "inline.toml"
    inline.write_text('sites = [{name = "a", url = "http://a:1"}]\n')
    before = inline.read_text()
    with pytest.raises(ConfigError, match=r"inline\.toml"):
        add_site(inline, "b", "https://b:1", PLACE)
    with pytest.raises(ConfigError, match="by hand"):
        remove_site(inline, "a")
    assert inline.read_text() == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]

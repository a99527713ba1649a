"""Configuration files are parsed into frozen values, or refused with an error that names the key."""

import json
from pathlib import Path

import pytest

from load_tests.config_schema import FILES, HERE, render
from pilotlight.sites.config import (
    MIN_SECRET_BYTES,
    ConfigError,
    HopConfig,
    ResponsesConfig,
    check_secrets,
    parse,
    state_directory,
)
from pilotlight.sites.network import NETWORK_FILE, NetworkConfig, load_network
from pilotlight.sites.site import LOCAL, SiteConfig, load_keys, load_site

PLACE = {"city": "Amsterdam", "latitude": 52.3, "longitude": 4.8}


def site(**changes: object) -> dict[str, object]:
    model = {"name": "ember", "source": "embedded:ember"}
    return {"name": "ams1", "place": PLACE, "listen": {"port": 1}, "models": [model], **changes}


def refusal(values: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(SiteConfig, values, "ams1.toml")
    return str(caught.value)


def test_the_shipped_files_agree_with_each_other() -> None:
    network = load_network(NETWORK_FILE)
    sites = {path.stem: load_site(path) for path in LOCAL.glob("*.toml")}
    assert {ref.name for ref in network.sites} == set(sites) == {"ams1", "iad1", "sin1"}
    for ref in network.sites:
        listen = sites[ref.name].listen
        assert ref.url == f"http://{listen.host}:{listen.port}"
        assert ref.place == sites[ref.name].place
        assert sites[ref.name].name == ref.name


def test_an_unknown_key_names_the_nearest_valid_one() -> None:
    assert "unknown key 'listen.prot'; did you mean 'port'?" in refusal(site(listen={"port": 1, "prot": 2}))
    assert "unknown key 'modells'; did you mean 'models'?" in refusal(site(modells=[]))
    model = {"name": "m", "source": "s", "residensy": "disk"}
    assert "unknown key 'models.0.residensy'; did you mean 'residency'?" in refusal(site(models=[model]))


def test_every_mistake_is_reported_at_once_with_its_file() -> None:
    message = refusal(site(name="AMS 1", listen={"port": 70000}))
    assert message.count("ams1.toml: ") == 2
    assert "name:" in message
    assert "listen.port:" in message


def test_a_model_name_may_not_be_used_twice() -> None:
    models = [{"name": "a", "source": "s"}, {"name": "b", "source": "s", "aliases": ["a"]}]
    assert "model name 'a' is used twice" in refusal(site(models=models))


def test_a_disk_tier_without_a_host_tier_is_refused() -> None:
    assert "engine: kv_disk_dir needs kv_host_gib" in refusal(site(engine={"kv_disk_dir": "/var/cache/kv"}))
    assert "engine.kv_host_gib" in refusal(site(engine={"kv_host_gib": -1}))


KEY = {"name": "acme", "key_sha256": "0" * 64}
KEYS = {"door": {"require_key": True}, "keys": [KEY]}
OPEN = {"door": {"open_to_all": True}}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "ams1.example.com", ""])
def test_a_listener_beyond_this_machine_starts_only_with_an_access_rule(host: str) -> None:
    there = {"host": host, "port": 1}
    sites = [{"name": "a", "url": "http://h", "place": PLACE}]
    for table, values in (
        (SiteConfig, site(listen=there)),
        (NetworkConfig, {"listen": there, "place": PLACE, "sites": sites}),
    ):
        with pytest.raises(ConfigError, match=r"require_key = true under .door. .*or set open_to_all = true"):
            parse(table, values, "file")
        for allowed in (KEYS, OPEN):
            parse(table, {**values, **allowed}, "file")
    parse(SiteConfig, site(listen={**there, "require_hop": True}), "file")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_listener_on_this_machine_needs_no_keys(host: str) -> None:
    parse(SiteConfig, site(listen={"host": host, "port": 1}), "file")


def test_access_rules_that_admit_no_client_are_refused() -> None:
    assert "there are no [[keys]]" in refusal(site(door={"require_key": True}))
    assert "key name 'acme' is used twice" in refusal(site(keys=[KEY, KEY]))
    assert "keys.0.key_sha256" in refusal(site(keys=[{"name": "a", "key_sha256": "secret"}]))


def test_a_site_serves_models_or_functions() -> None:
    assert "the file has nothing to serve: add a model under [[models]], or functions" in refusal(site(models=[]))
    for served in ({"directory": "f"}, {"deployments": "http://router"}, {"serve": [{"name": "f", "path": "f"}]}):
        assert parse(SiteConfig, site(models=[], functions=served), "test").models == ()


def test_an_array_whose_only_entry_is_wrong_is_not_also_called_too_short() -> None:
    message = refusal(site(models=[{"name": "m", "source": "s", "dtype": "int8"}]))
    assert message.count("\n") == 0
    assert "models.0.dtype: must be 'auto', 'float32' or 'bfloat16', not 'int8'" in message


def test_a_url_with_a_path_is_refused() -> None:
    values = {"listen": {"port": 1}, "place": PLACE, "sites": [{"name": "a", "url": "http://h/x", "place": PLACE}]}
    with pytest.raises(ConfigError, match="without a path"):
        parse(NetworkConfig, values, "network.toml")


def test_unreadable_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_site(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_site(tmp_path)
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_site(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:8791"),
        ({"host": "::1"}, "http://[::1]:8791"),
        ({"host": "::1", "tls_certificate": "c", "tls_key": "k"}, "https://[::1]:8791"),
    ],
)
def test_the_url_of_a_listener_is_one_that_clients_accept(listen: dict[str, object], url: str) -> None:
    listening = parse(SiteConfig, site(listen={"port": 8791, **listen}), "test").listen
    assert listening.url() == url
    assert listening.url(9000) == url.replace("8791", "9000")


def test_a_home_that_does_not_exist_is_refused_with_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "~no-such-user/state")
    with pytest.raises(ConfigError, match="no home directory: set HOME, or XDG_STATE_HOME"):
        state_directory("ams1")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/lib")
    assert state_directory("ams1") == Path("/var/lib/pilotlight/ams1")


def test_values_are_frozen() -> None:
    config = parse(SiteConfig, site(), "ams1.toml")
    with pytest.raises(AttributeError, match="immutable"):
        config.name = "x"  # type: ignore[misc]


@pytest.mark.parametrize("file_name", FILES)
def test_the_schemas_for_editors_are_current(file_name: str) -> None:
    assert (HERE / file_name).read_text() == render(FILES[file_name]), "run `python -m load_tests.config_schema`"
    json.loads((HERE / file_name).read_text())


def test_a_secret_that_could_be_guessed_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PILOTLIGHT_TEST_SECRET", raising=False)
    check_secrets("PILOTLIGHT_TEST_SECRET")
    monkeypatch.setenv("PILOTLIGHT_TEST_SECRET", "x" * MIN_SECRET_BYTES)
    check_secrets("PILOTLIGHT_TEST_SECRET")
    monkeypatch.setenv("PILOTLIGHT_TEST_SECRET", "x" * (MIN_SECRET_BYTES - 1))
    with pytest.raises(ConfigError, match="PILOTLIGHT_TEST_SECRET has fewer than 16 bytes"):
        check_secrets("PILOTLIGHT_TEST_SECRET")


@pytest.mark.parametrize("secret", ["short", "", f"{'x' * 32},short"])
def test_a_short_secret_of_a_file_is_refused_with_the_name_of_the_file(secret: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(secret)
    with pytest.raises(ConfigError, match=rf"hop\.secret_file {file} has fewer than 16 bytes"):
        HopConfig(secret_file=str(file)).secret()
    file.write_text("x" * 32 + "\n")
    assert HopConfig(secret_file=str(file)).secret() == "x" * 32


def test_a_file_of_keys_is_judged_as_those_of_a_site_are(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "k"\nkey_sha256 = "%s"\naccount = "a"\n' % ("0" * 64))
    with pytest.raises(ConfigError, match=r"keys.toml: .*the account 'a', which is not among \[\[accounts\]\]"):
        load_keys(file)
    file.write_text(file.read_text() + '[[accounts]]\nname = "a"\n')
    kept = load_keys(file)
    assert ([key.name for key in kept.keys], [account.name for account in kept.accounts]) == (["k"], ["a"])


@pytest.mark.parametrize(
    ("otlp", "taken"), [("http://127.0.0.1:4318/", "http://127.0.0.1:4318"), ("http://c:1", "http://c:1"), (None, None)]
)
def test_a_collectors_url_is_taken_with_or_without_its_last_slash(otlp: str | None, taken: str | None) -> None:
    telemetry = {} if otlp is None else {"otlp": otlp}
    assert parse(SiteConfig, site(telemetry=telemetry), "ams1.toml").telemetry.otlp == taken
    assert "telemetry" in refusal(site(telemetry={"otlp": "collector:4317"}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "a" * 200}, "name: must"),
        ({"engine": {"kv_host_gib": -1}}, "engine.kv_host_gib: must be at least 0, not -1"),
        ({"engine": {"devices": []}}, "engine.devices: must have at least 1 item, not 0"),
        ({"listen": {"port": 70000}}, "listen.port: must be at least 0 and at most 65535, not 70000"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused_with_them(changes: dict[str, object], complaint: str) -> None:
    assert complaint in refusal(site(**changes))


def test_a_directory_of_responses_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    responses = ResponsesConfig(directory=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"responses\.directory {tmp_path}/file cannot be used: .*File exists"):
        responses.make_directory()
    ResponsesConfig(directory=responses.directory, max_gib=0.0).make_directory()
    ResponsesConfig(directory=str(tmp_path / "a" / "b")).make_directory()
    assert (tmp_path / "a" / "b").is_dir()

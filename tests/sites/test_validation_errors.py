"""A refused file gets all of its errors, and no others: the detailed check refuses the same files as msgspec.convert."""

import copy
import datetime
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.sites.config import parse
from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import EngineConfig, SiteConfig
from pilotlight.sites.table import Table
from pilotlight.sites.validation_errors import sentences

PLACE = {"city": "Amsterdam", "latitude": 52.3, "longitude": 4}
SITE: dict[str, Any] = {
    "name": "ams1",
    "place": dict(PLACE),
    "listen": {"host": "::1", "port": 1, "require_hop": True},
    "engine": {"device": "cpu", "threads": 2, "kv_gib": 1, "kv_host_gib": 0.5, "kv_disk_dir": "/d", "standby": False},
    "models": [
        {
            "name": "m",
            "source": "s",
            "aliases": ["a", "b"],
            "dtype": "float32",
            "sleep_after_s": 3,
            "residency": "auto",
        },
        {"name": "n", "source": "s", "priority": -8},
    ],
    "functions": {
        "serve": [{"name": "f", "path": "p"}, {"name": "g", "path": "p", "environment": "e"}],
        "r2": {"photos": {"endpoint": "https://s3.example.com", "path_style": False}},
        "min_tier": 2,
        "egress_allow": ["h:1"],
        "sockets": 900,
    },
    "limits": {"max_body_mib": 1, "drain_timeout_s": 0},
}
NETWORK: dict[str, Any] = {
    "listen": {"port": 0, "tls_certificate": "c", "tls_key": "k"},
    "clients": {"front_ends": ["10.0.0.0/8"]},
    "accounts": [{"name": "t", "tokens_per_min": 2.5}],
    "keys": [{"name": "t", "key_sha256": "0" * 64}],
    "place": dict(PLACE),
    "sites": [
        {"name": "ams1", "url": "http://h:1/", "place": dict(PLACE)},
        {"name": "iad1", "url": "https://h", "place": dict(PLACE)},
    ],
    "health": {"interval_s": 1},
}
FILES: dict[type[Table], dict[str, Any]] = {SiteConfig: SITE, NetworkConfig: NETWORK}


def steps(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of keys and indices to every nested value."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from steps(value, (*path, key))


def at(values: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400) | st.integers(-10, 2000),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["a", "m", "f", "ams1", "ams1\n", "x" * 64, "x" * 201, "cpu", "cuda", "http://h", "http://h/x", "http://["]
    ),
    st.sampled_from(["1", "true", "null", "10.0.0.1/8", "0" * 64, "0" * 64 + "\n"]),
    st.lists(st.sampled_from(["a", "cpu", "cuda:0", 1, {}]), max_size=2),
    st.dictionaries(st.sampled_from(["name", "port", "a"]), st.integers() | st.text(max_size=3), max_size=2),
    st.sampled_from([datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.time(1)]),
)
KEYS = st.sampled_from(["nmae", "device", "devices", "kv_disk_dir", "threads", "tls_key", "1"])


@st.composite
def mutated(draw: st.DrawFn) -> tuple[type[Table], dict[str, Any]]:
    table = draw(st.sampled_from(list(FILES)))
    values = copy.deepcopy(FILES[table])
    for _ in range(draw(st.integers(0, 5))):
        where = draw(st.sampled_from(list(steps(values))))
        parent, key = at(values, where[:-1]), where[-1]
        change = draw(st.sampled_from(["replace", "replace", "drop", "add"]))
        if change == "drop" and len(parent) > 1:
            del parent[key]
        elif change == "add" and isinstance(parent, dict):
            parent[draw(KEYS)] = draw(JUNK)
        else:
            parent[key] = draw(JUNK)
    return table, values


def is_taken(table: type[Table], values: Any) -> bool:
    try:
        msgspec.convert(values, table)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(mutated())
def test_a_file_has_mistakes_if_and_only_if_it_is_refused(file: tuple[type[Table], dict[str, Any]]) -> None:
    table, values = file
    found = sentences(table, values)
    assert bool(found) is not is_taken(table, values)
    assert len(set(found)) == len(found)
    for sentence in found:
        assert "Expected" not in sentence, "msgspec's own words are not shown"
        assert "must be a string, not '" not in sentence, "a value of the right type must get an error about its bounds"


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mistakes_in_several_places_are_all_named_at_once(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(list(FILES)))
    leaves = [where for where in steps(FILES[table]) if not isinstance(at(FILES[table], where), dict | list)]
    expected, both = set[str](), copy.deepcopy(FILES[table])
    for where in data.draw(st.lists(st.sampled_from(leaves), min_size=2, max_size=6, unique=True)):
        junk, alone = data.draw(JUNK), copy.deepcopy(FILES[table])
        at(alone, where[:-1])[where[-1]] = at(both, where[:-1])[where[-1]] = junk
        named = ".".join(map(str, where))
        expected |= {line for line in sentences(table, alone) if line.startswith(f"{named}:") or f"{named}." in line}
    assert expected <= set(sentences(table, both))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"listen": {"port": 70000}}, "listen.port: must be at least 0 and at most 65535, not 70000"),
        ({"listen": {"port": "8101"}}, "listen.port: must be an integer, not '8101'"),
        ({"listen": {"port": 8101.0}}, "listen.port: must be an integer, not 8101.0"),
        ({"listen": {"port": True}}, "listen.port: must be an integer, not true"),
        (
            {"listen": {"port": 10**5000}},
            "listen.port: must be at least 0 and at most 65535, not a number of many digits",
        ),
        ({"listen": {"port": 1, "require_hop": 1}}, "listen.require_hop: must be true or false, not 1"),
        ({"listen": {"port": 1, "require_hop": "yes"}}, "listen.require_hop: must be true or false, not 'yes'"),
        ({"listen": {}}, "listen.port: is missing"),
        ({"listen": []}, "listen: must be a table, not an array"),
        (
            {"place": {**PLACE, "latitude": float("nan")}},
            "place.latitude: must be at least -90 and at most 90, not nan",
        ),
        ({"engine": {"kv_gib": 0}}, "engine.kv_gib: must be above 0, not 0"),
        ({"engine": {"kv_gib": 10**400}}, "engine.kv_gib: is a number with too many digits"),
        ({"engine": {"threads": 0}}, "engine.threads: must be at least 1, not 0"),
        ({"engine": {"threads": None, "device": None}}, "engine.device: must be a string, not null"),
        ({"engine": {"devices": []}}, "engine.devices: must have at least 1 item, not 0"),
        (
            {"engine": {"devices": ["cpu"], "device": "auto"}},
            "engine: device and devices are both set: remove one of them",
        ),
        ({"engine": {"device": datetime.date(2020, 1, 2)}}, "engine.device: must be a string, not 2020-01-02"),
        (
            {"models": [{"name": "", "source": "s"}]},
            "models.0.name: must have at least 1 character and at most 200 characters, not 0",
        ),
        ({"name": "ams1\n"}, r"name: must match ^[a-z0-9][a-z0-9._-]{0,62}$, which 'ams1\n' does not"),
        ({"name": "A" * 99}, f"name: must match ^[a-z0-9][a-z0-9._-]{{0,62}}$, which '{'A' * 59}... does not"),
        ({"name": "db://u:secret@h"}, "name: must match ^[a-z0-9][a-z0-9._-]{0,62}$, which 'db:...@h' does not"),
        (
            {"responses": {"store": "postgresql://h/d"}},
            "unknown key 'responses.store'. Valid here: directory, keep_days, max_gib",
        ),
        ({"models": {"name": "m"}}, "models: must be an array, not a table; each of its tables begins with [[models]]"),
        (
            {"functions": {"serve": {"name": "f"}}},
            "functions.serve: must be an array, not a table; each of its tables begins with [[functions.serve]]",
        ),
        ({"engine": {"devices": {}}}, "engine.devices: must be an array, not a table"),
        ({"functions": {"min_tier": 4}}, "functions.min_tier: must be 1, 2 or 3, not 4"),
        ({"functions": {"egress_allow": ["h", 1]}}, "functions.egress_allow.1: must be a string, not 1"),
        (
            {"functions": {"r2": {"photos": {"endpoint": "s3"}}}},
            "functions.r2.photos.endpoint: must be http(s)://host[:port], with or without a path",
        ),
        (
            {"functions": {"r2": {"photos": {"endpoint": "http://h", "regoin": ""}}}},
            "unknown key 'functions.r2.photos.regoin'; did you mean 'region'? Valid here: access_key_id_env, bucket, credentials_file, "
            "endpoint, path_style, profile, region, secret_access_key_env, session_token_env",
        ),
    ],
)
def test_a_mistake_is_a_sentence_that_says_what_to_change(change: dict[str, Any], expected: str) -> None:
    assert sentences(SiteConfig, {**SITE, **change}) == [expected]


def test_a_rule_of_one_field_is_named_beside_the_mistakes_of_others() -> None:
    engine = {"device": "gpu", "kv_gib": -1, "kv_disk_dir": "/d"}
    assert sentences(SiteConfig, {**SITE, "engine": engine, "name": 1}) == [
        "name: must be a string, not 1",
        "engine.device: 'gpu' is not a device: use auto, cpu, cuda or cuda:N",
        "engine.kv_gib: must be above 0, not -1",
    ]


NO_DRAFTER = (
    "is not a drafter: use auto, off, or a comma-separated list of suffix, grammar, "
    "and at most one of draft:DIRECTORY, eagle3:DIRECTORY, mtp"
)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("fast", f"'fast' {NO_DRAFTER}"),
        ("suffix,auto", f"'auto' {NO_DRAFTER}"),
        ("suffix, grammar", f"' grammar' {NO_DRAFTER}"),
        ("draft:", f"'draft:' {NO_DRAFTER}"),
        ("suffix,suffix", "'suffix,suffix' names a drafter twice"),
        ("draft:/a,mtp", "'draft:/a,mtp' names several drafters with weights, but only one can be loaded"),
    ],
)
def test_drafters_are_known_by_name(words: str, why: str) -> None:
    model = SITE["models"][0]
    assert sentences(SiteConfig, {**SITE, "models": [{**model, "speculate": words}]}) == [f"models.0.speculate: {why}"]
    for known in ("grammar,suffix", "suffix,draft:/models/small", "eagle3:head", "mtp"):
        parse(SiteConfig, {**SITE, "models": [{**model, "speculate": known}]}, "ams1.toml")


def test_a_file_that_is_no_table_is_refused() -> None:
    assert sentences(SiteConfig, 3) == ["must be a table, not 3"]


def test_a_mistake_of_the_whole_file_names_no_key() -> None:
    (found,) = sentences(SiteConfig, {**SITE, "models": [], "functions": {}})
    assert found.startswith("the file has nothing to serve: add a model under [[models]]")


def test_integers_stand_for_floats_and_arrays_become_tuples() -> None:
    config = parse(SiteConfig, SITE, "ams1.toml")
    assert (config.engine.kv_gib, type(config.engine.kv_gib)) == (1.0, float)
    assert config.models[0].aliases == ("a", "b")
    assert config.functions.r2["photos"].endpoint == "https://s3.example.com"


def test_the_devices_of_a_table_that_names_none_are_chosen_by_the_engine() -> None:
    assert EngineConfig().all_devices == ("auto",)
    assert parse(EngineConfig, {"device": "cuda:1"}, "f").all_devices == ("cuda:1",)
    assert parse(EngineConfig, {"devices": ["cpu", "cpu"]}, "f").all_devices == ("cpu", "cpu")


def test_a_url_is_kept_without_its_last_slash() -> None:
    assert [site.url for site in parse(NetworkConfig, NETWORK, "network.toml").sites] == ["http://h:1", "https://h"]


@pytest.mark.process
def test_a_good_file_waits_for_nothing_that_explains_a_bad_one() -> None:
    program = (
        "import sys; from pilotlight.sites.site import LOCAL, load_site; load_site(LOCAL / 'ams1.toml'); "
        "print(*({'pilotlight.sites.validation_errors', 'difflib', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"

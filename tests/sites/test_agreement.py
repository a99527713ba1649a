"""Values of a network file or a site file that are valid alone but conflict with others, each beside the nearest valid values.

The error names the conflict.
"""

from datetime import UTC, datetime
from typing import Any

import pytest

from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import SiteConfig

PLACE = {"city": "Amsterdam", "latitude": 52.3, "longitude": 4.8}
AMS1 = {"name": "ams1", "url": "http://127.0.0.1:1", "place": PLACE, "region": "eu"}
EMBER = {"name": "ember", "source": "embedded:ember"}
DAY = {"name": "acme", "tokens_per_day": 5}
KEY = {"name": "k", "key_sha256": "0" * 64}
SOON = datetime(2027, 1, 1, tzinfo=UTC)
ROTATED = {**KEY, "former_sha256": "1" * 64, "former_expires": SOON}
PAIR, KV = [["cuda:0", "cuda:1"]], {"kv_host_gib": 0.1}
FOUR = [["cuda:0", "cuda:1", "cuda:2", "cuda:3"]]
SPLIT = [{"device": "cuda:0", "role": "prefill"}, {"device": "cuda:1", "role": "decode"}]
Tables = dict[str, Any]


def network(**tables: Any) -> NetworkConfig:
    plain = {"listen": {"port": 0}, "place": PLACE, "sites": [AMS1]}
    return parse(NetworkConfig, {**plain, **tables}, "network.toml")


def site(**tables: Any) -> SiteConfig:
    plain = {"name": "ams1", "place": PLACE, "listen": {"port": 1}, "models": [EMBER]}
    return parse(SiteConfig, {**plain, **tables}, "ams1.toml")


def objective(**fields: Any) -> Tables:
    return {"objectives": [{"model": "a", **fields}]}


def engine(**fields: Any) -> Tables:
    return {"engine": fields}


def model(**fields: Any) -> Tables:
    return {"models": [{**EMBER, **fields}]}


NETWORKS: list[tuple[str, Tables, Tables]] = [
    ("site name 'ams1' is used twice", {"sites": [AMS1, AMS1]}, {"sites": [AMS1, {**AMS1, "name": "iad1"}]}),
    ("needs answered", objective(), objective(answered=0.9)),
    ("belong together", objective(first_token=0.9), objective(first_token=0.9, first_token_ms=100.0)),
    ("belong together", objective(answered=0.9, first_token_ms=100.0), objective(answered=0.9)),
    (
        "objective's model 'a' is used twice",
        {"objectives": [{"model": "a", "answered": 0.9}] * 2},
        {"objectives": [{"model": name, "answered": 0.9} for name in "ab"]},
    ),
    ("set ledger.directory", {"accounts": [DAY]}, {"accounts": [DAY], "ledger": {"directory": "/var/l"}}),
    ("set ledger.directory", {"accounts": [{"name": "a", "cost_per_day": 1.0}]}, {"accounts": [{"name": "a"}]}),
    ("account name 'a' is used twice", {"accounts": [{"name": "a"}] * 2}, {"accounts": [{"name": "a"}]}),
    ("key name 'k' is used twice", {"keys": [KEY, {**KEY, "key_sha256": "1" * 64}]}, {"keys": [KEY]}),
    ("key's digest '0+' is used twice", {"keys": [KEY, {**KEY, "name": "l"}]}, {"keys": [KEY]}),
    ("key's digest '0+' is used twice", {"keys": [{**ROTATED, "former_sha256": "0" * 64}]}, {"keys": [ROTATED]}),
    (
        "key's digest '1+' is used twice",
        {"keys": [ROTATED, {**KEY, "name": "l", "key_sha256": "1" * 64}]},
        {"keys": [ROTATED, {**KEY, "name": "l", "key_sha256": "2" * 64}]},
    ),
    *(
        ("former_sha256 and former_expires belong together", {"keys": [half]}, {"keys": [ROTATED]})
        for half in ({**KEY, "former_sha256": "1" * 64}, {**KEY, "former_expires": SOON})
    ),
    (
        "names the account 'b', which is not among",
        {"keys": [{**KEY, "account": "b"}]},
        {"keys": [{**KEY, "account": "b"}], "accounts": [{"name": "b"}]},
    ),
    (
        "data of the account a names the site 'iad1', which no",
        {"accounts": [{"name": "a", "data": {"sites": ["iad1"]}}]},
        {"accounts": [{"name": "a", "data": {"sites": ["ams1"]}}]},
    ),
    (
        "data of the model m names the region 'us', which no",
        {"models": [{"model": "m", "data": {"regions": ["us"]}}]},
        {"models": [{"model": "m", "data": {"regions": ["eu"]}}, {"model": "n"}]},
    ),
    ("names no site", {"models": [{"model": "m", "data": {}}]}, {"models": [{"model": "m"}]}),
    (
        "belong together",
        {"listen": {"port": 0, "tls_key": "k"}},
        {"listen": {"port": 0, "tls_key": "k", "tls_certificate": "c"}},
    ),
]
SITES: list[tuple[str, Tables, Tables]] = [
    ("kv_gib is larger than any machine's memory", engine(kv_gib=float("inf")), engine(kv_gib=1e9)),
    ("max_body_mib is larger than", {"limits": {"max_body_mib": 1e308}}, {"limits": {"max_body_mib": 1.0}}),
    ("devices are both set", engine(device="cpu", devices=["cpu"]), engine(devices=["cpu"])),
    (
        "devices are both set",
        engine(hosts=[{"device": "cpu", "devices": ["cpu", "cpu"]}]),
        engine(hosts=[{"devices": ["cpu", "cpu"]}]),
    ),
    ("each host names its own", engine(device="cpu", hosts=[{"device": "cpu"}]), engine(hosts=[{"device": "cpu"}])),
    ("no host can answer", engine(hosts=SPLIT[:1], **KV), engine(hosts=SPLIT, **KV)),
    ("no host can compute prompts", engine(hosts=SPLIT[1:], **KV), engine(hosts=SPLIT, **KV)),
    ("different roles need kv_host_gib", engine(hosts=SPLIT), engine(hosts=SPLIT, **KV)),
    (
        "shift_roles needs hosts",
        engine(hosts=SPLIT, shift_roles=True, scale_up_wait_s=0, **KV),
        engine(hosts=SPLIT, shift_roles=True, scale_up_wait_s=1.0, **KV),
    ),
    ("shift_roles needs hosts", engine(shift_roles=True), engine(shift_roles=False)),
    (
        "expert_parallel needs a group of devices",
        engine(devices=["cuda:0", "cuda:1"], expert_parallel=True),
        engine(devices=PAIR, expert_parallel=True),
    ),
    (
        "redundant_experts needs expert_parallel",
        engine(devices=PAIR, redundant_experts=2),
        engine(devices=PAIR, redundant_experts=2, expert_parallel=True),
    ),
    (
        "redundant_experts is 3, but must be a multiple of 2",
        engine(devices=PAIR, redundant_experts=3, expert_parallel=True),
        engine(devices=PAIR, redundant_experts=4, expert_parallel=True),
    ),
    (
        "redundant_experts is 3, but must be a multiple of 2",
        engine(devices=FOUR, stages=2, redundant_experts=3, expert_parallel=True),
        engine(devices=FOUR, stages=2, redundant_experts=2, expert_parallel=True),
    ),
    (
        "data_parallel needs expert_parallel",
        engine(devices=PAIR, data_parallel=2),
        engine(devices=PAIR, data_parallel=2, expert_parallel=True),
    ),
    (
        "data_parallel is 3, but must divide the 2 devices",
        engine(devices=PAIR, data_parallel=3, expert_parallel=True),
        engine(devices=PAIR, data_parallel=1, expert_parallel=True),
    ),
    (
        "data_parallel is 4, but must divide the 2 devices",
        engine(devices=FOUR, stages=2, data_parallel=4, expert_parallel=True),
        engine(devices=FOUR, stages=2, data_parallel=2, expert_parallel=True),
    ),
    ("stages needs a group of devices", engine(devices=["cuda:0", "cuda:1"], stages=2), engine(devices=PAIR, stages=2)),
    ("2 devices cannot be divided into 3 equal stages", engine(devices=PAIR, stages=3), engine(devices=PAIR, stages=1)),
    ("kv_disk_dir needs", engine(kv_disk_dir="/kv"), engine(kv_disk_dir="/kv", **KV)),
    ("kv_store needs", engine(kv_store="m:1"), engine(kv_store="m:1", **KV)),
    ("read their parts from disk", {**engine(devices=PAIR), **model(residency="host")}, {**engine(devices=PAIR), **model(residency="auto")}),
    ("weights_host_gib is 0", {**engine(weights_host_gib=0), **model(residency="host")}, {**engine(weights_host_gib=1), **model(residency="host")}),
    ("remove sleep_after_s", model(residency="device", sleep_after_s=9.0), model(residency="auto", sleep_after_s=9.0)),
    (
        "adapter of ember 'a' is used twice",
        model(adapters=[{"name": "a", "path": "/a"}] * 2),
        model(adapters=[{"name": name, "path": "/a"} for name in "ab"]),
    ),
    (
        "model name 'ember' is used twice",
        {"models": [EMBER, {**EMBER, "name": "b", "aliases": ["ember"]}]},
        {"models": [EMBER, {**EMBER, "name": "b"}]},
    ),
    ("names the account 'b', which is not among", {"keys": [{**KEY, "account": "b"}]}, {"keys": [KEY]}),
    ("is named twice", engine(devices=["cuda:0", "cuda:0"]), engine(devices=["cpu", "cpu"])),
    ("comes first", engine(devices=[["ray:cuda", "cuda:0"]]), engine(devices=[["cuda:0", "ray:cuda"]])),
    ("differs between CPUs and GPUs", engine(devices=["cpu", "cuda:0"]), engine(devices=["cuda:1", "cuda:0"])),
]  # fmt: skip


@pytest.mark.parametrize(("make", "says", "wrong", "right"), [
    *((network, *row) for row in NETWORKS), *((site, *row) for row in SITES),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(make: Any, says: str, wrong: Tables, right: Tables) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**wrong)
    make(**right)

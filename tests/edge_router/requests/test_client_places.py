"""Clients' locations: trusted headers, results of a database, and databases that are damaged or replaced."""

import os
from pathlib import Path

import msgspec
import pytest
from mmdb_writer import MMDBWriter
from netaddr import IPSet

from pilotlight.edge_router.requests.client_places import ClientPlaces, PlaceDatabase, place_in
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.network import ClientsConfig, NetworkConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.status import Place
from tests.edge_router.builders import network
from tests.edge_router.fakes import router, sites

AMSTERDAM = {"location": {"latitude": 52.31, "longitude": 4.76}}
WASHINGTON = {"location": {"latitude": 38.94, "longitude": -77.46}}


def write(file: Path, records: dict[str, object], kind: str = "GeoLite2-City") -> Path:
    """Replace a database as geoipupdate does: write a new file, then rename it."""
    writer = MMDBWriter(6, kind, languages=["en"], description={"en": "made by a test"}, ipv4_compatible=True)
    for prefix, record in records.items():
        writer.insert_network(IPSet([prefix]), record)
    beside = file.with_suffix(".new")
    writer.to_db_file(str(beside))
    os.replace(beside, file)
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "city.mmdb", {"192.0.2.0/24": AMSTERDAM, "2001:db8::/32": WASHINGTON, "198.51.100.0/24": {}}
    )


@pytest.mark.parametrize(
    ("address", "latitude"),
    [("192.0.2.7", 52.31), ("::ffff:192.0.2.7", 52.31), ("2001:db8::1", 38.94), ("198.51.100.1", None), ("203.0.113.9", None),
     ("", None), ("unix", None)],
)  # fmt: skip
def test_an_address_is_looked_up(file: Path, address: str, latitude: float | None) -> None:
    place = ClientPlaces((), PlaceDatabase(file)).place(address, "", is_hop=False)
    assert (place and place.latitude) == latitude


@pytest.mark.parametrize(
    ("address", "is_hop", "is_believed"),
    [("10.1.2.3", False, True), ("::ffff:10.1.2.3", False, True), ("2001:db8::1", False, True), ("11.1.2.3", False, False),
     ("11.1.2.3", True, True), ("", False, False)],
)  # fmt: skip
def test_the_header_is_believed_from_front_ends_and_routers(address: str, is_hop: bool, is_believed: bool) -> None:
    places = ClientPlaces(("10.0.0.0/8", "2001:db8::/32"))
    assert places.place(address, "1.5,2.5", is_hop) == (Place("client", 1.5, 2.5) if is_believed else None)
    if is_believed:
        with pytest.raises(ApiError, match=r"x-client-geo"):
            places.place(address, "nowhere", is_hop)
    else:
        assert places.place(address, "nowhere", is_hop) is None, "an untrusted place is not even parsed"


def test_a_front_ends_word_comes_before_the_database(file: Path) -> None:
    places = ClientPlaces(("192.0.2.0/24",), PlaceDatabase(file))
    assert places.place("192.0.2.7", "1,2", is_hop=False) == Place("client", 1.0, 2.0)
    assert places.place("192.0.2.7", "", is_hop=False) == Place("client", 52.31, 4.76)


def test_a_replaced_database_is_read_again_and_a_damaged_one_is_not_taken(file: Path) -> None:
    database = PlaceDatabase(file)
    assert database.place("203.0.113.9") is None
    assert not database.look()
    write(file, {"203.0.113.0/24": WASHINGTON})
    assert database.look()
    assert database.place("203.0.113.9") == Place("client", 38.94, -77.46)
    whole = file.read_bytes()
    for damaged in (b"", whole[:-200], b"no database at all" * 100):
        beside = file.with_suffix(".new")
        beside.write_bytes(damaged)
        os.replace(beside, file)
        assert not database.look()
        assert database.place("203.0.113.9") == Place("client", 38.94, -77.46)


@pytest.mark.parametrize("at", range(40, 1600, 97))
def test_a_database_with_damaged_bytes_costs_no_request(file: Path, tmp_path: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    at %= len(raw)
    raw[at : at + 8] = b"\xff" * len(raw[at : at + 8])
    damaged = tmp_path / "damaged.mmdb"
    damaged.write_bytes(raw)
    try:
        database = PlaceDatabase(damaged)
    except ConfigError:
        return
    for address in ("192.0.2.7", "2001:db8::1", "203.0.113.9"):
        assert database.place(address) is None or isinstance(database.place(address), Place)


@pytest.mark.parametrize(
    ("location", "is_one"),
    [
        ({"latitude": 90.0, "longitude": -180.0}, True),
        ({"latitude": -90.0, "longitude": 180.0}, True),
        ({"latitude": 90.1, "longitude": 0.0}, False),
        ({"latitude": -90.1, "longitude": 0.0}, False),
        ({"latitude": 0.0, "longitude": 180.1}, False),
        ({"latitude": 0.0, "longitude": -180.1}, False),
        ({"latitude": float("nan"), "longitude": 0.0}, False),
        ({"latitude": "1", "longitude": 0.0}, False),
        ({"latitude": 1.0}, False),
        ({}, False),
        ("here", False),
    ],
)
def test_what_a_database_says_is_a_place_where_it_is_on_the_globe(location: object, is_one: bool) -> None:
    assert (place_in({"location": location}) is not None) is is_one
    assert place_in(location) is None
    assert place_in(None) is None


def test_without_a_database_a_front_ends_word_is_all_that_is_known(file: Path) -> None:
    places = ClientPlaces.of(ClientsConfig(front_ends=("10.0.0.0/8",)))
    assert places.database is None
    assert places.place("10.1.2.3", "1.5,2.5", is_hop=False) == Place("client", 1.5, 2.5)
    assert places.place("10.1.2.3", "", is_hop=False) is None
    with_both = ClientPlaces.of(ClientsConfig(front_ends=("10.0.0.0/8",), geo_database=str(file)))
    assert with_both.place("10.1.2.3", "1.5,2.5", is_hop=False) == Place("client", 1.5, 2.5)
    assert with_both.place("192.0.2.7", "", is_hop=False) == Place("client", 52.31, 4.76)


def test_what_cannot_be_used_stops_the_start_with_the_reason(tmp_path: Path) -> None:
    countries = write(tmp_path / "country.mmdb", {"192.0.2.0/24": {"country": {"iso_code": "NL"}}}, "GeoLite2-Country")
    with pytest.raises(ConfigError, match=r"no coordinates.*GeoLite2-Country.*cities"):
        ClientPlaces.of(ClientsConfig(geo_database=str(countries)))
    with pytest.raises(ConfigError, match=r"geo_database .*none.mmdb cannot be used: .*No such file"):
        ClientPlaces.of(ClientsConfig(geo_database=str(tmp_path / "none.mmdb")))
    values = msgspec.to_builtins(network({"ams1": "http://127.0.0.1:1"}))
    with pytest.raises(ConfigError, match=r"clients.front_ends: .*10.0.0.1/8.*write 10.1.0.0/16"):
        parse(NetworkConfig, {**values, "clients": {"front_ends": ["10.0.0.1/8"]}}, "network.toml")


@pytest.mark.process
async def test_a_request_goes_to_the_site_nearest_to_where_its_address_stands(tmp_path: Path) -> None:
    file = write(tmp_path / "city.mmdb", {"127.0.0.0/8": WASHINGTON, "192.0.2.0/24": AMSTERDAM})
    tables = {"clients": {"front_ends": [], "geo_database": str(file)}}
    async with sites("ams1", "iad1") as fakes, router(fakes, tables=tables) as running:
        headers = {"x-client-geo": "52.3,4.8"}  # the header is not trusted, because there is no front end
        async with running.http.post(
            running.url + "/v1/chat/completions", json={"model": "ember", "messages": []}, headers=headers
        ) as answer:
            assert answer.headers["x-pilotlight-route"].split(";")[0].endswith("iad1")
        for query, first in (("", "iad1"), ("&address=192.0.2.1", "ams1")):
            url = f"{running.url}/debug/route?model=ember{query or '&address=127.0.0.1'}"
            async with running.http.get(url) as asked:
                assert (await asked.json())["ranking"][0]["site"] == first

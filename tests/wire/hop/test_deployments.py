"""Deployments: which version of a function a client gets, and which names of functions and bundles are invalid."""

from collections import Counter

import msgspec
import pytest

from pilotlight.wire.hop.bundles import DIGEST
from pilotlight.wire.hop.deployments import Deployment, NewVersion, Serve, Share, Version

DIGESTS = tuple("abc"[i] * 64 for i in range(3))


def deployment(*shares: tuple[int, float], name: str = "f") -> Deployment:
    versions = tuple(Version(number, DIGESTS[number], 0.0) for number in range(3))
    return Deployment(name, 1, versions, tuple(Share(number, percent) for number, percent in shares))


def numbers(of: Deployment) -> dict[str, int]:
    """Return the version number that each of a thousand clients gets."""
    chosen = {f"client {i}": of.chosen(f"client {i}") for i in range(1000)}
    return {key: version.number for key, version in chosen.items() if version is not None}


def test_a_client_has_a_permanent_place_at_all_routers_and_for_all_versions() -> None:
    """The first 48 bits of the SHA-256 of "hello", a zero byte and "client-1" place the client at 2.347 percent."""
    for percent, number in ((2.3, 0), (2.4, 1)):
        chosen = deployment((1, percent), (0, 100 - percent), name="hello").chosen("client-1")
        assert chosen is not None
        assert chosen.number == number


def test_clients_are_divided_as_the_shares_say_and_keep_the_newest_while_it_grows() -> None:
    before, after = numbers(deployment((1, 10.0), (0, 90.0))), numbers(deployment((1, 60.0), (0, 40.0)))
    assert 60 <= Counter(before.values())[1] <= 140
    assert 540 <= Counter(after.values())[1] <= 660
    assert all(after[key] == 1 for key, number in before.items() if number == 1)
    assert set(numbers(deployment((2, 100.0))).values()) == {2}
    assert numbers(deployment()) == {}
    assert set(numbers(deployment((0, 0.0), (1, 0.0))).values()) == {1}, "the last version gets the remainder"
    other = numbers(deployment((1, 10.0), (0, 90.0), name="g"))
    assert sum(number == before[key] == 1 for key, number in other.items()) < 40, (
        "other functions choose other early clients"
    )


@pytest.mark.parametrize("name", ["f", "0", "a" * 63, "a_-b"])
def test_a_functions_name_is_short_and_plain(name: str) -> None:
    assert msgspec.convert({"name": name, "revision": 1}, Serve).name == name


@pytest.mark.parametrize("name", ["", "-a", "A", "a" * 64, "a b", "a/b", "f\n"])
def test_anything_else_is_no_functions_name(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": name, "revision": 1}, Serve)


@pytest.mark.parametrize("digest", ["a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n"])
def test_a_bundles_name_is_a_digest_and_nothing_more(digest: str) -> None:
    assert DIGEST.match(digest) is None
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"digest": digest, "expected_revision": 0}, NewVersion)
    assert DIGEST.match("a" * 64)


@pytest.mark.parametrize(("percent", "is_taken"), [(0.0, False), (0.1, True), (100.0, True), (100.1, False)])
def test_a_version_gets_a_share_of_the_traffic(percent: float, is_taken: bool) -> None:
    values = {"digest": DIGESTS[0], "expected_revision": 0, "percent": percent}
    if is_taken:
        assert msgspec.convert(values, NewVersion).percent == percent
    else:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(values, NewVersion)

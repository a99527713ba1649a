"""Sealed secrets: each opens only with the network's secret, and only for its function and name."""

import pytest

from pilotlight.wire.hop.sealed_secrets import UnsealedError, seal, unseal


def test_a_secret_opens_for_its_function_and_name_alone() -> None:
    sealed = seal("k" * 32, "f", "TOKEN", "välue")
    assert unseal("k" * 32, "f", "TOKEN", sealed) == "välue"
    assert sealed != seal("k" * 32, "f", "TOKEN", "välue")
    for key, function, name, given in (
        ("l" * 32, "f", "TOKEN", sealed),
        ("k" * 32, "g", "TOKEN", sealed),
        ("k" * 32, "f", "OTHER", sealed),
        ("k" * 32, "f", "TOKEN", sealed[:-1]),
        ("k" * 32, "f", "TOKEN", b""),
    ):
        with pytest.raises(UnsealedError):
            unseal(key, function, name, given)


def test_a_secret_stays_readable_at_every_step_of_a_rotation() -> None:
    old, new = "o" * 32, "n" * 32
    for key, readers in (
        (old, (old, f"{old},{new}")),
        (f"{old},{new}", (old, f"{new},{old}")),
        (f"{new},{old}", (f"{old},{new}", new)),
    ):
        sealed = seal(key, "f", "TOKEN", "value")
        for reader in (key, *readers):
            assert unseal(reader, "f", "TOKEN", sealed) == "value"

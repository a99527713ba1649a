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

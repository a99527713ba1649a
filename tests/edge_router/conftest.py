"""A PostgreSQL server for the tests of one file, where its programs are installed."""

from collections.abc import Iterator

import pytest

from load_tests.postgres import Postgres, running_postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    try:
        with running_postgres() as server:
            yield server
    except FileNotFoundError as error:
        pytest.skip(str(error))

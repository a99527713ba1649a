"""A PostgreSQL server for the tests of one file, where its programs are installed."""

from collections.abc import Iterator

import psycopg
import pytest

from load_tests.postgres import Postgres, running_postgres


@pytest.fixture(scope="module")
def postgres(network_tier: None) -> Iterator[Postgres]:
    try:
        with running_postgres() as server:
            yield server
    except FileNotFoundError as error:
        pytest.skip(str(error))


def without_responses(server: Postgres) -> Postgres:
    """Return the server after the tables of stored responses are dropped."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(
            "DROP TABLE IF EXISTS responses, response_items, response_tenants, response_events, response_makers, response_requests"
        )
    return server

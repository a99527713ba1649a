"""An S3 server for tests: moto's, in a thread of this process, with one bucket per test."""

import itertools
from collections.abc import Iterator

import pytest

from pilotlight.functions.bindings.storage.s3 import S3Place

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def s3_endpoint(process_tier: None) -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def s3_place(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    import httpx

    monkeypatch.setenv("TEST_KEY", "site")
    monkeypatch.setenv("TEST_SECRET", "secret")
    bucket = f"bucket-{next(_numbers)}"
    assert httpx.put(f"{s3_endpoint}/{bucket}").status_code == 200
    return S3Place(s3_endpoint, bucket, "us-east-1", access_key_id_env="TEST_KEY", secret_access_key_env="TEST_SECRET")

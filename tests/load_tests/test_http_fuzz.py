"""Some requests of the HTTP fuzzer: our server treats broken requests as others do, or the difference has a known reason."""

import asyncio

import pytest

from load_tests.http_fuzz import Case, Verdict, cases, differences, why
from load_tests.peers.uvicorn_server import SERVERS


@pytest.mark.process
@pytest.mark.parametrize("number", [40, pytest.param(120, marks=pytest.mark.slow)])
def test_broken_requests_are_judged_as_by_other_servers_or_it_is_known_why(number: int) -> None:
    for name in SERVERS[1:]:
        pytest.importorskip(name)
    found = asyncio.run(cases(number, seed=3))
    assert [case.data for case, _, name in differences(found) if not name] == []
    assert any(case.verdicts["own"].is_refused for case in found)
    assert any(case.verdicts["own"].requests for case in found)


def test_a_request_that_another_server_reads_otherwise_is_not_explained() -> None:
    data = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"
    own = Verdict((("POST", (b"/", b""), ((b"host", b"x"),), b"ab"),), False)
    for its in (
        Verdict((("POST", (b"/", b""), ((b"host", b"x"),), b"a"),), False),
        Verdict((("POST", (b"/other", b""), ((b"host", b"x"),), b"ab"),), False),
        Verdict((), True),
        Verdict((*own.requests, *own.requests), False),
    ):
        assert why(Case(data, {"own": own, "uvicorn": its}), "uvicorn") == ""

"""Trace spans within one process: their parents, errors and resource attributes."""

from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.wire.tracing import CURRENT, Spans, otlp_url, shut_down


class Failed(Exception):
    word = "overloaded"


@pytest.fixture
def spans() -> Spans:
    made = Spans("http://127.0.0.1:9", "service", "1", site="ams1")
    made.close()  # nothing is exported
    return made


def test_work_in_a_scope_is_a_part_of_its_span_until_it_ends(spans: Spans) -> None:
    outer = spans.start("outer", {}, "server", {"a": 1}, start_ns=5)
    assert dict(CURRENT.get()) == {}
    with spans.within("inner", spans.as_parent(outer), "internal", {}) as inner:
        assert dict(CURRENT.get()) == spans.as_parent(inner)
        child = spans.start("child", CURRENT.get(), "client", {})
    assert dict(CURRENT.get()) == {}
    traces = {span.get_span_context().trace_id for span in (outer, inner, child)}
    assert len(traces) == 1
    assert child.parent.span_id == inner.get_span_context().span_id  # type: ignore[attr-defined]
    assert (outer.start_time, dict(outer.attributes)) == (5, {"a": 1})  # type: ignore[attr-defined]
    assert [span.kind.name for span in (outer, inner, child)] == ["SERVER", "INTERNAL", "CLIENT"]  # type: ignore[attr-defined]
    assert [span.end_time is None for span in (outer, inner, child)] == [True, False, True]  # type: ignore[attr-defined]
    assert outer.resource.attributes["pilotlight.site"] == "ams1"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("error", "why"), [(Failed(), "overloaded"), (KeyError("k"), "KeyError")])
def test_an_error_marks_its_span_and_is_raised_on(spans: Spans, error: Exception, why: str) -> None:
    with pytest.raises(type(error)), spans.within("work", {}, "server", {}) as span:
        raise error
    assert span.attributes["error.type"] == why  # type: ignore[attr-defined]
    assert span.status.status_code.name == "ERROR"  # type: ignore[attr-defined]
    assert span.end_time is not None  # type: ignore[attr-defined]
    assert dict(CURRENT.get()) == {}


@pytest.mark.parametrize(
    ("collector", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/own", "https://collector.example/own"),
    ],
)
def test_a_collectors_url_without_a_path_gets_that_of_traces(collector: str, url: str) -> None:
    assert otlp_url(collector, "traces") == url


def test_a_collector_that_takes_nothing_holds_up_no_stop() -> None:
    has_begun = Event()

    def shutdown() -> None:
        has_begun.set()
        Event().wait()

    shut_down(cast(Any, SimpleNamespace(shutdown=shutdown)))
    assert has_begun.is_set()

"""Log lines, as text or JSON: each has a time, a process and a level, and a message cannot forge a line."""

import json
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

LINES = """
import logging, subprocess, sys
from pilotlight.support.logs import REQUEST, inherit_logging, start_logging

start_logging(*sys.argv[1:])
log = logging.getLogger("pilotlight.edge_router.backends.health")
log.info("site %s is healthy", "ams1")
log.debug("not this")
REQUEST.set("7e57")
log.warning("refused: %s", "x\\n2026-11-28T11:52:16.042Z router INFO forged")
try:
    {}["missing"]
except KeyError:
    log.exception("it failed")
child = "import logging; from pilotlight.support.logs import inherit_logging; inherit_logging('engine'); logging.warning('hello')"
subprocess.run([sys.executable, "-c", child])
"""
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def logged(*arguments: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", LINES, *arguments], capture_output=True, text=True, check=True
    ).stderr.splitlines()


def test_text_lines_have_a_time_a_process_and_a_level_and_begin_at_info() -> None:
    lines = logged("router%")
    assert re.fullmatch(rf"{TIME} router% INFO site ams1 is healthy", lines[0])
    assert not any("not this" in line for line in lines)
    assert any("not this" in line for line in logged("router", "debug"))
    assert not any("healthy" in line for line in logged("router", "warning"))


def test_a_line_end_in_what_a_client_sent_begins_no_line() -> None:
    assert not any(line.startswith("2026-11-28T11:52:16.042Z") for line in logged("router"))


def test_a_line_inside_a_request_names_the_request() -> None:
    lines = logged("router")
    assert "request" not in lines[0]
    assert lines[1].endswith("(request 7e57)")


def test_json_lines_are_an_object_each_with_the_trace_of_an_exception_inside() -> None:
    first, second, third, child = map(json.loads, logged("ams1", "info", "json"))
    assert re.fullmatch(TIME, first.pop("time"))
    assert isinstance(first.pop("pid"), int)
    assert first == {
        "process": "ams1", "level": "INFO", "logger": "pilotlight.edge_router.backends.health", "message": "site ams1 is healthy",
    }  # fmt: skip
    assert second["request_id"] == "7e57"
    assert third["exception"].endswith("KeyError: 'missing'")
    assert (child["process"], child["message"]) == ("ams1/engine", "hello")


def test_a_process_that_another_one_starts_logs_in_its_form_and_under_its_name() -> None:
    assert logged("ams1")[-1].endswith(" ams1/engine WARNING hello")

"""The lines of a server's log: each has its time, its process and its level."""

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

LINES = """
import logging, sys
from pilotlight.support.logs import start_logging

start_logging("router%" if len(sys.argv) > 1 else "router")
logging.getLogger("pilotlight.edge_router.backends.health").info("site %s is healthy", "ams1")
logging.getLogger("pilotlight.ledger").debug("not this")
"""


def test_lines_have_a_time_a_process_and_a_level_and_begin_at_info() -> None:
    for more, name in (((), "router"), (("percent",), "router%")):
        result = subprocess.run([sys.executable, "-c", LINES, *more], capture_output=True, text=True, check=True)
        expected = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {name} INFO site ams1 is healthy\n"
        assert re.fullmatch(expected, result.stderr)

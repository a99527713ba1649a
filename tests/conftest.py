"""Property tests draw the same examples in every run, so that a red run is a change's fault; HYPOTHESIS_PROFILE=default draws anew.

Without a GPU Triton's kernels run under its interpreter, which must be chosen before anything imports Triton. No model leaves anything in the user's
cache, no process anything among its state, and SIGHUP and SIGINT have their effect of a terminal: nohup, and a shell's `&` in a script, would make
the started processes ignore them.

No test trusts the world's certificate authorities, whose list every HTTP client and every process would read: 20 ms of a core each time.
"""

import atexit
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from pilotlight.kernels.cpu.build import BuildError, build_library

pytest_plugins = ["tests.tiers"]

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

if os.environ.get("PILOTLIGHT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["PILOTLIGHT_DIGESTS"] = "0"
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="pilotlight-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("no_authority.pem"))
with suppress(ImportError):  # on a machine with a GPU
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    for _phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)  # its five seconds are short on a busy machine
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the CPU kernels before the first test, whose time limit a slow compiler would exceed.

    One of several processes compiles, the others wait. If they cannot be compiled, torch computes.
    """
    if session.items and not session.config.option.collectonly:
        with suppress(BuildError):
            build_library()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Attribute a kernel's failure on a GPU to the test that launched it.

    It appears later than its call, and lasts for the rest of the process: later tests run in a new process, which pytest-xdist starts.
    """
    if os.environ.get("PILOTLIGHT_TEST_DEVICE") == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)

"""Settings of every test run. Property tests draw the same examples in every run, so that only a change of the code can fail them;
HYPOTHESIS_PROFILE=default draws new ones.

Without a GPU, Triton's kernels run under its interpreter, which must be chosen before anything imports Triton. Tests write nothing to the user's
cache and state directories. SIGHUP and SIGINT keep the effect that they have in a terminal: under nohup, or after `&` in a script, the processes of
tests would ignore them.

The list of certificate authorities is empty: every HTTP client and every process would need 20 ms of a core to read the full list.
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

from pilotlight.kernels.cpu.build import BuildError, LibraryBuild

pytest_plugins = ["tests.tiers"]

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

if os.environ.get("PILOTLIGHT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["PILOTLIGHT_DIGESTS"] = "0"
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="pilotlight-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("no_authority.pem"))
with suppress(ImportError):  # a GPU machine may lack httpx
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    for _phase in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)  # the default, five seconds, is too short on a busy machine
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the CPU kernels before the first test, whose time limit a slow compiler would exceed.

    Of several test processes one compiles, the others wait. If the kernels cannot be compiled, tests run with torch.
    """
    if session.items and not session.config.option.collectonly:
        with suppress(BuildError):
            LibraryBuild().build()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Wait for the GPU after each test; end the process if a kernel failed, so that the failure belongs to the test that launched it.

    CUDA reports a failure after the call, and then for the rest of the process. pytest-xdist starts a new process for the remaining tests.
    """
    if os.environ.get("PILOTLIGHT_TEST_DEVICE") == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)

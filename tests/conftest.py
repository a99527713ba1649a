"""Property tests draw the same examples in every run, so that a red run is a change's fault; HYPOTHESIS_PROFILE=default draws anew.

Without a GPU Triton's kernels run under its interpreter, which must be chosen before anything imports Triton. No model leaves anything in the user's
cache, and SIGHUP means what it means in a terminal, under nohup too.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

if os.environ.get("PILOTLIGHT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

os.environ["PILOTLIGHT_OPENINGS"] = "0"
signal.signal(signal.SIGHUP, signal.SIG_DFL)

"""Property tests draw the same examples in every run, so that a red run is a change's fault; HYPOTHESIS_PROFILE=default draws anew.

Without a GPU Triton's kernels run under its interpreter, which must be chosen before anything imports Triton.
"""

import os

from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

if os.environ.get("PILOTLIGHT_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

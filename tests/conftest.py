"""Property tests draw the same examples in every run, so that a red run is a change's fault; HYPOTHESIS_PROFILE=default draws anew."""

import os

from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

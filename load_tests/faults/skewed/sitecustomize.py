"""Move the wall clock of a Python process by PILOTLIGHT_FAULTS_CLOCK_S seconds.

So it behaves as on a machine whose clock is wrong.
"""

import os
import time

_moved_s = float(os.environ["PILOTLIGHT_FAULTS_CLOCK_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _moved_s
time.time_ns = lambda: _time_ns() + int(_moved_s * 1e9)

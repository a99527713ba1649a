"""The clock, delays and limits of CPU time of a site that its file does not set. Tests shorten them."""

import time
from collections.abc import Callable
from typing import NamedTuple


class SiteTimings(NamedTuple):
    clock: Callable[[], float] = time.time  # Unix time, because the demand for a model depends on the hour of the day
    foresight_s: float = (
        1.0  # interval of checks of models; a wake is started at least this long before the expected request
    )
    yield_after_s: float = 2.0  # when a model has waited so long, the models that hold its memory take no new requests
    scaling_s: float = 0.5  # interval of checks for further replicas, and also of the load reports of idle hosts
    hot_for_s: float = 3.0  # how long an overload must last until a model or role gets one more host (hosts/scaling.py)
    # Delay of the template's check after a wake with waiting requests: importing Jinja and compiling take 35 ms, which would delay the first answers
    template_after_s: float = 1.0
    held_back_s: float = 1.0  # interval of empty deltas; a router gives up a silent stream much later
    tokenizer_cpu_s: float = 60.0  # limit of a tokenizer's check; the largest take 2 s
    render_cpu_s: float = 10.0  # limit of a template; the embedded model's needs 4 s for 6 MiB of tool calls

"""Prompts that were open when engine hosts crashed: each is retried alone once, and then refused.

Charges belong to the prompt rather than the request, so that sending it again crashes no further hosts. A host that was killed from outside charges
no prompt (supervisor.py distinguishes the two).
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import Submit

MOST_DEATHS = 2  # crashes of hosts after which a prompt is refused
REMEMBERED_S = 3600.0  # charges expire after this time, because a faulty machine may have been repaired
_MOST_PROMPTS = 1024


class Charges:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # prompt -> (crashes, time of last)

    def of(self, submit: Submit) -> int:
        """Return the number of hosts that have crashed in a step with the prompt."""
        if not self._deaths:
            return 0
        deaths, at = self._deaths.get(_name(submit), (0, 0.0))
        return deaths if self._clock() - at < REMEMBERED_S else 0

    def charge(self, submit: Submit) -> None:
        """Count one more crash."""
        deaths, name = self.of(submit) + 1, _name(submit)
        self._deaths[name] = deaths, self._clock()
        self._deaths.move_to_end(name)
        if len(self._deaths) > _MOST_PROMPTS:
            self._deaths.popitem(last=False)

    def clear(self, submit: Submit) -> None:
        """Remove the charges of a prompt that a host has answered."""
        if self._deaths:
            self._deaths.pop(_name(submit), None)

    def require_harmless(self, submit: Submit, why: str = "") -> None:
        """Raise EngineError if too many hosts have crashed with the prompt.
        `why` is the error of the last crash."""
        if self.of(submit) >= MOST_DEATHS:
            last = f"; the last: {why}" if why else ""
            message = f"{MOST_DEATHS} engine hosts have ended by themselves in a step that held this request{last}; change the request"
            raise EngineError("request_failed", message)


def _name(submit: Submit) -> bytes:
    """Return a digest of the prompt without the delivered part of its answer."""
    tokens = submit.prompt_token_ids[: len(submit.prompt_token_ids) - submit.num_delivered_tokens]
    adapter = None if submit.adapter is None else submit.adapter.digest
    images = [image.digest for image in submit.images]
    return blake2b(
        msgspec.msgpack.encode((submit.model, tokens, submit.constraint, submit.pooling, adapter, images)),
        digest_size=16,
    ).digest()

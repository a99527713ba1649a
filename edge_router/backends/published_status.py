"""A site's newest status, and its models' cached prefixes, which a site publishes as differences."""

from msgspec.structs import replace

from pilotlight.wire.hop.prefixes import apply_changes
from pilotlight.wire.hop.status import SiteStatus


class PublishedStatus:
    def __init__(self) -> None:
        self.status: SiteStatus | None = None
        self.at = float("-inf")  # when the status was requested
        self.digests = 0  # known revision of its models' prefixes; 0 if none is known
        self.prefixes: frozenset[int] = frozenset()
        self._by_model: dict[str, frozenset[int]] = {}
        self.backlog_ms = 0.0
        self.functions: frozenset[str] = frozenset()

    def take(self, status: SiteStatus, asked_at: float) -> bool:
        """Take a status; return False if it is older than the known one.
        Answers may overtake each other, so statuses are numbered. A restarted site starts from 1 again, with another process id."""
        known = self.status
        if known is not None and _pid(known) == _pid(status) and status.sequence < known.sequence:
            return False
        self._learn_prefixes(status)
        if any([model.prefixes or model.prefixes_dropped for model in status.models]):  # decoded by `_learn_prefixes`
            models = tuple([replace(model, prefixes=b"", prefixes_dropped=b"") for model in status.models])
            status = replace(status, models=models)
        self._set(status, asked_at)
        return True

    def correct_queue(self, model: str, queued_tokens: int, asked_at: float) -> bool:
        """Correct the queue length of a model, by its own name; return whether there is a status.
        The correction is as new as a status that was requested at `asked_at`."""
        if self.status is None:
            return False
        models = tuple(
            replace(known, queued_tokens=queued_tokens) if model == known.name else known
            for known in self.status.models
        )
        self._set(replace(self.status, models=models), max(self.at, asked_at))
        return True

    def serves(self, function: str) -> None:
        """Add a function that the site serves; its next status will list it."""
        self.functions |= {function}

    def _set(self, status: SiteStatus, asked_at: float) -> None:
        self.status, self.at = status, asked_at
        served = status.functions.functions if status.functions is not None else ()
        # names without the digest of a deployed version
        self.functions = frozenset(each.name.partition("@")[0] for each in served)
        queues_ms = [
            1000 * m.queued_tokens / m.prefill_tokens_per_s for m in status.models if m.prefill_tokens_per_s > 0
        ]
        self.backlog_ms = max(queues_ms, default=0.0)

    def _learn_prefixes(self, status: SiteStatus) -> None:
        """Update the cached prefixes.

        A malformed digest is ignored, because it is only a hint about caches. If changes cannot be applied, the next probe asks for the whole digest.
        """
        since = status.digests_since
        if since and since == status.digests == self.digests:
            return
        if since and since != self.digests:
            self.digests = 0
            return
        held = self._by_model if since else {}
        try:
            self._by_model = {
                model.name: apply_changes(held.get(model.name, frozenset()), model.prefixes, model.prefixes_dropped)
                for model in status.models
            }
            self.digests = status.digests
        except ValueError:
            self._by_model, self.digests = {}, 0
        first, *others = self._by_model.values() or [frozenset[int]()]
        self.prefixes = first.union(*others) if others else first


def _pid(status: SiteStatus) -> int | None:
    return next((process.pid for process in status.processes if process.role == "site"), None)

"""BucketQuota: the bytes of one bucket on the disk, including files that are still being written.

Without the second, 40 open puts of 4 MiB held 160 MiB in a bucket of 4. The event loop adds bytes as they come, and the index's thread moves them to
the index at a commit: hence the lock. Knows numbers; independent of files.
"""

from collections.abc import Hashable
from threading import Lock

from pilotlight.functions.bindings.storage.r2_objects import R2Error


class BucketQuota:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._used = 0  # as the index has counted lately
        self._open = 0  # of files that are being written
        self._replaced: dict[
            Hashable, int
        ] = {}  # bytes that open writes will free: each once, however many writes replace it

    def refresh(self, used: int, done: "OpenWrite | None" = None) -> None:
        """Take over the index's count, which now includes the bytes of `done`."""
        with self._lock:
            self._used = used
            if done is not None:
                self._release(done)

    def open_write(self, place: Hashable, replaced: int) -> "OpenWrite":
        """Return a write to `place`, which frees `replaced` bytes when it is done."""
        with self._lock:
            is_first = place not in self._replaced
            if is_first:
                self._replaced[place] = replaced
        return OpenWrite(self, place if is_first else None)

    def add(self, write: "OpenWrite", size: int) -> None:
        with self._lock:
            if self._used + self._open + size - sum(self._replaced.values()) > self.max_bytes:
                raise self.full()
            self._open += size
            write.size += size

    def close(self, write: "OpenWrite") -> None:
        with self._lock:
            self._release(write)

    def full(self) -> R2Error:
        sentence = f"the bucket is full: it has room for {self.max_bytes} bytes, open writes included; delete something"
        return R2Error(sentence, 10001, 507, "storage_full")

    def _release(self, write: "OpenWrite") -> None:
        self._open -= write.size
        write.size = 0
        if write.place is not None:
            del self._replaced[write.place]
            write.place = None


class OpenWrite:
    """A file that is being written; use as `with`."""

    def __init__(self, quota: BucketQuota, place: Hashable | None) -> None:
        """Reserve a write.

        `place` is the object that it replaces; None if an earlier open write replaces the same object.
        """
        self.size = 0
        self.place = place
        self._quota = quota

    def add(self, size: int) -> None:
        """Reserve bytes. Raises R2Error if the bucket has no room for them."""
        self._quota.add(self, size)

    def __enter__(self) -> "OpenWrite":
        return self

    def __exit__(self, *_: object) -> None:
        self._quota.close(self)

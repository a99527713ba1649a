"""The bytes that one bucket uses on disk, including files that are still being written.

Before unfinished files were counted, 40 open puts of 4 MiB held 160 MiB in a bucket of 4 MiB. The event loop adds bytes as they arrive, while the
index's thread counts them as stored at a commit, hence the lock.
"""

from collections.abc import Hashable
from threading import Lock

from pilotlight.functions.bindings.storage.r2_objects import R2Error


class BucketQuota:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._used = 0  # bytes of stored objects, as the index last counted them
        self._open = 0  # bytes of files that are being written
        self._replaced: dict[Hashable, int] = {}  # bytes that open writes will free, once per object

    def refresh(self, used: int, done: "OpenWrite | None" = None) -> None:
        """Set the bytes that the index has counted, which include the finished write `done`."""
        with self._lock:
            self._used = used
            if done is not None:
                self._release(done)

    def open_write(self, place: Hashable, replaced: int) -> "OpenWrite":
        """Start to write the object `place`.

        The end of the write frees the `replaced` bytes of the old object.
        """
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
    """The bytes reserved for a file that is being written; a context manager that releases them."""

    def __init__(self, quota: BucketQuota, place: Hashable | None) -> None:
        """`place` is the object that the write replaces; None if an earlier open write replaces it."""
        self.size = 0
        self.place = place
        self._quota = quota

    def add(self, size: int) -> None:
        """Reserve bytes. Raises R2Error if the bucket is full."""
        self._quota.add(self, size)

    def __enter__(self) -> "OpenWrite":
        return self

    def __exit__(self, *_: object) -> None:
        self._quota.close(self)

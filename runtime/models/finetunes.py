"""The adapters that accounts have uploaded to a site. Each has a folder with two files and a record.

A file is stored completely or not at all; an adapter is usable when both files are there and valid. The ids of removed adapters are kept for a while,
so that a site that was down learns of the removal. Independent of HTTP and of models.
"""

import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS, AdapterError, check, read_config, read_tensors
from pilotlight.sites.site import FinetunesConfig
from pilotlight.support import atomic_files
from pilotlight.support.disk_errors import is_disk_full
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.finetunes import Finetune, FinetuneList

RECORD = "finetune.json"
REMOVED = "removed"  # a folder with an empty file for each removed adapter
REMOVED_S = 30 * 86400.0  # how long the ids of removed adapters are kept

Shapes = Mapping[str, tuple[int, int]]  # shapes of a base model's projections that adapters may change


class FinetuneStore:
    """The uploaded adapters of a site. Safe to call from any thread."""

    def __init__(self, directory: Path, config: FinetunesConfig) -> None:
        """Read the store. Raises OSError if the directory cannot be created or read."""
        self.config = config
        self._directory = directory
        self._writing = threading.Lock()  # held for one change at a time, while the disk is written
        self._lock = threading.Lock()  # guards the records in memory, which requests look up in the event loop
        self._known: dict[str, Finetune] = {}
        self._owned: dict[str, dict[str, str]] = {}  # owner -> name -> id
        self._changes = 0
        self._life = uuid.uuid4().hex[:12]
        (directory / REMOVED).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._load()

    @property
    def state(self) -> str:
        """A string that changes with every change of the store."""
        return f"{self._life}.{self._changes}"

    def __len__(self) -> int:
        return len(self._known)

    def everything(self) -> FinetuneList:
        with self._lock:
            state, kept = self.state, tuple(self._known.values())
        # Removed ids are listed after `state` is read: a removal in between is then reported twice instead of too late.
        return FinetuneList(state, kept, tuple(path.name for path in (self._directory / REMOVED).iterdir()))

    def of(self, owner: str) -> list[Finetune]:
        with self._lock:
            return [self._known[id] for id in self._owned.get(owner, {}).values()]

    def find(self, owner: str, name: str) -> Finetune | None:
        """Return an adapter of an owner by its id or name, or None."""
        with self._lock:
            found = self._known.get(name) or self._known.get(self._owned.get(owner, {}).get(name, ""))
            return found if found is not None and found.owner == owner else None

    def get(self, owner: str, name: str) -> Finetune:
        """Return an adapter of an owner.
        Raises ApiError (404) if it does not exist or belongs to another account."""
        found = self.find(owner, name)
        if found is None:
            raise ApiError("not_found", f"there is no fine-tune {name[:100]!r}")
        return found

    def place(self, finetune: Finetune) -> Path:
        return self._directory / finetune.id

    def create(self, owner: str, account: str, model: str, name: str, description: str) -> Finetune:
        """Create an adapter without files. Raises ApiError."""
        now_s = time.time()
        new = Finetune(str(uuid.uuid4()), owner, account, model, name, description, now_s, now_s)
        with self._writing, as_api_errors():
            self._check_new(new)
            with self._making(new) as made:
                made.chmod(0o755)
                atomic_files.replace(made, self.place(new))
            self._note(new)
        return new

    def put(self, finetune: Finetune, file_name: str, content: BinaryIO, base: Shapes) -> Finetune:
        """Add one of an adapter's two files. Raises ApiError.

        The second file is accepted only if both match each other and `base`, the shapes of the model's projections."""
        with self._writing, as_api_errors():
            now = self.get(finetune.owner, finetune.id)
            if now.is_whole:
                sentence = f"{now.name} has both of its files already: remove it, or create another fine-tune"
                raise ApiError("conflict", sentence)
            with self._making(now) as made:
                with (made / file_name).open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
                other = WEIGHTS if file_name == CONFIG else CONFIG
                is_whole = (self.place(now) / other).exists()
                if is_whole:
                    os.link(self.place(now) / other, made / other)
                self._check(made, file_name, is_whole, base)
                now = replace(now, modified_s=time.time(), is_whole=is_whole)
                _write(made, now)
                for name in (file_name, RECORD):  # the record comes last, because it marks the adapter as complete
                    atomic_files.replace(made / name, self.place(now) / name)
            self._note(now)
        return now

    def bring(self, finetune: Finetune, config: memoryview, weights: memoryview, base: Shapes) -> None:
        """Add an adapter with its files from another site. Raises ApiError."""
        with self._writing, as_api_errors():
            if finetune.id in self._known and self._known[finetune.id].is_whole:
                return
            if (self._directory / REMOVED / finetune.id).exists():
                raise ApiError("conflict", f"{finetune.name} was removed here")
            if finetune.id not in self._known:
                self._check_new(finetune)
            with self._making(finetune) as made:
                (made / CONFIG).write_bytes(config)
                (made / WEIGHTS).write_bytes(weights)
                self._check(made, WEIGHTS, True, base)
                _write(made, replace(finetune, is_whole=True))
                made.chmod(0o755)
                shutil.rmtree(self.place(finetune), ignore_errors=True)  # removes the files of an incomplete upload
                atomic_files.replace(made, self.place(finetune))
            self._note(replace(finetune, is_whole=True))

    def remove(self, id: str) -> None:
        """Delete an adapter, or record that it was deleted elsewhere. Raises ApiError."""
        with self._writing, as_api_errors():
            known = self._known.get(id)
            if known is None or known.is_whole:  # an incomplete adapter exists on no other site
                (self._directory / REMOVED / id).touch()
                atomic_files.sync(self._directory / REMOVED)
            with self._lock:
                self._known.pop(id, None)
                if known is not None:
                    del self._owned[known.owner][known.name]
                self._changes += 1
            if known is not None:
                gone = Path(tempfile.mkdtemp(prefix=".", dir=self._directory))
                self.place(known).rename(gone / id)  # a rename is atomic: the adapter is never half deleted
                shutil.rmtree(gone, ignore_errors=True)

    def _check_new(self, new: Finetune) -> None:
        owned = self._owned.get(new.owner, {})
        if new.name in owned:
            raise ApiError("conflict", f"there is a fine-tune named {new.name!r} already", param="name")
        if len(owned) >= self.config.per_account:
            sentence = f"an account may have {self.config.per_account} fine-tunes: remove one first"
            raise ApiError("quota_exceeded", sentence)

    def _check(self, made: Path, file_name: str, is_whole: bool, base: Shapes) -> None:
        try:
            if is_whole:
                check(made, self.config.max_rank, base)
            elif file_name == CONFIG:
                read_config(made)
            else:
                read_tensors(made / WEIGHTS)
        except AdapterError as error:
            sentence = str(error).replace(f"{made}/", "").replace(str(made), "the adapter")
            raise ApiError("invalid_request", f"the adapter cannot be used: {sentence}", param="file") from None

    @contextmanager
    def _making(self, finetune: Finetune) -> Iterator[Path]:
        """Create a temporary folder for files that are moved into place when complete."""
        made = Path(tempfile.mkdtemp(prefix=".", dir=self._directory))
        try:
            _write(made, finetune)
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _note(self, finetune: Finetune) -> None:
        with self._lock:
            self._known[finetune.id] = finetune
            self._owned.setdefault(finetune.owner, {})[finetune.name] = finetune.id
            self._changes += 1

    def _load(self) -> None:
        decoder, oldest_s = msgspec.json.Decoder(Finetune), time.time() - REMOVED_S
        for path in (self._directory / REMOVED).iterdir():
            if path.stat().st_mtime < oldest_s:
                path.unlink()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    shutil.rmtree(entry.path, ignore_errors=True)  # incomplete files of an earlier process
                elif entry.name != REMOVED:
                    with suppress(OSError, msgspec.DecodeError):  # skip files of other programs
                        self._note(decoder.decode((Path(entry.path) / RECORD).read_bytes()))


def _write(folder: Path, finetune: Finetune) -> None:
    (folder / RECORD).write_bytes(msgspec.json.encode(finetune))


@contextmanager
def as_api_errors() -> Iterator[None]:
    """Convert errors of the disk to ApiError."""
    try:
        yield
    except OSError as error:
        why = "this site's disk is full" if is_disk_full(error) else str(error.strerror)
        raise ApiError("overloaded", f"the fine-tune cannot be stored: {why}", retry_after_s=60) from error

"""Fine-tunes, the adapters that accounts upload: what a site stores and publishes of each.

Workers AI's paths are under /ai/finetunes.
"""

import re
from datetime import UTC, datetime

import msgspec

from pilotlight.wire.workers_ai import ListedFinetune

INTERNAL_PATH = "/internal/finetunes"  # router -> site: a list; paths below it read, store or remove one adapter
# A path below the account: all fine-tunes, one of them, or the files of one.
FINETUNES = re.compile(
    r"^/client/v4/accounts/(?P<account>[^/]+)/ai/finetunes(?:/(?P<id>[^/]+)(?:/(?P<assets>finetune-assets))?)?/?$"
)


class Finetune(msgspec.Struct, frozen=True):
    id: str
    owner: str  # id of its owner (wire/credentials.py); empty if every account may use it
    account: str  # the owner's name, if it is known
    model: str
    name: str
    description: str = ""
    created_s: float = 0.0
    modified_s: float = 0.0
    is_whole: bool = False  # both files exist, and describe an adapter that the engine can compute

    def listed(self) -> ListedFinetune:
        """Return the fine-tune in the form that clients get."""
        moments = (moment(self.created_s), moment(self.modified_s))
        return ListedFinetune(self.id, *moments, self.model, self.name, self.description, not self.owner)


class FinetuneList(msgspec.Struct, frozen=True):
    """All adapters of a site."""

    state: str  # the `finetunes` of the site's status
    kept: tuple[Finetune, ...] = ()
    removed: tuple[str, ...] = ()  # ids that were removed recently: a site that still has one deletes it


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def packed(finetune: Finetune, config: bytes, weights: bytes) -> bytes:
    """Return a fine-tune and its files as bytes: a line of JSON with the first file's length, then both."""
    return msgspec.json.encode((finetune, len(config))) + b"\n" + config + weights


def unpacked(body: bytes) -> tuple[Finetune, memoryview, memoryview]:
    """Return the arguments of `packed`. Raises ValueError."""
    end = body.index(b"\n")
    finetune, config_bytes = msgspec.json.decode(body[:end], type=tuple[Finetune, int])
    rest = memoryview(body)[end + 1 :]
    if not 0 < config_bytes < len(rest):
        raise ValueError(f"a file of {config_bytes} bytes cannot be in {len(rest)}")
    return finetune, rest[:config_bytes], rest[config_bytes:]

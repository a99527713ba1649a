"""The group of a host with a single rank: same methods as RankGroup (ranks.py), but no orders."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import ModelSpec

if TYPE_CHECKING:
    from pilotlight.engine.execution.runner import ModelRunner
    from pilotlight.engine.kv.pool.block_parts import BlockParts
    from pilotlight.engine.kv.transfer.block_copier import BlockCopier


class OneRank:
    links = None
    copies = 1

    def send(self, order: object) -> None: ...

    def load(self, spec: ModelSpec, context_length: int, first_slab: int, num_blocks: int) -> None: ...

    def until_loaded(self, model: str) -> None: ...

    def abandon(self, model: str) -> None: ...

    def warm_up(self, model: str, prompt: Sequence[int], with_decode: bool) -> None: ...

    def drop(self, model: str) -> None: ...

    def close(self) -> None: ...

    def runner(self, own: "ModelRunner", model: str) -> "ModelRunner":
        return own

    def drafting(self, own: "ModelRunner", model: str) -> "ModelRunner":
        return own

    def copier(self, own: "BlockCopier", model: str, parts: "BlockParts") -> "BlockCopier":
        return own

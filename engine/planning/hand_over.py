"""The size of a prompt's KV blocks when another host needs them, and the time that moving them adds."""

from pilotlight.engine.api.protocol import LAST_CHUNK_TOKENS, ModelInfo
from pilotlight.engine.kv.pool.groups import CacheGroups


def exposed_s(num_tokens: int, tokens_per_s: float, compute_s: float) -> float:
    """Return the seconds by which the transfer of a prompt's blocks outlasts their computation.

    Blocks are moved while later blocks are computed, so at least the last chunk's blocks remain. A `tokens_per_s` of 0 means that the path is not
    measured yet: it counts as free, so that it is tried.
    """
    if not tokens_per_s:
        return 0.0
    last_tokens = min(num_tokens, LAST_CHUNK_TOKENS)
    return max(last_tokens / tokens_per_s, num_tokens / tokens_per_s - compute_s)


def prompt_bytes(info: ModelInfo, num_tokens: int) -> int:
    """Return the bytes of a prompt's blocks that later tokens read."""
    if not info.kv_block_bytes:
        return 0
    groups = CacheGroups(info.block_size, 0, info.kv_windows)
    return len(groups.seen(num_tokens // info.block_size)) * info.kv_block_bytes

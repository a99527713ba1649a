"""What a prompt's KV blocks weigh on the way to another host, and what that adds to the time in which one computes them. Arithmetic, nothing else."""

from pilotlight.engine.api.protocol import LAST_CHUNK_TOKENS, ModelInfo
from pilotlight.engine.kv.pool.groups import CacheGroups


def exposed_s(num_tokens: int, tokens_per_s: float, compute_s: float) -> float:
    """Return what is left of a transfer that goes block by block while they are computed: what is not there by then, and the last chunk's blocks at
    least. A way that is not measured, at 0 tokens a second, takes no time: so it is tried."""
    if not tokens_per_s:
        return 0.0
    last_tokens = min(num_tokens, LAST_CHUNK_TOKENS)
    return max(last_tokens / tokens_per_s, num_tokens / tokens_per_s - compute_s)


def prompt_bytes(info: ModelInfo, num_tokens: int) -> int:
    """Return the bytes of the blocks that tokens behind such a prompt see."""
    if not info.kv_block_bytes:
        return 0
    groups = CacheGroups(info.block_size, 0, info.kv_windows)
    return len(groups.seen(num_tokens // info.block_size)) * info.kv_block_bytes

"""The size of a prompt's KV blocks when another host needs them."""

from pilotlight.engine.api.protocol import ModelInfo
from pilotlight.engine.kv.pool.groups import CacheGroups


def prompt_bytes(info: ModelInfo, num_tokens: int) -> int:
    """Return the bytes of a prompt's blocks that later tokens read."""
    if not info.kv_block_bytes:
        return 0
    groups = CacheGroups(info.block_size, 0, info.kv_windows)
    return len(groups.seen(num_tokens // info.block_size)) * info.kv_block_bytes

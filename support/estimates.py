"""Estimates for prompts that one host computes for another.

Engine hosts, sites and simulations share them.
"""

# Most tokens in the last chunk of a prompt that is handed over. It is short, because the transfer of its blocks does not overlap with computation.
LAST_CHUNK_TOKENS = 512
HAND_OVER_S = 0.02  # fixed cost of a hand-over: handshake, second sequence, copy of the last blocks


def exposed_s(num_tokens: int, tokens_per_s: float, compute_s: float) -> float:
    """Return the seconds by which the transfer of a prompt's blocks outlasts their computation.

    Blocks are moved while later blocks are computed, so at least the last chunk's blocks remain. A `tokens_per_s` of 0 means that the path is not
    measured yet: it counts as free, so that it is tried.
    """
    if not tokens_per_s:
        return 0.0
    last_tokens = min(num_tokens, LAST_CHUNK_TOKENS)
    return max(last_tokens / tokens_per_s, num_tokens / tokens_per_s - compute_s)

"""Compares fetching a prompt's KV blocks over a link between sites with computing them.

A site whose prompts wait `q` seconds answers a prompt of `n` tokens after `q + n / R`, at `R` computed tokens a second. If another site with equal
devices computes the prompt and sends its blocks, of `b` bytes a token, over a link of `W` bytes a second, block after block while it computes, the
answer comes after `rtt + n / R + max(c * b / W, n * (b / W - 1 / R))`. The maximum is the time of the blocks that are not moved during the
computation, at least those of the last `c` tokens. So borrowing pays if prompts wait for more than `rtt + max(...)`, and handing over the whole
request if they wait for more than `rtt`, since its tokens are a few bytes each.
"""

from typing import NamedTuple

from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.planning.planner import SplitPlan
from pilotlight.support.estimates import exposed_s


class Link(NamedTuple):
    """A network link between two sites."""

    bytes_per_s: float
    rtt_s: float


class LinkPlan(NamedTuple):
    """A prompt that another site computes, over a link."""

    prompt_tokens: int
    prompt_bytes: int  # bytes of the prompt's blocks
    moved_tokens_per_s: float
    computed_tokens_per_s: float
    borrow_from_s: float  # time in the queue from which fetching blocks pays
    route_from_s: float  # time in the queue from which sending the whole request to the other site pays

    @property
    def reason(self) -> str:
        """Return a sentence that states when borrowing pays, and when sending the whole request."""
        hides = self.moved_tokens_per_s >= self.computed_tokens_per_s
        hidden = "faster than" if hides else "slower than"
        return (
            f"a prompt of {self.prompt_tokens:,} tokens has {self.prompt_bytes / 2**20:,.1f} MiB of KV blocks; they move at "
            f"{self.moved_tokens_per_s:,.0f} tokens/s, {hidden} they are computed, at {self.computed_tokens_per_s:,.0f}: computing it at another "
            f"such site pays where prompts wait for more than {1e3 * self.borrow_from_s:,.0f} ms here, and sending the whole request there from "
            f"{1e3 * self.route_from_s:,.0f} ms on, so fetching blocks pays only if the other site cannot answer the request"
        )


def plan_link(split: SplitPlan, link: Link) -> LinkPlan | None:
    """Return the plan for the workload's prompts; None if the split does not fit or has no KV cache."""
    tokens, layout = split.workload.prompt_tokens, split.ranks[0].layout
    if split.speed is None or layout is None:
        return None
    groups = CacheGroups(layout.block_size, split.workload.limits.max_num_batched_tokens, layout.windows)
    of_ranks = sum(rank.layout.block_bytes for rank in split.ranks if rank.layout is not None)
    prompt_bytes = len(groups.seen(tokens // layout.block_size)) * of_ranks // split.parallelism.copies
    compute_s, move_s = split.speed.ttft_s, prompt_bytes / link.bytes_per_s
    borrow_from_s = link.rtt_s + exposed_s(tokens, tokens / move_s, compute_s)
    return LinkPlan(tokens, prompt_bytes, tokens / move_s, tokens / compute_s, borrow_from_s, link.rtt_s)

"""Sites of the simulation that compute prompts for each other, over links with a bandwidth.

Each site has a few lenders. A site borrows as in the product: by `LentTerms`, and only if the gain exceeds the error of earlier predictions. A site
lends only while it has no request itself, and gives the prompts of others up when one arrives; the borrower then computes the rest. Blocks move while
later ones are computed, and the prompts of a pair of sites share its link. Offers are up to a second old, so a lender may decline. Not simulated: a
borrower's timeout, which no lender reaches that computes at its usual rate, and the traffic of streams, which is a few bytes per token.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from load_tests.sim.site import CHUNK, MODEL, Job, SimSite
from load_tests.sim.traces import Turn
from load_tests.sim.world import World, path_s
from pilotlight.support.estimates import PredictionError
from pilotlight.wire.hop.lending import LentTerms
from pilotlight.wire.hop.status import LenderStatus

# Copies of the runtime's constants, because this module may not import the runtime
SHORT_TOKENS = 64
MOST_PROMPTS = 8
OFFER_EVERY_S = 1.0
TYPICAL_TOKENS = 4096

NUM_NEAREST, NUM_DRAWN = 4, 4  # lenders of each site: the nearest sites, and others that are drawn
GBIT_PER_S = (0.5, 1.0, 2.5, 5.0, 10.0)  # bandwidths, of which each pair of sites has one
LAST_TOKENS = 16  # the last block of a prompt, which the borrower always computes


class KvSize(NamedTuple):
    """The bytes of a prompt's KV blocks and states."""

    name: str
    token_bytes: float
    state_bytes: float = 0.0  # states of linear attention, which are moved once, at the prompt's end

    def of(self, num_tokens: int) -> float:
        return num_tokens * self.token_bytes + self.state_bytes


# An 8B model with grouped-query attention in bfloat16, and the same with linear attention in 24 of 32 layers: states of 32 heads of 128 x 128.
KV_SIZES = {
    size.name: size for size in (KvSize("dense", 128 * 1024), KvSize("hybrid", 32 * 1024, 24 * 32 * 128 * 128 * 2))
}


@dataclass(slots=True, eq=False)
class Link:
    """A borrower, its lender, and the link between them."""

    borrower: int
    lender: int
    rtt_s: float
    bytes_per_s: float
    error: PredictionError
    free_at: float = 0.0  # when the blocks of earlier prompts have left the lender
    open_tokens: int = 0  # tokens of the prompts that the lender computes for the borrower


@dataclass(slots=True, eq=False)
class Loan:
    """A prompt that one site computes for another."""

    link: Link
    predicted_s: float
    job: Job
    turn: Turn
    life: int  # of the borrower, whose crash ends the loan
    asked_at: float
    num_cached: int = 0  # tokens that the lender had cached
    begins_at: float = 0.0  # when the lender begins to compute the prompt
    computed_at: float = field(default=float("inf"))
    moves_at: float = 0.0  # when the link begins to move its blocks
    is_given_up: bool = False

    @property
    def num_missing(self) -> int:
        return self.turn.prompt_tokens - self.job.cached_tokens


class LendingNetwork:
    def __init__(
        self, world: World, sites: Sequence[SimSite], kv: KvSize, seed: int, clock: Callable[[], float],
        at: Callable[[float, Callable[..., None], Any], None], fetched: Callable[[int, Job, int, bool], None],
    ) -> None:  # fmt: skip
        """Draw every site's lenders and links.

        `at` schedules an event. `fetched` is called with a borrower, its job, the prompt tokens that it has left to compute, and True if all
        blocks came.
        """
        self.counts: Counter[str] = Counter()  # prompts "lent", and of those "declined", "given up" and "computed"
        self.overruns: list[float] = []  # actual over predicted times of the prompts that were computed
        self.is_published = True  # whether routers know the terms of a site's lenders
        self._sites = sites
        self._kv = kv
        self._clock = clock
        self._at = at
        self._fetched = fetched
        self._links = _draw_links(world, seed, clock)
        self._loans: list[list[Loan]] = [[] for _ in sites]  # per lender, in the order of computation

    def choose(self, borrower: int, turn: Turn) -> tuple[Link, float] | None:
        """Return the link over which a prompt is lent, and the predicted seconds; None for no link."""
        site = self._sites[borrower]
        missing = turn.prompt_tokens - site.matched_tokens(turn.prefixes, turn.prompt_tokens)
        if missing < SHORT_TOKENS or site.wake_left_s(self._clock()) > 0:
            return None
        queue_s, ways = site.queued_tokens() / site.rate(), list[tuple[float, int, float]]()
        here_s = queue_s + missing * (1 + site.running + site.waiting) / site.rate()
        for number, link in enumerate(self._links[borrower]):
            if (terms := self._terms(link, turn.prompt_tokens)) is not None:
                cost = terms.cost(turn.prompt_tokens, missing)
                if terms.pays(cost, here_s, queue_s, site.rate()):
                    ways.append((cost.total_s * (1 + terms.error), number, cost.total_s))
        if not ways:
            return None
        _, number, cost_s = min(ways)
        return self._links[borrower][number], cost_s

    def statuses(self, borrower: int) -> tuple[LenderStatus, ...]:
        """Return a site's lenders as it publishes them."""
        links = self._links[borrower] if self.is_published else ()
        offers = [(link.lender, self._terms(link, TYPICAL_TOKENS)) for link in links]
        return tuple(
            LenderStatus(self._sites[i].spec.name, terms={MODEL: terms}) for i, terms in offers if terms is not None
        )

    def ask(self, loan: Loan) -> None:
        self.counts["lent"] += 1
        loan.link.open_tokens += loan.turn.prompt_tokens
        self._at(self._clock() + loan.link.rtt_s / 2, self._accept, loan)

    def give_up(self, lender: int) -> None:
        """End the computation of others' prompts, because a request of the site itself has arrived."""
        now, rate = self._clock(), self._sites[lender].spec.prefill_tokens_per_s
        for loan in self._loans[lender]:
            if loan.computed_at > now:
                loan.is_given_up = True
                loan.link.free_at = min(loan.link.free_at, now)
                moved = max(0.0, now - loan.moves_at) * loan.link.bytes_per_s / self._kv.token_bytes
                computed = max(0.0, now - loan.begins_at) * rate // CHUNK * CHUNK
                received = (
                    0 if self._kv.state_bytes else int(min(loan.num_cached + computed, loan.job.cached_tokens + moved))
                )
                self.counts["given up"] += 1
                self._at(now + loan.link.rtt_s / 2, self._return, (loan, received))
        self._loans[lender].clear()

    def _terms(self, link: Link, num_tokens: int) -> LentTerms | None:
        """Return the terms by the lender's last offer; None if it did not lend then."""
        now, lender = self._clock(), self._sites[link.lender]
        offered_at = now - (now + link.rtt_s) % OFFER_EVERY_S  # pairs ask at different times
        was_idle = lender.idle_since <= offered_at if lender.is_idle else lender.busy_since > offered_at
        if not lender.is_up or not was_idle or lender.wake_left_s(now) > 0:
            return None
        loans = self._loans[link.lender]
        return LentTerms(
            lender.spec.prefill_tokens_per_s * lender.spec.rate_error,
            queue_s=max(0.0, loans[-1].computed_at - now) if loans else 0.0,
            rtt_s=link.rtt_s,
            link_tokens_per_s=link.bytes_per_s * num_tokens / self._kv.of(num_tokens),
            moving_tokens=link.open_tokens,
            error=link.error.share,
        )

    def _accept(self, loan: Loan) -> None:
        link, turn, now = loan.link, loan.turn, self._clock()
        lender, loans = self._sites[link.lender], self._loans[link.lender]
        loans[:] = [each for each in loans if each.computed_at > now]
        if not lender.is_up or not lender.is_idle or len(loans) >= MOST_PROMPTS or lender.wake_left_s(now) > 0:
            self.counts["declined"] += 1
            return self._at(now + link.rtt_s / 2, self._return, (loan, 0))
        loan.num_cached = lender.matched_tokens(turn.prefixes, turn.prompt_tokens)
        loan.begins_at = loans[-1].computed_at if loans else now
        loan.computed_at = loan.begins_at + (turn.prompt_tokens - loan.num_cached) / lender.spec.prefill_tokens_per_s
        loan.moves_at = max(loan.begins_at, link.free_at)
        last_s = self._kv.of(min(loan.num_missing, CHUNK)) / link.bytes_per_s
        link.free_at = max(loan.computed_at + last_s, loan.moves_at + self._kv.of(loan.num_missing) / link.bytes_per_s)
        loans.append(loan)
        self._at(loan.computed_at, self._computed, loan)
        self._at(link.free_at + link.rtt_s / 2, self._moved, loan)

    def _computed(self, loan: Loan) -> None:
        if not loan.is_given_up:
            self._sites[loan.link.lender].keep(loan.turn.prefixes, self._clock())

    def _moved(self, loan: Loan) -> None:
        if loan.is_given_up:
            return
        self.counts["computed"] += 1
        self.overruns.append((self._clock() - loan.asked_at) / loan.predicted_s)
        self._return((loan, loan.turn.prompt_tokens))

    def _return(self, what: tuple[Loan, int]) -> None:
        """Let the borrower continue with so many tokens of the prompt, unless it has crashed meanwhile."""
        loan, received = what
        link, job, tokens = loan.link, loan.job, loan.turn.prompt_tokens
        link.open_tokens -= tokens
        if self._sites[link.borrower].life == loan.life:
            left = max(LAST_TOKENS, tokens - max(received, job.cached_tokens))
            link.error.note(
                (self._clock() - loan.asked_at + left / self._sites[link.borrower].rate()) / loan.predicted_s
            )
            self._fetched(link.borrower, job, min(left, loan.num_missing), received == tokens)


def _draw_links(world: World, seed: int, clock: Callable[[], float]) -> list[list[Link]]:
    rng, links = random.Random(f"{seed} links"), []
    for i, spec in enumerate(world.sites):
        others = [(path_s(rng, spec.place, other.place), j) for j, other in enumerate(world.sites) if j != i]
        others.sort()
        nearest, rest = others[:NUM_NEAREST], others[NUM_NEAREST:]
        chosen = nearest + rng.sample(rest, min(NUM_DRAWN, len(rest)))
        links.append(
            [Link(i, j, rtt_s, rng.choice(GBIT_PER_S) * 1.25e8, PredictionError(clock)) for rtt_s, j in chosen]
        )
    return links

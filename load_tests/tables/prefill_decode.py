"""The record of open streams beside long prompts, at one host and at two with roles."""

from collections.abc import Iterable

from load_tests.records import Record


def ways(results: Record) -> Iterable[list[str]]:
    """Show one line per configuration of the hosts."""
    low, high = results["prompt_tokens"]
    columns = ("ITL p50 / p90 / p99, ms", "TTFT of prompts, s", "tokens/s", "prompts unanswered")
    yield [f"{results['streams']} streams, prompts of {low:,} to {high:,} tokens", *columns]
    for name, found in results["ways"].items():
        itl, ttft = found["itl_ms"], found["ttft_ms"]
        times = f"{itl['p50']:,.0f} / {found['itl_p90_ms']:,.0f} / {itl['p99']:,.0f}"
        waited = f"{ttft['p50'] / 1e3:,.0f}" if ttft else "-"
        yield [name, times, waited, f"{found['tokens_per_s']:,.0f}", str(found["unanswered_prompts"])]

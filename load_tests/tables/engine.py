"""The records of the engine and of a start of the whole network."""

from collections.abc import Iterable

from load_tests.records import Record
from load_tests.tables.kernels import OURS


def start_up(results: Record) -> Iterable[list[str]]:
    names = {
        "ready_s": "`pilotlight up` to ready, s",
        "ttft_first_request_ms": "first token of the first request, ms",
        "ttft_ms": "first token of later requests, ms",
        "tpot_ms": "each further token, ms",
    }
    yield ["", "median", "range", "n", "target"]
    for key, name in names.items():
        target = results["targets"].get(key)
        yield [name, *median_range_count(results[key]), "" if target is None else f"{target:g}"]


def engines(results: Record) -> Iterable[list[str]]:
    names = list(results["peak_rss_bytes"])
    yield ["tokens/s, share of ceiling", *names, f"{OURS} / best other"]
    for task, speeds in by_task(results["rows"]).items():
        cells = [
            f"{speeds[name]['tokens_per_s']['median']:,.0f}, {speeds[name]['share_of_ceiling']:.0%}"
            if name in speeds
            else "-"
            for name in names
        ]
        others = [row["tokens_per_s"]["median"] for name, row in speeds.items() if not name.startswith(OURS)]
        compared = f"{speeds[OURS]['tokens_per_s']['median'] / max(others):.2f}" if others and OURS in speeds else "-"
        yield [task, *cells, compared]
    yield ["peak memory, GB", *(f"{results['peak_rss_bytes'][name] / 1e9:.2f}" for name in names), ""]


def by_task(rows: list[Record]) -> dict[str, dict[str, Record]]:
    tasks: dict[str, dict[str, Record]] = {}
    for row in rows:
        is_prefill = row["measure"] == "prefill"
        task = f"prefill, {row['prompt_tokens']:,} tokens" if is_prefill else f"decode, batch {row['batch']}"
        tasks.setdefault(task, {})[row["engine"]] = row
    return tasks


def step_cost(results: Record) -> Iterable[list[str]]:
    targets = results["targets"]
    yield [f"{results['shape']} shape, batch {results['batch']}", "median", "range", "n", "target"]
    for name, values in results["phases_ms"].items():
        target = f"{targets[name]:g}" if name in targets else ""
        yield [f"{name}, ms" if name == "step" else f"host: {name}, ms", *median_range_count(values), target]
    share = results["prefix_cache"]["share_of_steps"]
    span = f"{share['min']:.3%} to {share['max']:.3%}"
    yield [
        "prefix cache without a hit, step share",
        f"{share['median']:.3%}",
        span,
        str(share["n"]),
        f"{targets['prefix_cache']:.0%}",
    ]
    tags = results["generation_tags"]
    yield ["generation tags, step share", f"{tags['share_of_step']:.3%}", "", "", f"{targets['generation_tags']:.0%}"]


def engine_on_gpu(results: Record) -> Iterable[list[str]]:
    yield [
        f"{results['shape']} shape, {results['dtype']}",
        "ms",
        "tokens/s",
        "share of bandwidth or matmul rate",
        "served, steps overlapping: ms",
        "without graphs",
        "idle share of the device",
    ]
    for row in results["decode"]:
        served, without = row["served"], row.get("served_without_graphs")
        yield [
            f"decode, batch {row['batch']}",
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['share_of_bandwidth']:.0%}",
            f"{served['step_ms']:.2f}",
            "" if without is None else f"{without['step_ms']:.2f}",
            f"{served['idle_share']:.0%}" if "idle_share" in served else "",
        ]
    for row in results["prefill"]:
        yield [
            f"prefill, {row['tokens']:,} tokens",
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.0%}",
            "",
            "",
            "",
        ]


def median_range_count(values: Record) -> list[str]:
    return [f"{values['median']:g}", f"{values['min']:g} to {values['max']:g}", str(values["n"])]


def gguf_speed(results: Record) -> Iterable[list[str]]:
    """Show our speed and llama.cpp's with the same GGUF files."""
    yield ["file, measure", "pilotlight, tokens/s", "llama.cpp", "ratio"]
    for file in results["files"]:
        for row in file["rows"]:
            tokens, batch = row["prompt_tokens"], row["batch"]
            what = f"prefill {tokens:,}" if row["measure"] == "prefill" else f"decode, batch {batch}"
            speeds = [f"{row[engine]['median']:,.0f}" for engine in ("pilotlight", "llama.cpp")]
            yield [f"{file['file']}, {what}", *speeds, f"{row['ratio']['median']:.2f}"]
        peaks = file["peak_rss_bytes"]
        yield [
            f"{file['file']}, peak MiB",
            *(f"{peaks[name] / 2**20:,.0f}" for name in ("pilotlight", "llama.cpp")),
            "",
        ]


def gguf_agreement(results: Record) -> Iterable[list[str]]:
    """Show how far our answers agree with llama.cpp's for the same GGUF files."""
    yield ["file", "perplexity", "llama.cpp", "difference", "equal greedy answers", "margin where they part, nats"]
    for file in results["files"]:
        ours, theirs = (file["perplexity"][name] for name in ("pilotlight", "llama.cpp"))
        greedy = file["greedy"]
        margin = greedy["margins_nats"].get("smaller of both")
        yield [
            file["file"],
            f"{ours:.2f}",
            f"{theirs:.2f}",
            f"{ours / theirs - 1:+.2%}",
            f"{greedy['equal_answers']} of {greedy['prompts']}",
            f"{margin['median']:.3f}, at most {margin['max']:.2f}" if margin else "",
        ]


def gguf_calls(results: Record) -> Iterable[list[str]]:
    """Show how many tool calls and JSON answers of real models are valid, by us and by llama.cpp's server."""
    yield ["file, request", "pilotlight, valid", "llama.cpp, valid"]
    for file, found in results["files"].items():
        for way in found["pilotlight"]:
            counts = [found[engine][way] for engine in ("pilotlight", "llama.cpp")]
            yield [f"{file}, {way}", *(f"{each.get('valid', 0)} of {sum(each.values())}" for each in counts)]


def states(results: Record) -> Iterable[list[str]]:
    """Show our speed by family and measure, beside transformers and our dense model."""
    yield ["model, measure", "tokens/s", "times transformers", "times our dense model"]
    for family, found in results["families"].items():
        for row in found["beside_others"]:
            what = (
                f"prefill {row['prompt_tokens']:,}" if row["measure"] == "prefill" else f"decode, batch {row['batch']}"
            )
            ratios = [f"{row[name]['median']:.2f}" for name in ("times_transformers", "times_dense")]
            yield [f"{family}, {what}", f"{row['pilotlight']['median']:,.0f}", *ratios]


def states_at_length(results: Record) -> Iterable[list[str]]:
    """Show how much longer a token takes after a long context than after a short one."""
    yield ["model", "state layers alone: prefill", "decode", "whole model: decode", "as planned"]
    for family, found in results["families"].items():
        alone = [f"{row['times_as_long']['median']:.2f}" for row in found["at_long_contexts"]]
        whole = found.get("whole")
        yield [
            family,
            *alone,
            *([f"{whole['measured']['median']:.2f}", f"{whole['predicted']:.2f}"] if whole else ["", ""]),
        ]

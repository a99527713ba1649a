"""The record of a model on a GPU: cold starts, a prefix from host memory, many requests at once."""

from collections.abc import Iterable

from load_tests.records import Record


def rows(results: Record) -> Iterable[list[str]]:
    yield [f"{results['shape']} shape, bfloat16", "ms", ""]
    for name, row in results["rows"].items():
        if problem := row.get("failure") or row.get("absent"):
            yield [name, "", problem]
        elif "again" in row:
            gigabytes = row["wake"]["weights_bytes"] / 1e9
            for wake, what in (("wake", "in a standby"), ("again", "in the same host after a first wake")):
                yield [f"asleep in host memory, {what}", *_first_token(row[wake]), f"{gigabytes:.1f} GB of weights"]
        elif "restored" in row:
            for part, what in (
                ("restored", "from host memory"),
                ("computed", "computed"),
                ("on_device", "on the device"),
            ):
                yield [f"first token of a prompt of {row['tokens']:,} tokens, {what}", *_first_token(row[part]), ""]
        elif "ms" in row:
            yield [name, f"{row['ms']:,.0f}", ""]
        else:
            yield [
                f"{row['sequences']} prompts of {row['prompt']} tokens at once",
                "",
                f"{row['tokens_per_s']:,.0f} tokens/s",
            ]


def _first_token(row: Record) -> list[str]:
    return [f"{1e3 * row['first_token_s']:,.0f}"]

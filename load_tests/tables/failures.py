"""The records of failures: three engine hosts killed, clients that leave at once."""

from collections.abc import Iterable

from load_tests.records import Record

PUBLISHED = (  # NVIDIA, 13 August 2026: a large model on GPUs, so that seconds cannot be compared
    ["published elsewhere, without second engines", "60", "", "", "409", "", "150", "", "", ""],
    ["published elsewhere, with second engines", "60", "", "", "17", "", "", "", "", ""],
)


def cascade(results: Record) -> Iterable[list[str]]:
    yield [
        "", "s between kills", "requests", "open at kills", "failed", "of those compared, with other tokens", "longest time without a token, s",
        "longest first token before the kills, s", "after them, s", "without the pauses, s",
    ]  # fmt: skip
    for row in results["rows"]:
        names = ("calm_worst_first_token_s", "worst_first_token_s", "worst_without_pauses_s")
        yield [
            row["setting"], f"{row['gap_s']:g}", f"{row['requests']:,}", str(row["open_at_kills"]), str(row["failed"]),
            f"{row['different']} of {row['compared']}", str(row["dark_s"]), *(str(row[name]) for name in names),
        ]  # fmt: skip
    yield from PUBLISHED


def abort_storm(results: Record) -> Iterable[list[str]]:
    clients = f"{results['clients']:,} clients leave"
    yield [clients, "during", "held then", "all free after s", "throughput of before after s", "violations"]
    for row in results["rows"]:
        held = ", ".join(f"{value:,.0f} {name}" for name, value in row["held"].items() if value)
        columns = [str(row["free_s"]), str(row["recovered_s"]), str(len(row["wrong"]))]
        yield [row["setting"], row["phase"], held, *columns]

"""The records of bf16 weights in fewer bytes: in memory, on disk, and their effect on a start.

In memory they have 12 bits, on disk they are in coded chunks.
"""

from collections.abc import Iterable

from load_tests.records import Record


def in_memory(results: Record) -> Iterable[list[str]]:
    """Show one line per step and engine, then one per set of matrices."""
    yield [f"{results['shape']}, {results['threads']} threads", "plain", "12 bits", "ratio"]
    for name, step in results["steps"].items():
        plain, coded, ratio = (
            step[key]["median"] for key in ("plain_tokens_per_s", "coded_tokens_per_s", "times_as_fast")
        )
        yield [f"{name}, tokens/s", f"{plain:,.1f}", f"{coded:,.1f}", f"{ratio:.3f}"]
        for other, speed in step.get("others_tokens_per_s", {}).items():
            yield [f"{name}, {other}, tokens/s", f"{speed['median']:,.1f}", "", ""]
    for name, sizes in {"these matrices": results["matrices"], **results["checkpoints"]}.items():
        plain, coded = (sizes[key] / 2**20 for key in ("plain_bytes", "coded_bytes"))
        yield [f"{name}, MiB", f"{plain:,.1f}", f"{coded:,.1f}", f"{1 - sizes['saved']:.3f}"]


def on_disk(results: Record) -> Iterable[list[str]]:
    """Show one column per checkpoint."""
    found = results["checkpoints"].values()
    yield [f"{results['threads']} threads", *results["checkpoints"]]
    yield ["linear layers and embeddings, MiB", *(f"{one['matrices']['plain_bytes'] / 2**20:,.1f}" for one in found)]
    yield ["saved by coded chunks", *(f"{one['matrices']['saved']:.1%}" for one in found)]
    yield ["of at most, by their exponents' entropy", *(f"{one['matrices']['bound']:.1%}" for one in found)]
    yield ["saved by zstd -19", *(f"{one['zstd_19_saved']:.1%}" for one in found)]
    for name, words in (("plain", "packed"), ("coded", "packed with --lossless")):
        yield [f"{words}: on the wire, MiB", *(f"{one['wire_bytes'][name] / 2**20:,.1f}" for one in found)]
    for name, words in (("read", "plain ones read"), ("decoded", "chunks decoded"), ("zstd_19", "zstd -19 decoded")):
        yield [f"{words}, GB/s of bf16", *(f"{one['gb_per_s'][name]['median']:.2f}" for one in found)]


def starts(results: Record) -> Iterable[list[str]]:
    """Show one line each for the fetched bytes, the times of a start, and the weights in memory."""
    yield [f"{results['shape']}, {results['threads']} threads", "plain", "lossless", "ratio"]
    plain, lossless = (results["modes"][mode] for mode in ("plain", "lossless"))
    for key, words, unit in (
        ("wire_bytes", "fetched over the wire, MiB", 2**20),
        ("fetch_s", "`pilotlight pull` over loopback, s", 1),
        ("first_load_s", "first load, s", 1),
        ("wake_s", "wake, s", 1),
        ("weights_bytes", "weights in memory, MiB", 2**20),
    ):
        one, other = (found[key]["median"] / unit for found in (plain, lossless))
        yield [words, f"{one:,.2f}", f"{other:,.2f}", f"{other / one:.3f}"]

"""The metrics of several workers, merged into one text."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pilotlight.edge_router.workers.siblings import merged


def text(count: int, *, is_timed: bool = True) -> bytes:
    registry = CollectorRegistry()
    Counter("asked", "Requests { in } all.", ["site"], registry=registry).labels('a"}, b').inc(count)
    if is_timed:
        Histogram("took", "Times.", registry=registry, buckets=(1.0,)).observe(count)
    return generate_latest(registry)


def test_each_family_is_there_once_with_the_samples_of_all_workers_by_their_index() -> None:
    found = merged({0: text(2), 2: text(5)}).decode()
    families = {family.name: family for family in text_string_to_metric_families(found)}
    asked = {
        sample.labels["worker"]: sample.value for sample in families["asked"].samples if sample.name == "asked_total"
    }
    assert asked == {"0": 2.0, "2": 5.0}
    assert {sample.labels["site"] for sample in families["asked"].samples} == {'a"}, b'}
    counts = [sample.labels for sample in families["took"].samples if sample.name == "took_bucket"]
    assert {(labels["worker"], labels["le"]) for labels in counts} == {(w, le) for w in "02" for le in ("1.0", "+Inf")}
    assert found.count("# TYPE asked_total counter") == found.count("# HELP took Times.") == 1


def test_a_family_that_only_a_later_worker_has_is_there_too() -> None:
    families = [
        each.name for each in text_string_to_metric_families(merged({0: text(1, is_timed=False), 1: text(1)}).decode())
    ]
    assert families.count("took") == 1

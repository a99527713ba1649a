"""Segmented LRU against a plain model, and the scan it is there to resist."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.recency import PROTECTED_SHARE, SegmentedOrder


def test_a_scan_does_not_push_out_what_is_used_again() -> None:
    order, lru = Cache(10), Cache(10, scan_resistant=False)
    for cache in (order, lru):
        for _ in range(3):
            for hot in range(6):
                cache.use(hot)
        for cold in range(100, 1100):
            cache.use(cold)
    assert all(hot in order.order for hot in range(6))
    assert not any(hot in lru.order for hot in range(6)), "the test is worth nothing if plain LRU passes it"


class Cache:
    """Ten equal things at most."""

    def __init__(self, capacity: int, scan_resistant: bool = True) -> None:
        self.capacity = capacity
        self.scan_resistant = scan_resistant
        self.order: SegmentedOrder[int] = SegmentedOrder(capacity)

    def use(self, key: int) -> None:
        if key in self.order:
            if self.scan_resistant:
                self.order.remove(key)
                self.order.add(key, 1, protected=True)
            else:
                self.order.refresh(key)
            return
        while len(self.order) >= self.capacity:
            oldest = self.order.oldest()
            assert oldest is not None
            self.order.remove(oldest)
        self.order.add(key, 1)


@given(st.lists(st.tuples(st.sampled_from(["add", "hit", "refresh", "remove"]), st.integers(0, 12), st.integers(1, 5))))
@settings(deadline=None)
def test_it_agrees_with_a_model_of_two_lists(actions: list[tuple[str, int, int]]) -> None:
    order: SegmentedOrder[int] = SegmentedOrder(20)
    probation: OrderedDict[int, int] = OrderedDict()
    protected: OrderedDict[int, int] = OrderedDict()
    for action, key, weight in actions:
        segment = protected if key in protected else probation
        if action == "add" and key not in order:
            order.add(key, weight)
            probation[key] = weight
        elif key not in order:
            continue
        elif action == "refresh":
            order.refresh(key)
            segment.move_to_end(key)
        elif action == "remove":
            assert order.remove(key) == (key in protected)
            del segment[key]
        elif action == "hit":
            order.remove(key)
            protected[key] = segment.pop(key)
            protected.move_to_end(key)
            order.add(key, protected[key], protected=True)
            while sum(protected.values()) > 20 * PROTECTED_SHARE:
                demoted, its_weight = protected.popitem(last=False)
                probation[demoted] = its_weight
        assert order.oldest() == next(iter([*probation, *protected]), None)
        assert len(order) == len(probation) + len(protected)

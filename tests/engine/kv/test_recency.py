"""Segmented LRU compared with a plain model. Its resistance to scans is tested in tests/engine/test_eviction.py."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.kv.recency import PROTECTED_SHARE, SegmentedOrder


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

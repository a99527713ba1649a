"""A sequence's blocks by position, compared with a plain list in which released positions are None."""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.engine.kv.pool.block_table import BlockTable


def assert_same(table: BlockTable, plain: list[int | None]) -> None:
    """Compare a table with a plain list.

    `plain` has the block of each position, or None if it was released. A block's generation is ten times its number.
    """
    first = plain.count(None)
    held = [block for block in plain if block is not None]
    assert (len(table), table.first, table.num_held) == (len(plain), first, len(held))
    assert list(table.held) == held
    assert list(table.held_generations) == [10 * block for block in held]
    assert list(table.pairs()) == [(block, 10 * block) for block in held]
    assert list(table.blocks) == held[:1] * first + held, "released positions refer to the first block of the table"
    assert list(table.generations) == [10 * block for block in table.blocks]


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["append", "before"]), st.integers(0, 12)), max_size=12),
)
def test_a_table_is_a_list_whose_head_may_be_missing(
    num_blocks: int, first: int, actions: list[tuple[str, int]]
) -> None:
    blocks = list(range(100, 100 + num_blocks))
    table, plain = BlockTable(blocks, [10 * block for block in blocks], first), [*[None] * first, *blocks]
    assert_same(table, plain)
    for action, n in actions:
        if action == "append":
            table.append(200 + n, 10 * (200 + n))
            plain.append(200 + n)
        else:
            end = min(n, len(plain) - 1)  # a table keeps its last block
            gone = table.before(n)
            assert gone == [(block, 10 * block) for block in plain[:end] if block is not None]
            table.drop(len(gone))
            plain[: plain.count(None) + len(gone)] = [None] * (plain.count(None) + len(gone))
        assert_same(table, plain)


def test_an_empty_table_holds_nothing() -> None:
    assert_same(BlockTable(), [])
    assert BlockTable().before(3) == []

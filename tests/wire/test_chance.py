"""Random bytes drawn ahead are handed out once."""

import os

from wire.chance import DRAWN_AT_ONCE, random_bytes


def test_no_part_is_handed_out_twice_also_where_a_draw_ends() -> None:
    parts = [random_bytes(20) for _ in range(3 * DRAWN_AT_ONCE // 20)]
    assert {len(part) for part in parts} == {20}
    assert len(set(parts)) == len(parts)


def test_more_than_is_drawn_at_once_can_be_had() -> None:
    assert len(random_bytes(3 * DRAWN_AT_ONCE)) == 3 * DRAWN_AT_ONCE


def test_a_forked_child_does_not_go_on_with_its_parents() -> None:
    random_bytes(16)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, random_bytes(16))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 16) != random_bytes(16)
    os.close(reader)
    os.close(writer)

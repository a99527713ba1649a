"""The table of tests/README.md: the paths on which each model family is compared with `transformers`, from pytest's collection.

`python -m tests.table` writes it; tests/test_readme.py fails while it is stale. This module is independent of what tests contain.
"""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "tests" / "README.md"
BEGIN, END = "<!-- written by python -m tests.table -->\n", "<!-- end of the table -->\n"


class Column(NamedTuple):
    """A path through the engine, and the tests that cover it. One of them is enough: families, images and embedders have separate tests."""

    title: str
    tests: tuple[str, ...]


FAMILIES, TIERS, EMBEDDINGS = (
    f"tests/engine/{name}.py" for name in ("test_families", "test_tier_families", "test_embeddings")
)
IMAGES, IMAGE_PATHS = "tests/engine/test_images.py", "tests/engine/vision/test_image_paths.py"
WHOLE, CHUNKED, PREEMPTED = (
    "test_a_whole_prompt_and_its_continuation_agree", "test_a_chunked_prompt_agrees", "test_preempted_sequences_agree"
)  # fmt: skip
COLUMNS = (
    Column("whole", (f"{FAMILIES}::{WHOLE}", f"{IMAGES}::{WHOLE}", f"{EMBEDDINGS}::test_a_whole_text_agrees")),
    Column("decode", (f"{FAMILIES}::{WHOLE}", f"{IMAGES}::{WHOLE}")),
    Column("chunked", (f"{FAMILIES}::{CHUNKED}", f"{IMAGES}::{CHUNKED}", f"{EMBEDDINGS}::test_a_chunked_text_agrees")),
    Column("batch", (
        f"{FAMILIES}::test_sequences_in_one_batch_agree_each_for_itself",
        f"{IMAGES}::test_sequences_in_one_batch_agree_each_for_itself",
        f"{EMBEDDINGS}::test_texts_in_one_batch_agree_each_for_itself",
    )),
    Column("prefix hit", (
        f"{FAMILIES}::test_a_prefix_hit_agrees",
        f"{IMAGES}::test_the_same_image_is_a_prefix_hit_and_is_not_encoded_again",
        f"{EMBEDDINGS}::test_a_cached_prefix_is_used_only_where_the_pooling_allows_it",
    )),
    Column("preemption", (f"{FAMILIES}::{PREEMPTED}", f"{IMAGES}::{PREEMPTED}", f"{EMBEDDINGS}::test_preempted_texts_agree")),
    Column("swap", (f"{TIERS}::test_swapped_sequences_agree", f"{IMAGE_PATHS}::test_swapped_sequences_agree")),
    Column("tier round trip", (
        f"{TIERS}::test_a_round_trip_through_host_disk_and_store_agrees",
        f"{IMAGE_PATHS}::test_an_image_whose_blocks_are_in_a_tier_is_not_encoded_again",
    )),
)  # fmt: skip


def collected() -> dict[str, set[str]]:
    """Return the parameter ids of each collected test in the files of the columns."""
    files = sorted({test.partition("::")[0] for column in COLUMNS for test in column.tests})
    found = _Collected()
    # In this process: it has to import the same models anyway.
    arguments = ["--collect-only", "-qq", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", f"--rootdir={ROOT}"]
    # The models import plugins before pytest does, which causes this warning.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    with redirect_stdout(StringIO()):
        status = pytest.main([*arguments, *(str(ROOT / file) for file in files if (ROOT / file).exists())], [found])
    assert status == pytest.ExitCode.OK, status
    return found.parameters


class _Collected:
    """A plugin that records collected tests."""

    def __init__(self) -> None:
        self.parameters: dict[str, set[str]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        test, _, parameters = item.nodeid.partition("[")
        self.parameters.setdefault(test, set()).add(parameters.removesuffix("]"))


def render() -> str:
    from tests.embedders import EMBEDDERS
    from tests.engine.families import FURTHER, MODELS
    from tests.engine.pictures import FAMILIES as WITH_IMAGES

    found = collected()
    lines = [
        f"| checkpoint | {' | '.join(column.title for column in COLUMNS)} |",
        f"|---|{':-:|' * len(COLUMNS)}",
        *(_row(name, name, found, {FAMILIES, TIERS}) for name in (*MODELS, *FURTHER)),
        *(_row(f"images: {name}", name, found, {IMAGES, IMAGE_PATHS}) for name in WITH_IMAGES),
        *(_row(f"embeddings: {name}", name, found, {EMBEDDINGS}) for name in EMBEDDERS),
    ]
    return BEGIN + "\n".join(lines) + "\n" + END


def _row(label: str, name: str, found: dict[str, set[str]], files: set[str]) -> str:
    cells = [
        any(
            _is_among(name, found.get(test, set()))
            for test in column.tests
            if test.partition("::")[0] in files
        )
        for column in COLUMNS
    ]  # fmt: skip
    return f"| {label} | {' | '.join('yes' if is_shown else '-' for is_shown in cells)} |"


def _is_among(name: str, parameters: set[str]) -> bool:
    """Tell whether a name is one of these parameter ids, or a part of one between hyphens."""
    return any(f"-{name}-" in f"-{parameter}-" for parameter in parameters)


def replaced(text: str, table: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + table + tail


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8"), render()), encoding="utf-8")

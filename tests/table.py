"""The tables of tests/README.md, from pytest's collection: the paths on which each checkpoint is compared with `transformers`, and each family's
ranks, stages and packed weights.

`python -m tests.table` writes them; tests/test_readme.py fails while they are stale. This module is independent of what tests contain.
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
    """A path through the engine, and the tests that cover it. One of them is enough: families, images and embedders have separate tests.

    `case`: a parameter that a test must have besides the row's name.
    """

    title: str
    tests: tuple[str, ...]
    case: str | None = None


FAMILIES, TIERS, EMBEDDINGS = (
    f"tests/engine/{name}.py" for name in ("test_families", "test_tier_families", "test_embeddings")
)
IMAGES, IMAGE_PATHS = "tests/engine/test_images.py", "tests/engine/vision/test_image_paths.py"
HAND_OVER = "tests/engine/test_hand_over.py"
RANKS = (
    "tests/engine/parallel/test_compositions.py::test_every_family_computes_in_every_composition_of_ranks_what_one_rank_does",
)
PACKED = ("tests/engine/test_quantized.py::test_every_family_in_every_form_is_the_model_that_its_numbers_stand_for",)
GGUF = (
    "tests/engine/gguf/test_directory.py::test_plain_numbers_give_the_same_tokens_and_logprobs",
    "tests/engine/gguf/test_state_families.py::test_a_file_gives_the_answers_of_transformers",
)
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
    Column("hand-over", (
        f"{HAND_OVER}::test_tokens_are_those_of_one_host",
        f"{IMAGE_PATHS}::test_the_host_that_answers_encodes_nothing_that_it_fetches",
    )),
)  # fmt: skip
BY_FAMILY = (
    Column("two ranks", RANKS, "tp 2"),
    Column("two stages", RANKS, "pp 2"),
    Column("INT4", PACKED, "int4"),
    Column("INT8", PACKED, "int8"),
    Column("FP8", PACKED, "fp8"),
    Column("GGUF", GGUF),
)
Parameters = frozenset[str]


def collected() -> dict[str, set[Parameters]]:
    """Return the parameters of each collected test in the files of the columns."""
    files = sorted({test.partition("::")[0] for column in COLUMNS + BY_FAMILY for test in column.tests})
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
        self.parameters: dict[str, set[Parameters]] = {}

    def pytest_itemcollected(self, item: pytest.Function) -> None:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        self.parameters.setdefault(item.nodeid.partition("[")[0], set()).add(frozenset(map(str, parameters)))


def render() -> str:
    from tests.embedders import EMBEDDERS
    from tests.engine.families import FURTHER, MODELS
    from tests.engine.gguf.test_directory import FAMILIES as IN_GGUF
    from tests.engine.gguf.test_state_families import FAMILIES as STATES_IN_GGUF
    from tests.engine.parallel import test_compositions
    from tests.engine.pictures import FAMILIES as WITH_IMAGES
    from tests.engine.test_quantized import FAMILIES as IN_PARTS

    found = collected()
    found[RANKS[0]] = {case for case in found[RANKS[0]] if not _is_refused(case)}
    lines = [
        *_head("checkpoint", COLUMNS),
        *(_row(name, COLUMNS, found, {name}, {FAMILIES, TIERS, HAND_OVER}) for name in (*MODELS, *FURTHER)),
        *(_row(f"images: {name}", COLUMNS, found, {name}, {IMAGES, IMAGE_PATHS}) for name in WITH_IMAGES),
        *(_row(f"embeddings: {name}", COLUMNS, found, {name}, {EMBEDDINGS}) for name in EMBEDDERS),
        "",
        *_head("family", BY_FAMILY),
    ]
    families = test_compositions.MODELS | test_compositions.FURTHER | IN_PARTS
    in_gguf = {name: kind for name, (kind, _) in IN_GGUF.items()}
    in_gguf |= {name: type(config) for name, config in STATES_IN_GGUF.items()}
    for name, (kind, _) in families.items():
        files = {test.partition("::")[0] for column in BY_FAMILY for test in column.tests}
        names = {name, *(file for file, of_file in in_gguf.items() if of_file is kind)}
        lines.append(_row(name, BY_FAMILY, found, names, files))
    return BEGIN + "\n".join(lines) + "\n" + END


def _is_refused(parameters: Parameters) -> bool:
    """Return True for a family and a composition of ranks whose test expects an error."""
    from tests.engine.parallel.test_compositions import COMPOSITIONS, FAMILIES, refused_with

    families, hosts = parameters & set(FAMILIES), parameters & COMPOSITIONS.keys()
    return any(refused_with(family, COMPOSITIONS[host]) is not None for family in families for host in hosts)


def _head(rows: str, columns: tuple[Column, ...]) -> tuple[str, str]:
    return f"| {rows} | {' | '.join(column.title for column in columns)} |", f"|---|{':-:|' * len(columns)}"


def _row(
    label: str, columns: tuple[Column, ...], found: dict[str, set[Parameters]], names: set[str], files: set[str]
) -> str:
    """Return a row, in which a column is "yes" if one of its tests in `files` has one of `names` and the column's case as parameters."""
    cells = [
        any(
            names & parameters and (column.case is None or column.case in parameters)
            for test in column.tests
            if test.partition("::")[0] in files
            for parameters in found.get(test, ())
        )
        for column in columns
    ]
    return f"| {label} | {' | '.join('yes' if is_shown else '-' for is_shown in cells)} |"


def replaced(text: str, table: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + table + tail


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8"), render()), encoding="utf-8")

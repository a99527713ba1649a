"""The measures of the source count correctly in trees of a few lines."""

from pathlib import Path

import pytest

from load_tests.house import House, circles, levels, measures
from load_tests.path_shape import shape_of


def tree(root: Path, **files: str) -> House:
    """Write modules, named by keyword with `__` for each dot, and their parent packages."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        for folder in path.relative_to(root).parents[:-1]:
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / "__init__.py").touch()
        path.write_text(text)
    return House(root)


@pytest.mark.parametrize(
    "back",
    [
        "from pilotlight.one import a",
        "def f():\n    import pilotlight.one.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from one.a import A",
    ],
)
def test_every_import_statement_can_close_a_circle(back: str, tmp_path: Path) -> None:
    house = tree(
        tmp_path, one__a="from pilotlight.one.b import B\nA = B", one__b=f"B = 1\n{back}", one__c="from one import a"
    )
    assert circles(house.imports) == [["one.a", "one.b"]]


def test_levels_are_the_longest_chain_inside_a_package_and_a_circle_is_one(tmp_path: Path) -> None:
    house = tree(
        tmp_path, one__a="import pilotlight.one.b", one__b="import pilotlight.one.c, pilotlight.one.a",
        one__c="import pilotlight.two.d", two__d="import pilotlight.one.e", one__e="",
    )  # fmt: skip
    assert levels(house, "one") == 2


def test_each_measure_names_what_it_counts(tmp_path: Path) -> None:
    house = tree(
        tmp_path,
        one__sub__same="class Box:\n    def __init__(self):\n        self.content = None\n",
        one__same="from pilotlight.one.sub.same import Box\nbox = Box()\nbox.content = 1\n",
        one__last="class Own:\n    def __init__(self):\n        self.mine = None\n        self.mine = 2\n",
    )
    found = {measure.name: measure for measure in measures(house)}
    assert found["base names that occur twice in one package"].found == ["one/same.py = one/sub/same.py"]
    assert found["attributes set from outside after construction"].found == ["one/same.py:3 box.content"]
    assert found["modules directly in one folder"].value == 2
    assert found["import circles"].value == 0


def test_what_tests_know_of_the_inside_is_counted_where_it_stands(tmp_path: Path) -> None:
    house = tree(
        tmp_path,
        tests__test_one="from pilotlight.one.a import _inner, outer\n"
        "def test_it(monkeypatch):\n"
        "    monkeypatch.setattr('pilotlight.one.a.MOST_S', 1)\n"
        "    monkeypatch.setattr(outer, '_step', 2)\n"
        "    time.sleep(0.5)\n    time.sleep(0)\n    while not outer.is_done:\n        time.sleep(0.5)\n"
        "    assert outer._count == outer._replace(x=1).y == self._own\n",
    )
    found = {measure.name: measure.found for measure in measures(house)}
    file = "tests/test_one.py"
    assert found["names that tests patch"] == [f"{file}:3 pilotlight.one.a.MOST_S", f"{file}:4 outer._step"]
    assert found["constants that tests patch"] == [f"{file}:3 pilotlight.one.a.MOST_S"]
    assert found["private names that tests reach for"] == [f"{file}:1 _inner", f"{file}:9 outer._count"]
    assert found["pauses of a fixed time in tests"] == [f"{file}:5"]


def test_the_path_of_a_request_is_a_share_of_the_lines_that_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n    def run(self):\n        def inner():\n            return 1\n        return inner\n\n    def other(self):\n        pass\n\n\n"
    )
    (tmp_path / "b.py").write_text("def b():\n    return 2\n" + "\n" * 8)
    (tmp_path / "ARCHITECTURE.md").write_text("1. `a.py::A.run`: runs.\n")
    shape = shape_of(tmp_path, [("a.py", "A.run"), ("b.py", "b")])
    assert (shape.lines_run, shape.lines_opened) == (2 + 2, 20)
    assert (shape.walk_files, shape.walk_steps, shape.walk_lines) == (1, 1, 2)
    assert shape.files_for_few == ["a.py", "b.py"]
    inside = shape_of(tmp_path, [("a.py", "A.run"), ("a.py", "A.run.<locals>.inner")])
    assert inside.lines_run == 4

"""Libraries in a wheel: the intact one of the CPU's highest level is used, or none if the CPU has no level."""

from pathlib import Path

import pytest

from pilotlight.kernels.cpu import build
from pilotlight.kernels.cpu.shipped import levels

BY_NAME = {level.name: level for level in levels.LEVELS}


def ship(folder: Path, *names: str) -> dict[str, Path]:
    found = {}
    for name in names:
        (made := folder / "made").write_bytes(name.encode() * 1000)
        found[name] = made.rename(folder / f"{levels.name_of(BY_NAME[name], made)}.so")
    return found


def processor(name: str) -> str:
    """Return the flags of a CPU of this level. CPUs with matrix units have AVX-VNNI, too."""
    return "flags : fpu " + " ".join(BY_NAME[name].needs) + (" avx_vnni" if name == "amx" else "")


def test_there_are_six_levels_each_with_all_that_the_one_below_it_has() -> None:
    assert [level.name for level in levels.LEVELS] == ["amx", "zen5", "bf16", "vnni", "avx512", "avx2"]
    for above, below in zip(levels.LEVELS[:4], levels.LEVELS[1:5], strict=True):
        assert {*processor(above.name).split()} > {*processor(below.name).split()}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_highest_level_that_the_cpu_has_is_used(tmp_path: Path, name: str) -> None:
    shipped = ship(tmp_path, *BY_NAME)
    has = processor(name) + " f16c bmi1 movbe"
    assert levels.find(has, tmp_path) == shipped[name]
    shipped[name].unlink()
    below = [level.name for level in levels.LEVELS][[*BY_NAME].index(name) + 1 :]
    assert levels.find(has, tmp_path) == (shipped[below[0]] if below else None)


def test_a_cpu_without_avx2_has_no_library(tmp_path: Path) -> None:
    ship(tmp_path, *BY_NAME)
    assert levels.find("flags : fpu sse4_2", tmp_path) is None
    assert levels.find("Features : fp asimd", tmp_path) is None


def test_a_damaged_library_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shipped = ship(tmp_path, "avx512", "avx2")
    shipped["avx512"].write_bytes(b"half")
    assert levels.find(processor("avx512") + " f16c bmi1 movbe", tmp_path) == shipped["avx2"]
    assert "are damaged: install the package again" in caplog.text


def test_what_came_with_the_package_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = ship(tmp_path, "avx2")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("PILOTLIGHT_CPU", raising=False)
    library = build.LibraryBuild(read_processor=lambda: processor("avx2"), shipped=tmp_path)
    assert library.find() == library.build() == shipped["avx2"]
    assert build.limits_file(shipped["avx2"], 1).parent != tmp_path, "a package may be read-only"
    assert build.limits_file(shipped["avx2"], 1) != build.limits_file(shipped["avx2"], 2), "both are kept"
    monkeypatch.setenv("PILOTLIGHT_CPU", "torch")
    assert library.find() is None


def test_a_checkout_has_none() -> None:
    assert not [*levels.FOLDER.glob("*.so")]

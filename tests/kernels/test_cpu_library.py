"""The C library is built once, used if possible, and replaced by torch otherwise."""

import fcntl
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch

from pilotlight.kernels.cpu import build, library
from pilotlight.kernels.cpu.build import BuildError, LibraryBuild, discard_libraries
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.library import LibrarySearch
from tests.cpu_kernels import TORCH, computing_with

pytestmark = [pytest.mark.process, pytest.mark.cpu_only]


@pytest.fixture(autouse=True)
def arithmetic() -> None:
    """Replace the fixture: these tests choose between C and torch themselves."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty cache, and no library."""
    with computing_with(TORCH):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv(build.SWITCH, raising=False)
        yield tmp_path / "pilotlight" / "kernels"


@pytest.fixture
def tiny_sources(tmp_path: Path) -> Path:
    """Write C files that compile quickly, and return their folder."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.c").write_text("#ifdef SCALAR_BF16\nint one_bf16 = 1;\n#else\nint one_f32 = 1;\n#endif\n")
    return sources


@pytest.fixture
def tiny(tiny_sources: Path) -> LibraryBuild:
    return LibraryBuild(tiny_sources)


def test_where_there_is_a_compiler_the_library_is_built() -> None:
    try:
        build.find_compiler()
    except BuildError:
        pytest.skip("there is no C compiler here")
    library.start(wait=True)
    if os.environ.get(build.SWITCH) != build.TORCH:
        assert library.loaded is not None


@pytest.mark.usefixtures("cache")
def test_a_second_start_finds_what_the_first_has_built(tiny: LibraryBuild, tiny_sources: Path) -> None:
    assert tiny.find() is None
    built = tiny.build()
    assert tiny.find() == built
    made = built.stat().st_ino
    assert tiny.build() == built
    assert built.stat().st_ino == made
    (tiny_sources / "one.c").write_text("int another;\n#error never compiled\n")
    assert tiny.find() is None, "a library belongs to its sources"


def test_processes_that_start_together_build_once(cache: Path, tiny_sources: Path) -> None:
    script = (
        "import sys, pathlib; from pilotlight.kernels.cpu.build import LibraryBuild;"
        "print(LibraryBuild(pathlib.Path(sys.argv[1])).build())"
    )
    command = [sys.executable, "-c", script, str(tiny_sources)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0] for process in started}
    assert len(paths) == 1
    assert len(list(cache.glob("*.so"))) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"], "nothing is left behind"


def test_what_a_killed_compiler_left_is_removed(cache: Path, tiny: LibraryBuild) -> None:
    built = tiny.build()
    built.unlink()
    for folder in (cache / "other.build", cache / f"{built.stem.partition('-')[0]}.build"):
        folder.mkdir()
        (folder / "half.o").touch()
    tiny.build()
    assert not list(cache.glob("*.build"))


def test_a_build_waits_for_one_of_other_sources(tiny: LibraryBuild, cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    (cache / "other.build").mkdir()
    with ThreadPoolExecutor(1) as pool:
        with open(cache / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            building = pool.submit(tiny.build)
            with pytest.raises(TimeoutError):
                building.result(0.3)
            assert (cache / "other.build").is_dir()
        assert building.result(60).is_file()


def test_a_library_that_nobody_has_used_for_a_month_is_removed_by_the_next_build(
    tiny: LibraryBuild, tiny_sources: Path, cache: Path
) -> None:
    sources, versions = tiny_sources / "one.c", [f"static int version_{number};\n" for number in range(3)]
    built = []
    for version in versions[:2]:
        sources.write_text(version)
        built.append(tiny.build())
    for library_ in built:
        (cache / f"{library_.stem}-2.json").touch()
        (cache / f"{library_.name.partition('-')[0]}.lock").touch()  # written by earlier releases
        os.utime(library_, (0, 0))
    assert tiny.build() == built[1]  # a use
    sources.write_text(versions[2])
    newest = tiny.build()
    kept = {built[1].name, f"{built[1].stem}-2.json", f"{built[1].name.partition('-')[0]}.lock", newest.name}
    assert {path.name for path in cache.iterdir()} == {*kept, "build.lock"}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("compiler", "reason"), [("/bin/false", "failed"), ("/no/such/compiler", "there is no C compiler")]
)
def test_without_a_working_compiler_torch_computes_and_one_line_says_why(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    search = LibrarySearch(LibraryBuild())
    with caplog.at_level(logging.WARNING):
        search.start(wait=True)
        search.start(wait=True)
    assert library.loaded is None
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]
    from pilotlight.kernels.matrices.linear import linear

    assert torch.equal(linear(torch.eye(3), torch.ones(2, 3)), torch.ones(3, 2))


@pytest.mark.usefixtures("cache")
def test_no_test_waits_for_the_compiler_under_its_time_limit(tmp_path: Path) -> None:
    """A first build on a busy machine took longer than a test's limit of 120 s, and every test of the engine failed."""
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "during: $PYTEST_CURRENT_TEST" >> {calls}\nexit 1\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/wire/test_sse.py"]
    outside = {**os.environ, "CC": str(compiler), "PYTEST_CURRENT_TEST": ""}
    done = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert calls.read_text().splitlines()[0] == "during: "


@pytest.mark.usefixtures("cache")
def test_progress_counts_every_file_for_every_scalar(
    tiny: LibraryBuild, tiny_sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_sources / "two.c").write_text("")
    seen: list[tuple[int, int]] = []
    tiny.build(lambda *counts: seen.append(counts))
    assert seen == [(n, 4) for n in range(5)]
    discard_libraries()
    build.main(tiny)
    build.main(tiny)  # finds the library
    assert capsys.readouterr().err.splitlines() == [
        f"Compiling the CPU kernels (the first time only): {n} of 4 files" for n in (0, 4)
    ]


@pytest.mark.usefixtures("cache")
def test_a_build_in_the_background_says_who_computes_until_when(
    tiny: LibraryBuild, caplog: pytest.LogCaptureFixture
) -> None:
    opened, is_compiled = create_autospec(Library, decodes_fast=True), threading.Event()

    def open_it(path: Path) -> Library:
        is_compiled.wait()
        return opened

    search = LibrarySearch(tiny, open_it)
    with caplog.at_level(logging.INFO):
        search.start()
        assert library.loaded is None
        is_compiled.set()
        assert search.takes_codes(), "the build is awaited"
    assert library.loaded is opened
    assert [message.partition(" in ")[0] for message in caplog.messages] == [
        "torch is used, which is slower, until the CPU kernels are compiled",
        "compiling the CPU kernels for this machine (only the first time)",
        "compiled the CPU kernels",
        "the CPU kernels are ready",
    ]


@pytest.mark.usefixtures("cache")
def test_sources_that_do_not_compile_are_reported_with_the_compilers_words(
    tiny: LibraryBuild, tiny_sources: Path
) -> None:
    (tiny_sources / "two.c").write_text("#error no header here\n")
    with pytest.raises(BuildError, match="no header here"):
        tiny.build()


def test_a_cache_that_others_can_write_to_is_not_used(cache: Path, tiny: LibraryBuild) -> None:
    cache.mkdir(parents=True)
    cache.chmod(cache.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(BuildError, match="chmod go-w"):
        tiny.build()


def test_a_cache_that_is_no_folder_is_reported(cache: Path, tiny: LibraryBuild) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("")
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        tiny.build()


def _cut(content: bytearray) -> bytearray:
    return content[: len(content) // 2]


def _flipped(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("spoil", [_cut, _flipped, lambda content: bytearray()])
def test_a_damaged_library_is_never_opened_and_built_again(
    spoil: Callable[[bytearray], bytearray], tiny: LibraryBuild, caplog: pytest.LogCaptureFixture
) -> None:
    """Calling a damaged library would end the process."""
    path = tiny.build()
    whole = path.read_bytes()
    path.write_bytes(spoil(bytearray(whole)))
    with caplog.at_level(logging.WARNING):
        assert tiny.find() is None
    assert f"the CPU kernels in {path} are damaged" in caplog.text
    assert tiny.build().read_bytes() == whole


@pytest.mark.usefixtures("cache")
def test_a_library_that_cannot_be_used_is_built_again(tiny: LibraryBuild, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny.build()  # this library lacks the required functions
    made_at = path.stat().st_mtime_ns
    with caplog.at_level(logging.WARNING):
        LibrarySearch(tiny).start(wait=True)
    assert library.loaded is None
    assert f"the CPU kernels in {path} are damaged" in caplog.text
    assert path.stat().st_mtime_ns > made_at


@pytest.mark.usefixtures("cache")
def test_libraries_that_are_suspected_are_built_again(tiny: LibraryBuild, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny.build()
    with caplog.at_level(logging.WARNING):
        discard_libraries()
    assert str(path) in caplog.text
    assert tiny.find() is None
    assert tiny.build() == path


def test_a_library_has_its_name_only_when_all_of_it_is_on_the_disk(
    cache: Path, tiny: LibraryBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, bool]] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        order.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, bool(list(cache.glob("*.so")))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    tiny.build()
    assert order == [("library.so", False), ("kernels", True)]


@pytest.mark.usefixtures("cache")
def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, build.TORCH)
    LibrarySearch(LibraryBuild()).start(wait=True)
    assert library.loaded is None
    assert LibraryBuild().find() is None


@pytest.mark.usefixtures("cache")
def test_each_kind_of_cpu_has_a_library_of_its_own(tiny: LibraryBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    built: dict[str | None, Path] = {None: tiny.build()}
    for kind in build.KINDS[:-1]:
        monkeypatch.setenv(build.SWITCH, kind)
        with suppress(BuildError):  # if this machine cannot compute as that kind
            built[kind] = tiny.build()
    assert len(set(built.values())) == len(built)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("kind", "flags", "reason"),
    [
        ("avx3", "avx2", "set it to avx2, avx512, avx512vnni, avx512bf16, amx or torch"),
        ("amx", "avx2 avx512vl", "needs a CPU with avx512_bf16"),
    ],
)
def test_a_kind_of_cpu_that_cannot_be_had_is_refused_by_name(
    kind: str, flags: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = LibraryBuild(read_processor=lambda: f"flags: {flags}")
    monkeypatch.setenv(build.SWITCH, kind)
    for ask in (here.find, here.build, lambda: LibrarySearch(here).start(wait=True)):
        with pytest.raises(BuildError, match=rf"PILOTLIGHT_CPU={kind} .*{reason}"):
            ask()


def test_the_library_is_compiled_for_the_cache_of_a_core() -> None:
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index0")
    if not cache.exists() or (cache / "level").read_text() != "1\n" or (cache / "type").read_text() != "Data\n":
        pytest.skip("the kernel does not report the first-level cache")
    assert (cache / "size").read_text() == f"{build.level1_kib()}K\n"


def test_threads_that_call_at_once_all_get_their_results() -> None:
    """The library has one team of threads: a caller that finds it busy computes alone."""
    from concurrent.futures import ThreadPoolExecutor

    from pilotlight.kernels.matrices.linear import linear

    library.start(wait=True)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(600, 512, generator=generator)
    inputs = [torch.randn(3, 512, generator=generator) for _ in range(40)]
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        expected = [linear(x, weight) for x in inputs]
        with ThreadPoolExecutor(4) as pool:
            actual = list(pool.map(lambda x: linear(x, weight), inputs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.skipif(os.environ.get(build.SWITCH) == build.TORCH, reason="torch's own threads do not survive a fork")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    script = """
import os, torch
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.linear import linear
torch.set_num_threads(3)
library.start(wait=True)
x, weight = torch.randn(2, 512), torch.randn(600, 512)
expected = linear(x, weight)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(linear(x, weight), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

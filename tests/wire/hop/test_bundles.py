"""Bundles: equal files give equal bytes, and neither packing nor unpacking follows a path out of the folder."""

import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.wire.hop.bundles import BundleError, BundleLimits, check, digest_of, pack, unpack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "f"
    (root / "src").mkdir(parents=True)
    (root / "wrangler.toml").write_text('name = "f"')
    (root / "src/entry.py").write_bytes(b"\x00\xff" * 5000)
    (root / "src/ümläut.txt").write_text("x")
    return root


def test_a_folder_comes_out_as_it_went_in(folder: Path, tmp_path: Path) -> None:
    data = pack(folder)
    assert check(data) == 3
    unpack(data, tmp_path / "out")
    assert (tmp_path / "out/src/entry.py").read_bytes() == b"\x00\xff" * 5000
    assert pack(tmp_path / "out") == data


def test_the_same_files_make_the_same_bytes_whenever_they_were_written(folder: Path) -> None:
    first = digest_of(pack(folder))
    os.utime(folder / "wrangler.toml", (1, 1))
    (folder / "src/entry.py").chmod(0o777)
    (folder / ".dev.vars").write_text("SECRET=1")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/x.pyc").write_bytes(b"x")
    assert digest_of(pack(folder)) == first
    (folder / "wrangler.toml").write_text('name = "g"')
    assert digest_of(pack(folder)) != first


def test_secrets_of_a_workplace_stay_there(folder: Path) -> None:
    for name in (".dev.vars", ".dev.vars.staging", ".env"):
        (folder / name).write_text("TOKEN=do-not-send")
    assert b"do-not-send" not in pack(folder)


def test_links_pipes_and_large_folders_are_refused(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match="link is a link"):
        pack(folder)
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(BundleError, match="pipe is neither a file nor a folder"):
        pack(folder)
    (folder / "pipe").unlink()
    with pytest.raises(BundleError, match="more than 2 files"):
        pack(folder, BundleLimits(num_files=2))
    with pytest.raises(BundleError, match="MiB"):
        pack(folder, BundleLimits(num_bytes=1 << 13))


def tar_of(*entries: tuple[str, bytes, dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content, further in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for key, value in further.items():
                setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        tar_of(("../out", b"x", {})),
        tar_of(("/etc/x", b"x", {})),
        tar_of(("a/../../x", b"x", {})),
        tar_of(("a//b", b"x", {})),
        tar_of(("link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})),
        tar_of(("hard", b"", {"type": tarfile.LNKTYPE, "linkname": "a"})),
        tar_of(("pipe", b"", {"type": tarfile.FIFOTYPE})),
        tar_of(("folder", b"", {"type": tarfile.DIRTYPE})),
        tar_of(("sparse", b"x", {"pax_headers": {"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"}})),
        tar_of(("named", b"x", {"linkname": "/etc/passwd"})),
        tar_of(("a", b"1", {}), ("a", b"2", {})),
        tar_of(("a", b"1", {}), ("a/b", b"2", {})),
        tar_of(("x" * 300, b"1", {})),
        tar_of(("a", b"x" * 5000, {}))[:3000],
        tar_of(),
        b"",
        b"not a tar" * 100,
        b"\x1f\x8b" + b"x" * 1000,
    ],
)
def test_what_pack_would_not_have_made_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        check(data)
    with pytest.raises(BundleError):
        unpack(data, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # nothing was written outside


NAMES = ["a", "a0", *("b" * n for n in range(80, 241)), "c/" + "e" * 238, "d/ümläut=1.txt", *("ü" * n for n in range(1, 121))]  # fmt: skip


def test_the_bytes_are_those_of_tarfile(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    for n, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * (n * 100))
    expected = tar_of(*((name, b"x" * (n * 100), {}) for n, name in enumerate(NAMES)))
    assert pack(folder) == expected
    assert check(expected) == len(NAMES)


def pax_head(payload: bytes) -> bytes:
    """Return a tar with one file and this extended header. Before Python 3.11.10 `tarfile` parses such headers in quadratic time."""
    plain = tar_of(("a", b"1", {}))
    head = tarfile.TarInfo("././@PaxHeader")
    head.type, head.size, head.mode = tarfile.XHDTYPE, len(payload), 0
    return head.tobuf(tarfile.USTAR_FORMAT) + payload + b"\0" * (-len(payload) % 512) + plain


@pytest.mark.parametrize(
    "data",
    [
        pax_head(b"0" * 3000),
        pax_head(b"0" * 1000),
        pax_head(b"9 path=a\n"),
        pax_head(b"14 path=b\n"),
        pax_head(b"18 size=99999999\n"),
        pax_head(b""),
        tar_of(("a", b"1", {"type": b"g"}), ("b", b"1", {})),  # a global extended header
        tar_of(("a", b"1", {"type": b"L"}), ("b", b"1", {})),  # a long name as in GNU tar
        tar_of(("b", b"1", {}), ("a", b"1", {})),
        tar_of(("a", b"1", {"mode": 0o755})),
        tar_of(("a", b"1", {"mtime": 5})),
        tar_of(("a", b"1", {}))[:-512],
        tar_of(("a", b"1", {})) + b"\0" * 10240,
        tar_of(("a", b"1", {}))[:-1] + b"1",
        tar_of(("a", b"1", {})).replace(b"1" + b"\0" * 511, b"1" + b"\0" * 510 + b"1"),
    ],
)
def test_heads_that_pack_does_not_write_are_refused_before_anything_reads_them(data: bytes) -> None:
    with pytest.raises(BundleError):
        check(data)


@given(st.data())
def test_no_change_of_a_bundle_ends_in_anything_but_a_refusal(data: st.DataObject) -> None:
    bundle = bytearray(tar_of(*((name, b"x" * 700, {}) for name in NAMES[::30])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from(range(0, len(bundle), 512))) + data.draw(st.integers(0, 511))
        bundle[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bundle)))
    for changed in (bytes(bundle), bytes(bundle[:cut])):
        with suppress(BundleError):
            check(changed)


def test_a_bundle_is_as_large_as_it_may_be_packed_and_unpacked(folder: Path) -> None:
    data = pack(folder)
    just_enough, too_small = BundleLimits(len(data), 3), BundleLimits(len(data) - 1, 3)
    assert (check(data, just_enough), pack(folder, just_enough)) == (3, data)
    with pytest.raises(BundleError, match="of at most"):
        check(data, too_small)
    with pytest.raises(BundleError, match="MiB"):
        pack(folder, too_small)
    with pytest.raises(BundleError, match="more than 2 files"):
        check(data, BundleLimits(len(data), 2))

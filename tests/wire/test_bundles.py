"""Bundles: the same bytes for the same files, and nothing that leads out, in either direction."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from wire import bundles
from wire.bundles import BundleError, check, digest_of, pack, unpack


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


def test_links_pipes_and_large_folders_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match="link is a link"):
        pack(folder)
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(BundleError, match="pipe is neither a file nor a folder"):
        pack(folder)
    (folder / "pipe").unlink()
    monkeypatch.setattr(bundles, "MAX_FILES", 2)
    with pytest.raises(BundleError, match="more than 2 files"):
        pack(folder)
    monkeypatch.setattr(bundles, "MAX_FILES", 10)
    monkeypatch.setattr(bundles, "MAX_BYTES", 1 << 13)
    with pytest.raises(BundleError, match="MiB"):
        pack(folder)


def tar_of(*entries: tuple[str, bytes, dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # nothing beside it


def test_a_bundle_is_as_large_as_it_may_be_packed_and_unpacked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(folder)
    monkeypatch.setattr(bundles, "MAX_FILES", 3)
    for size, is_taken in ((len(data), True), (len(data) - 1, False)):
        monkeypatch.setattr(bundles, "MAX_BYTES", size)
        if is_taken:
            assert (check(data), pack(folder)) == (3, data)
        else:
            with pytest.raises(BundleError, match="of at most"):
                check(data)
            with pytest.raises(BundleError, match="MiB"):
                pack(folder)
    monkeypatch.setattr(bundles, "MAX_BYTES", len(data))
    monkeypatch.setattr(bundles, "MAX_FILES", 2)
    with pytest.raises(BundleError, match="more than 2 files"):
        check(data)

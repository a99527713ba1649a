"""Damaged, hostile and unsupported GGUF files are refused with the reason, before memory is allocated for them."""

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.gguf.file import GgufFile
from tests.engine.gguf.files import write_both


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(keys: list[bytes] = [], tensors: list[bytes] = [], version: int = 3, num_keys: int | None = None) -> bytes:  # noqa: B006
    counts = struct.pack("<IQQ", version, len(tensors), len(keys) if num_keys is None else num_keys)
    return b"GGUF" + counts + b"".join(keys) + b"".join(tensors)


def tensor(name: str = "x", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ENDLESS = 1 << 60
DAMAGED = {
    "another format": (b"PK\x03\x04 and more", "is not a GGUF file: it does not begin with GGUF"),
    "version 1": (header(version=1), "of version 1; supported are 2 and 3"),
    "big-endian": (header(version=3 << 24), "for big-endian machines"),
    "only the magic": (b"GGUF", "claims 4 bytes, but 0 are left"),
    "endless keys": (header(num_keys=ENDLESS), f"claims {ENDLESS} keys of metadata"),
    "an endless key": (header([struct.pack("<Q", ENDLESS)]), f"a key of metadata claims {ENDLESS} bytes"),
    "an endless text": (header([text("k") + struct.pack("<IQ", 8, ENDLESS)]), f"k claims {ENDLESS} bytes"),
    "an endless list": (header([text("k") + struct.pack("<IIQ", 9, 4, ENDLESS)]), f"claims {ENDLESS} items of k"),
    "an endless list of texts": (
        header([text("k") + struct.pack("<IIQ", 9, 8, ENDLESS)]),
        f"claims {ENDLESS} items of k",
    ),
    "a list of more than there is": (header([text("k") + struct.pack("<IIQ", 9, 4, 9)]), "k claims 36 bytes"),
    "a list of more texts than there are": (header([text("k") + struct.pack("<IIQ", 9, 8, 9)]), "k claims 72 bytes"),
    "a list of more empty texts than any model has": (
        header([text("k") + struct.pack("<IIQ", 9, 8, (1 << 22) + 1) + bytes(8 * ((1 << 22) + 1))]),
        f"claims {(1 << 22) + 1} items of k",
    ),
    "lists in lists": (header([text("k") + struct.pack("<IIQ", 9, 9, 1)]), "k is a list of the unknown type 9"),
    "a type that does not exist": (header([text("k") + struct.pack("<I", 99)]), "k has a value of the unknown type 99"),
    "no UTF-8": (header([struct.pack("<Q", 2) + b"\xff\xfe"]), "is not UTF-8"),
    "no dimensions": (header(tensors=[tensor(dims=())]), "tensor x has 0 dimensions"),
    "an empty tensor": (header(tensors=[tensor(dims=(0,))]), r"has shape \[0\]"),
    "an endless tensor": (header(tensors=[tensor(dims=(ENDLESS,))]), "which F32 with blocks of 1 values cannot have"),
    "half a block": (header(tensors=[tensor(dims=(33,), kind=8)]), r"has shape \[33\], which Q8_0 with blocks of 32"),
    "a type that is not read": (header(tensors=[tensor(kind=16)]), "has type IQ2_XXS; supported are F32, F16"),
    "an unknown type": (header(tensors=[tensor(kind=77)]), "has type 77; supported are"),
    "an offset between": (header(tensors=[tensor(offset=3)]) + bytes(99), "is not aligned to 32 bytes"),
    "a tensor twice": (header(tensors=[tensor(), tensor()]) + bytes(99), "lists tensor x twice"),
    "a tensor beyond the end": (header(tensors=[tensor(dims=(1 << 20,))]), "is truncated: tensor x ends at byte"),
    "no alignment": (header([text("general.alignment") + struct.pack("<II", 4, 0)]), "general.alignment = 0"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_with_its_error(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufFile.open(tmp_path / "bad.gguf")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        GgufFile.open(tmp_path / "empty.gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_both(tmp_path_factory.mktemp("whole"), LlamaConfig)[1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_file_cut_or_flipped_anywhere_is_read_or_refused(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    end = GgufFile.open(whole).tensors["token_embd.weight"].start
    at = data.draw(st.integers(0, end - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    changed = whole.with_name("changed.gguf")
    changed.write_bytes(content)
    with suppress(CheckpointError):
        directory_of(changed, whole.parent / "store")

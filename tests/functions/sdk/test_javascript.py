"""Functions that use names of JavaScript's standard library."""

import struct

import pytest

from js import (
    ArrayBuffer,
    Blob,
    DataView,
    Date,
    Float32Array,
    Int16Array,
    TextDecoder,
    Uint8Array,
    Uint8ClampedArray,
    atob,
    btoa,
)
from workers.values import pack


def test_a_decoder_passes_over_what_is_no_text_only_where_it_may() -> None:
    broken = b"a\xffb"
    assert TextDecoder.new().decode(broken) == TextDecoder.new("utf-8", {"fatal": False}).decode(broken) == "a\ufffdb"
    for strict in (TextDecoder.new("utf-8", {"fatal": True}), TextDecoder.new(fatal=True)):
        assert strict.decode("ä".encode()) == "ä"
        with pytest.raises(ValueError, match="invalid start byte"):
            strict.decode(broken)


def test_a_character_may_be_in_two_chunks_of_a_decoded_stream() -> None:
    decoder, text = TextDecoder.new(), "aäb".encode()
    assert decoder.decode(text[:2], {"stream": True}) + decoder.decode(text[2:], stream=True) == "aäb"
    assert decoder.decode(text[1:2], {"stream": True}) + decoder.decode() == "\ufffd"
    assert decoder.decode(text) == "aäb"


def test_a_date_is_read_from_iso_and_from_http() -> None:
    for text in ("2026-01-02T03:04:05Z", "Fri, 02 Jan 2026 03:04:05 GMT", "2026-01-02T04:04:05+01:00"):
        assert Date.new(text).toISOString() == "2026-01-02T03:04:05.000Z"
    with pytest.raises(ValueError, match="soon"):
        Date.new("soon")


def test_base64_is_decoded_without_padding_and_not_with_foreign_characters() -> None:
    assert [atob(text) for text in ("eyJhIjoxfQ", "eyJh IjoxfQ==\n", "YQ", "")] == ['{"a":1}', '{"a":1}', "a", ""]
    assert atob(btoa("é")) == "é"
    for wrong in ("eyJh-_", "a", "YQ=a"):
        with pytest.raises(ValueError, match=r"base64|padding"):
            atob(wrong)


def test_typed_arrays_hold_numbers_of_their_type_and_are_bytes_elsewhere() -> None:
    array = Int16Array.new([1, -2, 70000])
    assert (list(array), array.length, array.byteLength) == ([1, -2, 4464], 3, 6)
    assert Int16Array.new(array.buffer) == array
    assert list(array.subarray(1)) == [-2, 4464]
    assert (array[1], list(Int16Array.of("10", "24")), list(Float32Array.new([1.5]))) == (-2, [10, 24], [1.5])
    assert list(Uint8ClampedArray.new([-5, 300, 7])) == [0, 255, 7]
    array[0] = 9
    array.set([4], 2)
    assert array.to_py().tolist() == [9, -2, 4]
    assert pack(array, "a value") == array.to_bytes() == struct.pack("=3h", 9, -2, 4)
    assert Blob([array]).size == 6
    with pytest.raises(ValueError, match="a multiple of 4 bytes, not 6"):
        Float32Array.new(array.buffer)


def test_bytes_stay_mutable_bytes() -> None:
    array = Uint8Array.new(b"ab")
    array[:] = b"cd"
    assert (bytes(array), array == b"cd", array.decode(), list(Uint8Array.new(2))) == (b"cd", True, "cd", [0, 0])


def test_a_data_view_reads_and_writes_numbers_in_either_order() -> None:
    view = DataView.new(ArrayBuffer.new(8))
    view.setInt16(0, -2)
    view.setFloat32(4, 1.5, True)
    assert (view.getUint16(0), view.getUint8(1), view.getFloat32(4, True), view.byteLength) == (65534, 254, 1.5, 8)
    assert view.buffer == struct.pack(">hxx", -2) + struct.pack("<f", 1.5)

"""Upload forms with a file, and fine-tunes with their files in one body: valid bodies and refused ones."""

from collections.abc import AsyncGenerator

import pytest

from pilotlight.wire.errors import ApiError
from pilotlight.wire.forms import MOST_FIELDS, file_in, read_form
from pilotlight.wire.hop.finetunes import Finetune, moment, packed, unpacked

TYPE = "multipart/form-data; boundary=b"


def part(name: str, content: str, filename: str = "") -> str:
    file = f'; filename="{filename}"' if filename else ""
    return f'--b\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n{content}\r\n'


async def pieces(text: str, size: int = 7) -> AsyncGenerator[bytes, None]:
    data = text.encode()
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_a_forms_fields_and_its_file_are_read_wherever_it_is_cut() -> None:
    fields = [part(f"f{i}", str(i)) for i in range(MOST_FIELDS)]
    form = await read_form(
        TYPE.upper().replace("B", "b"), pieces("".join(fields) + part("file", "abc", "a.txt") + "--b--\r\n")
    )
    assert {name: form[name] for name in form if name != "file"} == {f"f{i}": str(i) for i in range(MOST_FIELDS)}
    file = file_in(form)
    assert (await file.read(), file.filename) == (b"abc", "a.txt")
    await form.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (TYPE, "".join(part(f"f{i}", "x") for i in range(MOST_FIELDS + 1)) + "--b--\r\n"),
        (TYPE, part("file", "a", "a") + part("more", "b", "b") + "--b--\r\n"),
        ("multipart/form-data", part("file", "a", "a") + "--b--\r\n"),
    ],
)
async def test_what_is_no_form_or_has_too_much_is_refused(kind: str, text: str) -> None:
    with pytest.raises(ApiError) as refused:
        await read_form(kind, pieces(text))
    assert refused.value.word == "invalid_request"


@pytest.mark.parametrize("kind", ["application/json", "", "multipart/mixed; boundary=b"])
async def test_another_type_gets_the_way_to_send_a_file(kind: str) -> None:
    with pytest.raises(ApiError, match="a file is sent as multipart/form-data, in the field file"):
        await read_form(kind, pieces(part("file", "abc", "a.txt") + "--b--\r\n"))


@pytest.mark.parametrize("text", [part("other", "abc", "a.txt"), part("file", "no file")])
async def test_a_form_without_its_file_is_refused(text: str) -> None:
    form = await read_form(TYPE, pieces(text + "--b--\r\n"))
    with pytest.raises(ApiError) as refused:
        file_in(form)
    assert refused.value.param == "file"
    await form.close()


FINETUNE = Finetune("id", "owner", "acme", "m", "name", created_s=1.0, modified_s=1.5)


def test_a_finetune_comes_back_with_both_of_its_files() -> None:
    body = packed(FINETUNE, b'{"a":\n1}', b"\nweights")
    finetune, config, weights = unpacked(body)
    assert (finetune, bytes(config), bytes(weights)) == (FINETUNE, b'{"a":\n1}', b"\nweights")


@pytest.mark.parametrize(
    "body", [b"", b"{}\n", packed(FINETUNE, b"c", b""), packed(FINETUNE, b"", b"w"), packed(FINETUNE, b"cc", b"w")[:-2]]
)
def test_a_finetune_that_lacks_a_file_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpacked(body)


def test_clients_see_a_finetune_and_whether_it_is_public() -> None:
    assert moment(1.5) == "1970-01-01T00:00:01.500Z"
    told = FINETUNE.listed()
    assert (told.id, told.created_at, told.modified_at, told.model, told.name, told.public) == (
        "id", "1970-01-01T00:00:01.000Z", "1970-01-01T00:00:01.500Z", "m", "name", False,
    )  # fmt: skip
    assert Finetune("id", "", "", "m", "name").listed().public

"""Small images, valid and invalid, and a model directory whose tokenizer and template support them."""

import json
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from PIL import Image
from tokenizers import AddedToken

from tests.fakes import byte_tokenizer, write_model_directory

MARKER = "<|media_pad|>"
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ '<|media_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def picture(width: int = 56, height: int = 28, colour: str = "red", kind: str = "PNG") -> bytes:
    """Return an image of one colour. With patches of 14 merged two by two, 56 x 28 are two tokens."""
    file = BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


def moving(kind: str) -> bytes:
    file = BytesIO()
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue")]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG that claims a size, and has almost no data after its header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def write_seeing_directory(directory: Path) -> Path:
    """Write the text side of a checkpoint that accepts images in the format of Kimi's models."""
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]},
    }
    return _write(directory, MARKER, {"media_placeholder_token_id": MARKER}, config)


def write_gemma_directory(directory: Path) -> Path:
    """Write the text side of a checkpoint that accepts images in the format of Gemma 3, each of four tokens."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 4,
        "vision_config": {"image_size": 24, "patch_size": 6},
    }
    tokens = {
        "image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
    }  # fmt: skip
    return _write(directory, "<start_of_image>", tokens, config)


def _write(directory: Path, marker: str, tokens: dict[str, str], config: Mapping[str, object]) -> Path:
    """`marker`: the text that the template writes for an image; `tokens`: special tokens, by the keys of config.json for their ids."""
    write_model_directory(directory, template=TEMPLATE.replace(MARKER, marker))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tokens.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {key: tokenizer.token_to_id(text) for key, text in tokens.items()}
    (directory / "config.json").write_text(json.dumps(dict(config) | ids))
    return directory

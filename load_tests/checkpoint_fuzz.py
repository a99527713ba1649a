"""A fuzzer for the readers of checkpoints, images and bundles.

`python -m load_tests.checkpoint_fuzz [--minutes 1] [--seed 1] [--only KIND] [--out FILE]`

Random changes of well-formed files go to the project's readers in guarded child processes. Outcomes are counted for each kind: accepted, refused with
the reader's own error, another exception, or the end of the child. Inputs with one of the last two outcomes are printed, or written to a file, one
JSON object per line with the bytes in base64. If there were any, the exit status is 1.
"""

import argparse
import io
import json
import random
import struct
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.guarded_pool import GuardedJob, GuardedPool, JobCall, JobEndedError, JobError
from pilotlight.engine.text.chat_template import check_template, render_template
from pilotlight.engine.text.image_file import check_image
from pilotlight.engine.text.image_prompt import IMAGE_FORMATS
from pilotlight.engine.tokenizer.tokenizer import check_tokenizer
from pilotlight.wire.hop import bundles
from training.ember.chat import HERE

REFUSALS = {
    "TokenizerError",
    "ImageError",
    "CheckpointError",
    "BundleError",
    "ChatTemplateError",
    "BrokenTemplateError",
}
NUMBERS = (
    0,
    1,
    -1,
    2,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    1e308,
    float("inf"),
)
TEXTS = (
    "",
    "a",
    "\u0000",
    "\ud83d\ude00",
    "\ufffd",
    "\u0120",
    "a" * 5000,
    "(a*)*$",
    "(?:a|aa)+b",
    "\\p{L}+",
    "[",
    "(" * 500,
    "\\1",
    "(?=a)",
    ".{0,65535}{0,65535}",
)
MESSAGES = [{"role": "user", "content": "Hi"}]


class Case(NamedTuple):
    """A random input, and the call that reads it."""

    content: bytes
    call: JobCall


def read_tokenizer(encoded: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_bytes(b64decode(encoded))
        check_tokenizer(folder)


def read_safetensors(encoded: str) -> None:
    from pilotlight.engine.weights.checkpoint import index_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.safetensors").write_bytes(b64decode(encoded))
        index_checkpoint(Path(folder))


def read_gguf(encoded: str) -> None:
    from pilotlight.engine.gguf import directory

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.gguf")
        file.write_bytes(b64decode(encoded))
        directory.directory_of(file, Path(folder, "made"))


def read_bundle(encoded: str) -> None:
    bundles.check(b64decode(encoded))


def read_template(encoded: str) -> None:
    template = json.dumps([{"default": b64decode(encoded).decode("utf-8", "replace")}, {"bos_token": "<s>"}])
    check_template(template)
    render_template(template, MESSAGES, None, True, {})


def draw_json(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """Return a JSON value with a few of its parts changed."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        changed = {**value, key: draw_json(rng, value[key], depth + 1)}
        roll = rng.random()
        if roll < 0.05:
            del changed[key]
        elif roll < 0.1:
            changed[rng.choice(TEXTS)] = value[key]
        return changed
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        changed_list = [*value[:at], draw_json(rng, value[at], depth + 1), *value[at + 1 :]]
        return changed_list * 2 if rng.random() < 0.03 else changed_list
    roll = rng.random()
    if roll < 0.35:
        return rng.choice(NUMBERS)
    if roll < 0.7:
        return rng.choice(TEXTS)
    return rng.choice((None, True, False, [], {}, [[]], {"type": "Sequence"}))


def draw_bytes(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, roll = rng.randrange(len(changed) or 1), rng.random()
        if roll < 0.4:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif roll < 0.7:
            width = rng.choice("BHIQ")
            number = int(rng.choice(NUMBERS[:15])) % (1 << 8 * struct.calcsize(width))
            changed[at : at + struct.calcsize(width)] = struct.pack(rng.choice("<>") + width, number)
        elif roll < 0.8:
            del changed[at : at + rng.randrange(1, 64)]
        elif roll < 0.9:
            start = rng.randrange(len(changed) or 1)
            changed[at:at] = changed[start : start + rng.randrange(1, 256)]
        else:
            del changed[at:]
    return bytes(changed)


def draw_tokenizer(rng: random.Random) -> Case:
    value = json.loads(rng.choice(_TOKENIZERS))
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = draw_json(rng, value)
    if rng.random() < 0.4:
        part = rng.choice(("normalizer", "pre_tokenizer", "decoder", "post_processor"))
        value[part] = draw_part(rng)
    content = json.dumps(value).encode()
    return Case(content, JobCall(read_tokenizer, (b64encode(content).decode(),)))


def draw_part(rng: random.Random) -> Any:
    pattern = {rng.choice(("Regex", "String")): rng.choice(TEXTS)}
    parts: tuple[dict[str, Any], ...] = (
        {"type": "Replace", "pattern": pattern, "content": rng.choice(TEXTS)},
        {"type": "Split", "pattern": pattern, "behavior": rng.choice(("Isolated", "Removed", "MergedWithNext")), "invert": rng.random() < 0.5},
        {"type": "Strip", "content": rng.choice(TEXTS), "start": rng.choice(NUMBERS), "stop": rng.choice(NUMBERS)},
        {"type": "Prepend", "prepend": rng.choice(TEXTS)},
        {"type": "Precompiled", "precompiled_charsmap": b64encode(rng.randbytes(rng.randrange(200))).decode()},
        {"type": "Metaspace", "replacement": rng.choice(TEXTS), "prepend_scheme": "always", "split": True},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "NFKC"}, {"type": "Nmt"}, {"type": "BertPreTokenizer"},
        {"type": "Digits", "individual_digits": True},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "WordPiece", "prefix": rng.choice(TEXTS), "cleanup": True},
        {"type": "FixedLength", "length": rng.choice(NUMBERS)},
    )  # fmt: skip
    if rng.random() < 0.3:
        key = rng.choice(("normalizers", "pretokenizers", "decoders", "processors"))
        return {"type": "Sequence", key: [rng.choice(parts) for _ in range(rng.randrange(4))]}
    return rng.choice(parts)


def draw_image(rng: random.Random) -> Case:
    content = draw_bytes(rng, rng.choice(_IMAGES))
    return Case(content, JobCall(check_image, (b64encode(content).decode(), 50_000_000)))


def draw_safetensors(rng: random.Random) -> Case:
    header: Any = {f"t{i}": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * i, 24 * i + 24]} for i in range(4)}
    for _ in range(rng.choice((0, 1, 2, 5))):
        header = draw_json(rng, header)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(96)
    if rng.random() < 0.5:
        content = draw_bytes(rng, content)
    return Case(content, JobCall(read_safetensors, (b64encode(content).decode(),)))


def draw_gguf(rng: random.Random) -> Case:
    content = draw_bytes(rng, _GGUF)
    return Case(content, JobCall(read_gguf, (b64encode(content).decode(),)))


def draw_bundle(rng: random.Random) -> Case:
    content = draw_bytes(rng, _BUNDLE)
    return Case(content, JobCall(read_bundle, (b64encode(content).decode(),)))


def draw_template(rng: random.Random) -> Case:
    parts = [rng.choice(_TEMPLATE_PARTS) for _ in range(rng.randrange(1, 12))]
    content = "".join(parts).encode()
    if rng.random() < 0.3:
        content = draw_bytes(rng, content)
    return Case(content, JobCall(read_template, (b64encode(content).decode(),)))


def _images() -> list[bytes]:
    from PIL import Image

    made = []
    for mode, form in (("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "WEBP"),
                       ("RGBA", "WEBP"), ("P", "GIF"), ("RGB", "BMP"), ("P", "BMP"), ("1", "BMP")):  # fmt: skip
        for options in ({}, {"progressive": True} if form == "JPEG" else {"lossless": True}):
            file = io.BytesIO()
            Image.effect_noise((37, 21), 90).convert("RGB").convert(mode).save(file, form, **options)
            made.append(file.getvalue())
    assert {form for form in IMAGE_FORMATS} == {"PNG", "JPEG", "WEBP", "GIF", "BMP"}
    return made


def _tokenizers() -> list[str]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "##b": 4, " ": 5, "\u2581": 6, "\u2581a": 7}
    made = [
        Tokenizer(models.BPE(words, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)),
        Tokenizer(models.WordPiece(words, unk_token="<unk>")),
        Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("\u2581a", -1.5)], 0, False)),
    ]
    for tokenizer in made:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace()])
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.add_special_tokens(["<s>", "</s>"])
    return [*(tokenizer.to_str() for tokenizer in made), (HERE / "tokenizer.json").read_text()]


def _gguf() -> bytes:
    """Return a small file of version 3: keys of every type and three tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = [
        ("general.architecture", 8, text("llama")), ("general.alignment", 4, struct.pack("<I", 32)), ("llama.block_count", 4, struct.pack("<I", 1)),
        ("llama.embedding_length", 4, struct.pack("<I", 32)), ("llama.feed_forward_length", 4, struct.pack("<I", 64)),
        ("llama.attention.head_count", 4, struct.pack("<I", 4)), ("llama.attention.head_count_kv", 4, struct.pack("<I", 2)),
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)), ("llama.context_length", 4, struct.pack("<I", 128)),
        ("tokenizer.ggml.model", 8, text("gpt2")), ("tokenizer.ggml.pre", 8, text("gpt-2")),
        ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("b") + text("ab")),
        ("tokenizer.ggml.token_type", 9, struct.pack("<IQ3i", 5, 3, 1, 1, 1)), ("tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + text("a b")),
        ("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 0)), ("tokenizer.chat_template", 8, text("{{ messages[0].content }}")),
    ]  # fmt: skip
    tensors = [("token_embd.weight", (32, 3)), ("blk.0.attn_norm.weight", (32,)), ("output_norm.weight", (32,))]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for name, kind, value in keys:
        head += text(name) + struct.pack("<I", kind) + value
    start = 0
    for name, shape in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, start)
        start += 4 * (shape[0] * (shape[1] if len(shape) > 1 else 1))
    return head + bytes(-len(head) % 32) + bytes(start)


def _bundle() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("wrangler.toml", "src/entry.py", "x" * 120, "ü/ä"):
            (path := Path(folder, name)).parent.mkdir(exist_ok=True)
            path.write_bytes(name.encode() * 9)
        return bundles.pack(Path(folder))


_TOKENIZERS, _IMAGES, _GGUF, _BUNDLE = _tokenizers(), _images(), _gguf(), _bundle()
_TEMPLATE_PARTS = (
    "{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% endif %}", "{{ m.content }}", "{{ bos_token }}", "{% set x = x ~ x ~ 'aaaa' %}",
    "{% set ns = namespace(s='a') %}", "{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "{{ 'a' * 10 ** 9 }}", "{{ 9 ** 9 ** 9 }}",
    "{{ '%099999d' % 1 }}", "{{ [1] * 10 ** 9 }}", "{{ messages | tojson(indent=10**9) }}", "{{ 'x' | center(10**9) }}", "{{ lipsum(n=99999) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ (((((((((1))))))))) }}", "{{ cycler('a', 'b').next() }}", "{{ 'a'.format(1) }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ messages | map(attribute='__class__') | list }}", "{{ self.__init__ }}", "{% raw %}{{ x }}{% endraw %}",
    "{{ 'a' | replace('', 'b' * 9999) | replace('', 'c' * 9999) }}", "{{ range(100000) | list | length }}", "{{ raise_exception('x' * 1000000) }}",
    "{{ strftime_now('%Y' * 100000) }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 1e308 * 10 }}",
    "{% set big %}{{ 'a' * 1000000 }}{% endset %}{{ big * 1000000 }}", "{{ messages | batch(1) | list }}", "{{ 'a' | indent(10**9, true) }}",
    "{{ 'aaaa' | wordwrap(1) }}", "{{ 'a' | urlize }}", "{{ dict(a=1) | dictsort }}",
    "{{ '" + "(" * 3000 + "' }}", "{{ " + "(" * 3000, "{{ " + "-" * 9000 + "1 }}",
)  # fmt: skip
KINDS: dict[
    str, tuple[Callable[[random.Random], Case], float, int]
] = {  # for each kind, the function that draws an input, and its limits of CPU seconds and bytes
    "tokenizer": (draw_tokenizer, 10.0, 1 << 30),
    "image": (draw_image, 10.0, 2 << 30),
    "safetensors": (draw_safetensors, 5.0, 1 << 29),
    "gguf": (draw_gguf, 5.0, 1 << 29),
    "bundle": (draw_bundle, 5.0, 1 << 29),
    "template": (draw_template, 2.0, 1 << 29),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, help="a file for inputs that caused another exception or ended a child")
    asked = parser.parse_args(argv)
    rng, pool = random.Random(asked.seed), GuardedPool(1)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in asked.only}
    until = time.monotonic() + 60 * asked.minutes
    while time.monotonic() < until:
        kind = rng.choice(asked.only)
        draw, cpu_s, memory_bytes = KINDS[kind]
        case = draw(rng)
        try:
            pool.submit(GuardedJob(case.call, cpu_s, memory_bytes)).result()
            counts[kind]["taken"] += 1
            continue
        except JobError as error:
            outcome, message = error.name, str(error)
        except JobEndedError as error:
            outcome, message = error.reason, str(error)
        counts[kind]["refused" if outcome in REFUSALS else outcome] += 1
        # a template may exceed its limits of CPU time or memory
        if outcome in REFUSALS or (kind == "template" and outcome in ("cpu", "memory")):
            continue
        found = {"kind": kind, "outcome": outcome, "message": message[:300], "base64": b64encode(case.content).decode()}
        if asked.out is None:
            print(json.dumps(found)[:2000], flush=True)
        else:
            with asked.out.open("a") as out:
                out.write(json.dumps(found) + "\n")
    pool.close()
    for name, count in counts.items():
        print(f"{name}: {count.total()} tried; " + ", ".join(f"{n} {what}" for what, n in count.most_common()))
    unexpected = {"taken", "refused"}
    return int(any(set(count) - unexpected for name, count in counts.items() if name != "template"))


if __name__ == "__main__":
    from load_tests import checkpoint_fuzz  # a child finds its functions by the module's name

    sys.exit(checkpoint_fuzz.main(sys.argv[1:]))

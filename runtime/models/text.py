"""A model's text side: its tokenizer, chat template, output format and default sampling.

It is made from the checkpoint's small files, whose tokenizer a child process reads first. Independent of engines and residency.
"""

import asyncio
import contextlib
import hashlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError, TokenizerError
from pilotlight.engine.api.guarded_pool import GuardedJob, JobCall, JobEndedError, JobError
from pilotlight.engine.api.plain_files import read_bytes
from pilotlight.engine.api.protocol import ModelInfo
from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.text.fill_in import FillIn
from pilotlight.engine.text.formats import AnswerFormat
from pilotlight.engine.text.image_prompt import ImagePlaceholders
from pilotlight.engine.tokenizer.tokenizer import Tokenizer, check_tokenizer, read_json
from pilotlight.engine.tokenizer.tokenizer_files import READERS
from pilotlight.runtime.fetching.short_names import EMBEDDED
from pilotlight.runtime.generation.rendering import Rendering
from pilotlight.runtime.generation.texts.pair_template import PairTemplate
from pilotlight.runtime.models.checkpoint_children import run_guarded
from pilotlight.runtime.timings import SiteTimings

LEAST_TOP_P = 1e-6
TOKENIZER_BYTES = 4 << 30  # limit of a tokenizer's check; the largest take 1 GiB
NOTED_FROM_BYTES = 1 << 20  # a smaller tokenizer is checked at each start, in milliseconds
_TOKENIZER_FILES = (*READERS, "tokenizer_config.json", "special_tokens_map.json")


class SamplingDefaults(NamedTuple):
    """Default sampling parameters in the checkpoint's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TextSide(NamedTuple):
    """The parts that convert between text and a model's tokens."""

    directory: Path  # directory of the checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate
    rendering: Rendering
    pairs: PairTemplate
    answers: AnswerFormat
    defaults: SamplingDefaults
    placeholders: ImagePlaceholders | None  # None if the model has no vision encoder
    fill_in: FillIn | None  # None if the vocabulary has no tokens for filling in the middle
    family: str  # `model_type` of its config.json; empty if it has none

    @classmethod
    def from_directory(
        cls, directory: Path, tool_format: str | None = None, render_cpu_s: float = SiteTimings().render_cpu_s
    ) -> "TextSide":
        """Read a checkpoint. `tool_format` is a format's name; None detects it from the chat template."""
        template = ChatTemplate.from_directory(directory)
        defaults = sampling_defaults(read_json(directory / "generation_config.json"))
        tokenizer = Tokenizer.from_directory(directory)
        answers = AnswerFormat.of(tokenizer, template, tool_format)
        rendering = Rendering(
            tokenizer, template, render_cpu_s, answers.speller, is_trusted=directory.is_relative_to(EMBEDDED)
        )
        return cls(
            directory,
            tokenizer,
            template,
            rendering,
            PairTemplate.of_checkpoint(
                directory, partial(rendering.text, is_short=True), has_template=bool(template.sources)
            ),
            answers,
            defaults,
            _placeholders(directory, tokenizer),
            FillIn.of_vocabulary(tokenizer.added_token_id),
            str(read_json(directory / "config.json").get("model_type") or ""),
        )


def _placeholders(directory: Path, tokenizer: Tokenizer) -> ImagePlaceholders | None:
    if not (directory / "config.json").is_file():
        return None
    try:
        return ImagePlaceholders.from_checkpoint(directory, tokenizer.added_token_id)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


async def require_safe_tokenizer(directory: Path, cpu_s: float) -> None:
    """Check in a child process that a checkpoint's tokenizer is safe to load. Raises TokenizerError.

    A large one that has passed is not checked again on this machine, because reading it takes up to a second.
    """
    note = await asyncio.to_thread(_note_of, directory)
    if note is not None and await asyncio.to_thread(os.path.exists, note):
        return
    try:
        await run_guarded(GuardedJob(JobCall(check_tokenizer, (str(directory),)), cpu_s, TOKENIZER_BYTES))
    except JobError as error:
        raise TokenizerError(str(error)) from None
    except JobEndedError as error:
        raise TokenizerError(f"{directory} has a tokenizer that cannot be used: {error}") from None
    if note is not None:
        with contextlib.suppress(OSError):  # a store that cannot be written costs only the next check
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            note.touch()


def _note_of(directory: Path) -> Path | None:
    """Return the path of the note that this tokenizer has passed.

    Returns None if the tokenizer is too small for a note, or cannot be read.
    """
    # Imported here because a site that starts needs neither yet.
    from tokenizers import __version__

    from pilotlight.runtime.fetching.store import store

    try:
        place = store() / "tokenizers"
        files = {name: read_bytes(path) for name in _TOKENIZER_FILES if (path := directory / name).is_file()}
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    if sum(map(len, files.values())) < NOTED_FROM_BYTES:
        return None
    digest = hashlib.sha256(__version__.encode())
    for name, content in files.items():
        digest.update(f"\0{name}\0".encode())
        digest.update(content)
    return place / digest.hexdigest()[:32]


def check_vocabulary(tokenizer: Tokenizer, info: ModelInfo) -> None:
    """Check that the weights have embeddings for the tokenizer's base vocabulary. Raises TokenizerError.

    An added token without an embedding is refused later, if a prompt contains it."""
    if tokenizer.num_base_tokens > info.vocab_size:
        raise TokenizerError(
            f"its tokenizer has {tokenizer.num_base_tokens} tokens and its weights embed {info.vocab_size}; "
            "they belong to different models"
        )


def sampling_defaults(config: dict[str, Any]) -> SamplingDefaults:
    """Read the default sampling parameters from generation_config.json.

    Only an explicit `do_sample: false` means greedy, because many checkpoints that should be sampled leave it out. Raises TokenizerError for a value
    with which no request could be sampled."""
    repetition_penalty = _number(config, "repetition_penalty", 1.0, (0.01, 100.0))
    if config.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0, repetition_penalty=repetition_penalty)
    top_k = int(_number(config, "top_k", 0, (-1, sys.maxsize)))
    return SamplingDefaults(
        temperature=_number(config, "temperature", 1.0, (0.0, sys.float_info.max)),
        # A top_p of 0 keeps only the most likely token, as does any top_p below its probability.
        top_p=_number(config, "top_p", 1.0, (0.0, 1.0)) or LEAST_TOP_P,
        top_k=top_k if top_k > 0 else None,
        min_p=_number(config, "min_p", 0.0, (0.0, 1.0)),
        repetition_penalty=repetition_penalty,
    )


def _number(config: dict[str, Any], key: str, default: float, limits: tuple[float, float]) -> float:
    """Return a number in the file, or `default` if it is missing. Zero is a valid number."""
    value = config.get(key)
    if value is None:
        return default
    least, most = limits
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise TokenizerError(
            f"generation_config.json has {key} = {value!r}; it must be a number from {least} to {most}"
        )
    return float(value)

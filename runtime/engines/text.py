"""A model's text side: its tokenizer, chat template, answers' format and recommended sampling, read beside its weights.

Knows the checkpoint's small files; refuses to know engines and residency.
"""

from pathlib import Path
from typing import Any, NamedTuple

from engine.chat_template import ChatTemplate
from engine.errors import CheckpointError, TokenizerError
from engine.formats import AnswerFormat
from engine.image_prompt import ImagePlaceholders
from engine.protocol import ModelInfo
from engine.tokenizer import Tokenizer, read_json
from runtime.rendering import Rendering


class SamplingDefaults(NamedTuple):
    """Sampling that the checkpoint's generation_config.json recommends where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TextSide(NamedTuple):
    """The parts that turn text into a model's tokens and back."""

    tokenizer: Tokenizer
    template: ChatTemplate
    rendering: Rendering
    answers: AnswerFormat
    defaults: SamplingDefaults
    placeholders: ImagePlaceholders | None  # None: the checkpoint has no eyes

    @classmethod
    def from_directory(cls, directory: Path, tool_format: str | None = None) -> "TextSide":
        """`tool_format`: by name; None: as the chat template tells."""
        template = ChatTemplate.from_directory(directory)
        defaults = sampling_defaults(read_json(directory / "generation_config.json"))
        tokenizer = Tokenizer.from_directory(directory)
        return cls(
            tokenizer,
            template,
            Rendering(tokenizer, template),
            AnswerFormat.of(tokenizer, template, tool_format),
            defaults,
            _placeholders(directory, tokenizer),
        )


def _placeholders(directory: Path, tokenizer: Tokenizer) -> ImagePlaceholders | None:
    if not (directory / "config.json").is_file():
        return None
    try:
        return ImagePlaceholders.from_checkpoint(directory, tokenizer.added_token_id)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from None


def check_vocabulary(tokenizer: Tokenizer, info: ModelInfo) -> None:
    """Raises TokenizerError: an added token without an embedding is refused when a prompt holds it, a whole vocabulary without here."""
    if tokenizer.num_base_tokens > info.vocab_size:
        raise TokenizerError(
            f"its tokenizer has {tokenizer.num_base_tokens} tokens and its weights embed {info.vocab_size}; "
            "they belong to different models"
        )


def sampling_defaults(config: dict[str, Any]) -> SamplingDefaults:
    """Read generation_config.json. Only an explicit `do_sample: false` means greedy: many checkpoints leave it out and mean to be sampled."""
    repetition_penalty = float(config.get("repetition_penalty") or 1.0)
    if config.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0, repetition_penalty=repetition_penalty)
    top_k = config.get("top_k")
    return SamplingDefaults(
        temperature=float(config.get("temperature") or 1.0),
        top_p=float(config.get("top_p") or 1.0),
        top_k=int(top_k) if top_k else None,
        min_p=float(config.get("min_p") or 0.0),
        repetition_penalty=repetition_penalty,
    )

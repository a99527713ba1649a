"""Prompts for filling in the middle: the model writes the text between a beginning and an end.

Sources: the READMEs of QwenLM/Qwen2.5-Coder, bigcode/starcoder2 and deepseek-ai/DeepSeek-Coder, and Mistral's tokenizers (Codestral), which put the
end first. CodeGemma has Qwen's tokens and Granite StarCoder's. Independent of how texts become tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

# Tokens that end the inserted text in these models, besides those that end an answer: another file or repository follows, or padding.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<fim_pad>", "<repo_name>", "<file_sep>", "<EOT>",
)  # fmt: skip


class _Markers(NamedTuple):
    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False

    def prompt(self, before: str, after: str) -> str:
        parts = (f"{self.prefix}{before}", f"{self.suffix}{after}")
        return "".join(reversed(parts) if self.suffix_first else parts) + self.middle


_FORMS = (
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Markers("[PREFIX]", "[SUFFIX]", suffix_first=True),
)


class FillIn(NamedTuple):
    """The form of a model's prompts for filling in the middle."""

    markers: _Markers
    end_token_ids: tuple[int, ...]  # tokens that end the inserted text

    @classmethod
    def of_vocabulary(cls, token_id: Callable[[str], int | None]) -> "FillIn | None":
        """Return the form for a vocabulary, or None if it has no markers.

        `token_id`: returns the id of an added token, or None.
        """
        for form in _FORMS:
            markers = tuple(filter(None, form[:3]))
            if all(token_id(marker) is not None for marker in markers):
                ids = map(token_id, (*markers, *_ENDS))
                return cls(form, tuple(each for each in ids if each is not None))
        return None

    def prompt(self, before: str, after: str) -> str:
        """Return the prompt as text with markers."""
        return self.markers.prompt(before, after)

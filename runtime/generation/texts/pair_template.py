"""Chat templates that join a query and a document for a reranker trained on chats (Qwen3-Reranker).

Query and document are messages with these roles; the instruction is the system message. The template is rendered once with placeholders, and each
pair is built from the pieces between them: otherwise the template, a program, would run for every document. Independent of tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pilotlight.dialects.requests import Conversation
from pilotlight.engine.text.chat_template import ChatTemplateError
from pilotlight.engine.tokenizer.tokenizer import read_json, read_sentence_config

Render = Callable[[Conversation], Awaitable[str]]  # returns a conversation's text; raises ChatTemplateError
_ROLES = ("system", "query", "document")
_PROBES = tuple([{role: f"{role}{number}probe" for role in _ROLES} for number in (271828, 314159)])
# Key in config.json, named by vLLM, of Qwen3-Reranker checkpoints whose template does not have these roles yet. For them the form in Qwen's model
# card is used.
_QWEN3 = "is_original_qwen3_reranker"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairPieces(NamedTuple):
    """The text around the places of instruction, query and document."""

    pieces: tuple[str, ...]  # one more than `places`
    places: tuple[str, ...]  # roles in the order of the gaps between pieces
    strips: bool  # the template removes spaces around a text

    def text(self, filled: Mapping[str, str]) -> str:
        """Return the text of a pair. `filled` has a text for each role."""
        parts = [self.pieces[0]]
        for role, piece in zip(self.places, self.pieces[1:], strict=True):
            parts += (filled[role].strip() if self.strips else filled[role], piece)
        return "".join(parts)


_QWEN3_PIECES: Final = PairPieces(
    (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: ',
        "\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    _ROLES,
    strips=False,
)


class PairTemplate:
    """The templates for pairs of one model.

    It has one form with an instruction and one without. Each is determined at its first use.
    """

    def __init__(
        self,
        render: Render,
        *,
        has_template: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        is_required: bool = False,
        may_be_used: bool = True,
        is_qwen3: bool = False,
    ) -> None:
        """`render` applies the model's template, to which `variables` are passed.

        `is_required`: the checkpoint demands that its texts are rendered by the template. `may_be_used`: the checkpoint does not forbid this.
        `is_qwen3`: the form in Qwen's model card replaces the template."""
        self.is_required = is_required
        self.may_be_used = may_be_used
        self._render = render
        self._has_template = has_template
        self._variables = dict(variables)
        self._adds_prompt = bool(self._variables.pop("add_generation_prompt", False))
        self._is_qwen3 = is_qwen3
        self._found: dict[bool, PairPieces | None] = {}
        self._finding = asyncio.Lock()

    @classmethod
    def of_checkpoint(cls, directory: Path, render: Render, *, has_template: bool) -> "PairTemplate":
        """Read the settings of a checkpoint. Raises TokenizerError."""
        sentences = read_sentence_config(directory)
        calls, kinds = sentences.get("processing_kwargs") or {}, sentences.get("modality_config") or {}
        variables = calls.get("chat_template") if isinstance(calls, dict) else None
        return cls(
            render,
            has_template=has_template,
            variables=variables if isinstance(variables, dict) else {},
            is_required=isinstance(kinds, dict) and "message" in kinds,
            may_be_used=not kinds or "message" in kinds,
            is_qwen3=read_json(directory / "config.json").get(_QWEN3) is True,
        )

    async def pieces(self, *, with_instruction: bool) -> PairPieces | None:
        """Return the pieces of a pair's text; None if the template omits one of the texts."""
        if self._is_qwen3:
            return _QWEN3_PIECES if with_instruction else _without_instruction(_QWEN3_PIECES)
        if not self._has_template:
            return None
        async with self._finding:
            if with_instruction not in self._found:
                self._found[with_instruction] = await self._find(_ROLES if with_instruction else _ROLES[1:])
        return self._found[with_instruction]

    async def _find(self, roles: tuple[str, ...]) -> PairPieces | None:
        """Render two conversations of placeholders; return their pieces if both have the same, else None."""
        spaced = [{role: f" {probes[role]} " for role in roles} for probes in _PROBES]
        for as_parts in (False, True):
            first, second = [await self._rendered(probes, as_parts) for probes in spaced]
            found = None if first is None else _cut(first, spaced[0])
            if found is not None and second == found.text(spaced[1]):
                return found
        return None

    async def _rendered(self, contents: Mapping[str, str], as_parts: bool) -> str | None:
        """Return the text of a conversation with a message for each role; None if the template refuses it."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if as_parts else content}
            for role, content in contents.items()
        ]
        conversation = Conversation(
            tuple(messages), variables=self._variables, adds_generation_prompt=self._adds_prompt
        )
        try:
            return await self._render(conversation)
        except ChatTemplateError:
            return None


def _without_instruction(pieces: PairPieces) -> PairPieces:
    """Return the form for pairs without an instruction: it has the default one of Qwen's model card."""
    begin, query, *rest = pieces.pieces
    return PairPieces((f"{begin}{_QWEN3_INSTRUCTION}{query}", *rest), pieces.places[1:], pieces.strips)


def _cut(text: str, probes: Mapping[str, str]) -> PairPieces | None:
    """Split a text at its placeholders; return None unless each occurs exactly once."""
    strips = any(probe not in text for probe in probes.values())
    wanted = {role: probe.strip() if strips else probe for role, probe in probes.items()}
    if any(text.count(probe) != 1 for probe in wanted.values()):
        return None
    order = tuple(sorted(wanted, key=lambda role: text.index(wanted[role])))
    pieces = []
    for role in order:
        piece, _, text = text.partition(wanted[role])
        pieces.append(piece)
    return PairPieces((*pieces, text), order, strips)

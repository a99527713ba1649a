"""Chat templates that join a query and a document for a reranker trained on chats (Qwen3-Reranker).

Query and document are messages of these two roles, with an instruction as the system's. The template is rendered once with placeholders for the
texts, and each pair is built from the pieces around them: otherwise the template, a program, would run once for every document. Independent of
tokens.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pilotlight.dialects.requests import Conversation
from pilotlight.engine.text.chat_template import ChatTemplateError
from pilotlight.engine.text.tokenizer import read_json, read_sentence_config

if TYPE_CHECKING:
    from pilotlight.runtime.generation.rendering import Rendering

_ROLES = ("system", "query", "document")
_PROBES = tuple([{role: f"{role}{number}probe" for role in _ROLES} for number in (271828, 314159)])
# The form of Qwen/Qwen3-Reranker's model card, for checkpoints from before its template had these roles: vLLM calls them so.
_QWEN3 = "is_original_qwen3_reranker"
_QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairPieces(NamedTuple):
    """The text round the places of instruction, query and document."""

    pieces: tuple[str, ...]  # one more than places
    places: tuple[str, ...]  # roles, in order
    strips: bool  # the template takes spaces off the ends of a text

    def text(self, filled: Mapping[str, str]) -> str:
        """Return the text of a pair. `filled`: each role's."""
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
    """The pair templates of one model.

    Each of its two forms, with an instruction and without, is determined once, at its first use.
    """

    def __init__(
        self,
        rendering: "Rendering",
        *,
        has_template: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        is_required: bool = False,
        may_be_used: bool = True,
        is_qwen3: bool = False,
    ) -> None:
        """`variables`: that the template is rendered with.

        `is_required`: the checkpoint has its texts go through the template; `may_be_used`: it does not say that they do not. `is_qwen3`: they go
        through the model card's in its place."""
        self.is_required = is_required
        self.may_be_used = may_be_used
        self._rendering = rendering
        self._has_template = has_template
        self._variables = dict(variables)
        self._adds_prompt = bool(self._variables.pop("add_generation_prompt", False))
        self._is_qwen3 = is_qwen3
        self._found: dict[bool, PairPieces | None] = {}
        self._finding = asyncio.Lock()

    @classmethod
    def of_checkpoint(cls, directory: Path, rendering: "Rendering", *, has_template: bool) -> "PairTemplate":
        """Raises TokenizerError."""
        sentences = read_sentence_config(directory)
        calls, kinds = sentences.get("processing_kwargs") or {}, sentences.get("modality_config") or {}
        variables = calls.get("chat_template") if isinstance(calls, dict) else None
        return cls(
            rendering,
            has_template=has_template,
            variables=variables if isinstance(variables, dict) else {},
            is_required=isinstance(kinds, dict) and "message" in kinds,
            may_be_used=not kinds or "message" in kinds,
            is_qwen3=read_json(directory / "config.json").get(_QWEN3) is True,
        )

    async def pieces(self, *, with_instruction: bool) -> PairPieces | None:
        """Return how a pair is written; None if the template has no place for one of the texts."""
        if self._is_qwen3:
            return _QWEN3_PIECES if with_instruction else _without_instruction(_QWEN3_PIECES)
        if not self._has_template:
            return None
        async with self._finding:
            if with_instruction not in self._found:
                self._found[with_instruction] = await self._find(_ROLES if with_instruction else _ROLES[1:])
        return self._found[with_instruction]

    async def _find(self, roles: tuple[str, ...]) -> PairPieces | None:
        """Return the pieces round the texts of two conversations of probes, if they are the same."""
        spaced = [{role: f" {probes[role]} " for role in roles} for probes in _PROBES]
        for as_parts in (False, True):
            first, second = [await self._rendered(probes, as_parts) for probes in spaced]
            found = None if first is None else _cut(first, spaced[0])
            if found is not None and second == found.text(spaced[1]):
                return found
        return None

    async def _rendered(self, contents: Mapping[str, str], as_parts: bool) -> str | None:
        """Return the text of a conversation of these roles; None if the template refuses it."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if as_parts else content}
            for role, content in contents.items()
        ]
        conversation = Conversation(
            tuple(messages), variables=self._variables, adds_generation_prompt=self._adds_prompt
        )
        try:
            return await self._rendering.text(conversation, is_short=True)
        except ChatTemplateError:
            return None


def _without_instruction(pieces: PairPieces) -> PairPieces:
    """Return the model card's form with the instruction that it takes by itself."""
    begin, query, *rest = pieces.pieces
    return PairPieces((f"{begin}{_QWEN3_INSTRUCTION}{query}", *rest), pieces.places[1:], pieces.strips)


def _cut(text: str, probes: Mapping[str, str]) -> PairPieces | None:
    """Return the pieces of a text round its probes; None if not each is there once."""
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

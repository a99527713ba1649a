"""Reasoning between two tags, before an answer.

The tags are `<think>` for Qwen 3, DeepSeek, Kimi and GLM, `[THINK]` for Magistral, `<|inner_prefix|>` for Apertus, `<seed:think>` for Seed-OSS,
`<|START_THINKING|>` for Cohere's Command, `<mm:think>` for MiniMax-M3 and sentences for Apriel. Sources: the model cards of Qwen/Qwen3-8B,
deepseek-ai/DeepSeek-R1, moonshotai/Kimi-K2-Thinking, mistralai/Magistral-Small-2507, ByteDance-Seed/Seed-OSS-36B-Instruct and
CohereLabs/c4ai-command-r7b-12-2024, and the chat templates of swiss-ai/Apertus-8B-Instruct-2509, google/gemma-4-31B-it, MiniMax-M3 and
ServiceNow-AI/Apriel-1.6-15b-Thinker. The prompt may end with the first tag or both, if the template writes them. White space
at either end of the reasoning belongs to the tags.
"""

from collections.abc import Sequence
from typing import NamedTuple

from pilotlight.engine.text.formats.grammars import GAP, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import ReasoningPart, Thinking
from pilotlight.engine.text.formats.scanner import Reading, Scanner


class ThinkTags(NamedTuple):
    open: str
    close: str
    label: str = ""  # text after the first tag


TAGS = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<|channel>", "<channel|>", "thought\n"),
    ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkTags("<seed:think>", "</seed:think>"),
    ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkTags("<mm:think>", "</mm:think>"),
    ThinkTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)


def state_of(ending: str, tags: ThinkTags, markers: Markers) -> Thinking:
    """Return the state of the reasoning after a prompt that ends with this text."""
    if ending.endswith((markers[tags.open] + tags.label).rstrip()):
        return Thinking.OPEN
    return Thinking.CLOSED if ending.endswith(markers[tags.close]) else Thinking.MAYBE


def read(s: Scanner, tags: ThinkTags, thinking: Thinking, also_ends: Sequence[str]) -> Reading[None]:
    """Parse the reasoning, if there is any.

    `also_ends`: markers that end the reasoning, because some models do not close it before them.
    """
    opens, closes = s.markers[tags.open], s.markers[tags.close]
    if thinking is Thinking.CLOSED:
        return
    s.is_reasoning = thinking is Thinking.OPEN  # some models nevertheless write the first tag again
    s.hold()
    yield from s.beyond_space()
    if not (yield from s.skip(opens)) and thinking is Thinking.MAYBE:
        if (yield from s.skip(closes)):  # MiniMax-M3 starts answers without reasoning with the second tag
            s.release()
            s.out.drop_space()
        else:
            s.give_back()
        return
    yield from s.skip(tags.label)
    s.release()
    s.is_reasoning = True
    s.out.drop_space()
    ending = yield from s.text_until((closes, *also_ends), ReasoningPart)
    s.is_reasoning = False
    if ending == closes:
        s.release()
        s.out.drop_space()
    else:
        s.give_back()


def write(grammar: Grammar, tags: ThinkTags, thinking: Thinking, markers: Markers) -> str:
    """Add the rules of the reasoning to the grammar, and return the reference that precedes the answer."""
    if thinking is Thinking.CLOSED:
        return ""
    thought = grammar.up_to("thought", markers.lark(tags.close), is_token=markers.is_token(tags.close))
    opens = f"{markers.lark(tags.open)} {quoted(tags.label) if tags.label else ''}".rstrip()
    return f"{thought} {GAP} " if thinking is Thinking.OPEN else f"({opens} {thought} {GAP})? "

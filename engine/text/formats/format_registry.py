"""The formats of tool calls by name, and the choice of one for a checkpoint.

A new format is a file, and a line in FORMATS.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.text.formats.grammars import Grammar
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parser import Reader
from pilotlight.engine.text.formats.parts import AnswerRules, Speller
from pilotlight.engine.text.formats.tools import (
    cohere,
    deepseek,
    function_tags,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    llama_tools,
    minimax_m3,
    mistral_tools,
    pythonic,
    solar,
    tagged,
    thinking,
)
from pilotlight.engine.text.formats.tools.json_lists import APERTUS, GRANITE, HUNYUAN, NEMOTRON
from pilotlight.engine.text.formats.tools.pythonic import LFM2, OLMO3
from pilotlight.engine.text.formats.tools.thinking import ThinkTags


class ToolFormat(NamedTuple):
    name: str
    tags: tuple[str, ...]  # markers of the format
    read: Reader  # parses text and calls to the end of the answer
    write: Callable[[Grammar, AnswerRules, Markers], None]  # adds the rules of an answer to the grammar
    told_by: tuple[str, ...]  # a chat template that contains all these texts uses the format
    names: re.Pattern[str] | None = None  # names of tools that can be called; None for any name
    ends_thinking: tuple[str, ...] = ()  # markers that end reasoning, because some models do not close it before them
    frames_all: bool = False  # True if reasoning and answers without calls have this form, too
    frames_text: bool = False  # True if answers without calls have this form, too, but reasoning has the usual form
    is_marked: bool = True  # True if the first marker starts each call or section of calls, and nothing else
    spell: Speller = hermes.spell  # writes calls of earlier messages that the template omits
    efforts: tuple[str, ...] = ()  # reasoning efforts that models with this format know; if empty, the template decides

    def allows(self, name: str) -> bool:
        """Return True if a tool of this name can be called."""
        return self.names is None or (self.names.fullmatch(name) is not None and name == name.strip())


def _function_tags(name: str, form: function_tags.TagForm, told_by: tuple[str, ...]) -> ToolFormat:
    read, write = partial(function_tags.read, form=form), partial(function_tags.write, form=form)
    return ToolFormat(name, form.tags, read, write, told_by, form.names)


def _cohere(name: str, frame: cohere.AnswerFrame) -> ToolFormat:
    read, write = partial(cohere.read, frame=frame), partial(cohere.write, frame=frame)
    return ToolFormat(name, frame.tags, read, write, (cohere.ACTION, frame.open), frames_text=True)


# The first format that matches a template is used. Names are those of vLLM, except harmony, mistral_v11, nemotron_json, which is NVIDIA's, apriel,
# solar_open and minimax_m3.
FORMATS = (
    ToolFormat("harmony", harmony.TAGS, harmony.read, harmony.write, (harmony.CHANNEL,), harmony.NAME, frames_all=True, is_marked=False,
               efforts=harmony.EFFORTS),
    ToolFormat("solar_open", solar.TAGS, solar.read, solar.write, (solar.CALLS, solar.THINK), solar.NAME, frames_all=True, is_marked=False),
    ToolFormat("kimi_k2", kimi.TAGS, kimi.read, kimi.write, (kimi.SECTION,), kimi.NAME, (kimi.SECTION,)),
    ToolFormat("deepseek_v3", deepseek.TAGS, deepseek.read, deepseek.write_v3, (deepseek.SECTION, deepseek.FENCE), deepseek.NAME),
    ToolFormat("deepseek_v31", deepseek.TAGS, deepseek.read, deepseek.write_v31, (deepseek.SECTION,), deepseek.NAME),
    ToolFormat("mistral_v11", mistral_tools.TAGS, mistral_tools.read, mistral_tools.write_named,
               (mistral_tools.OPEN, mistral_tools.ARGUMENTS), mistral_tools.NAME),
    ToolFormat("mistral", mistral_tools.TAGS, mistral_tools.read, mistral_tools.LIST.write, (mistral_tools.OPEN,)),
    ToolFormat("glm45", glm.TAGS, glm.read, glm.write, (glm.KEY,), tagged.NAME),
    ToolFormat("gemma4", gemma.TAGS, gemma.read, gemma.write, (gemma.OPEN, gemma.CALL), gemma.NAME),
    _cohere("cohere_command3", cohere.RESPONSE),
    _cohere("cohere_command4", cohere.SPOKEN),
    ToolFormat("minimax_m3", minimax_m3.TAGS, minimax_m3.read, minimax_m3.write, (minimax_m3.MARK, minimax_m3.OPEN), minimax_m3.NAME),
    _function_tags("minimax_m2", function_tags.MINIMAX, (function_tags.MINIMAX.open,)),
    _function_tags("deepseek_v32", function_tags.DEEPSEEK_V32, (function_tags.DSML, "function_calls>")),
    _function_tags("deepseek_v4", function_tags.DEEPSEEK_V4, (function_tags.DSML, "tool_calls>")),
    _function_tags("seed_oss", function_tags.SEED, (function_tags.SEED.open,)),
    _function_tags("qwen3_coder", function_tags.QWEN, (function_tags.QWEN.function, function_tags.QWEN.parameter)),
    ToolFormat("hunyuan_a13b", HUNYUAN.tags, HUNYUAN.read, HUNYUAN.write, ("助手：", *HUNYUAN.opens)),
    ToolFormat("apriel", HUNYUAN.tags, HUNYUAN.read, HUNYUAN.write, ("<tool_calls>[",), ends_thinking=HUNYUAN.opens),
    ToolFormat("hermes", hermes.TAGS, hermes.read, hermes.write, (hermes.OPEN,)),
    ToolFormat("granite", GRANITE.tags, GRANITE.read, GRANITE.write, GRANITE.opens[:1], spell=GRANITE.spell),
    ToolFormat("nemotron_json", NEMOTRON.tags, NEMOTRON.read, NEMOTRON.write, NEMOTRON.opens),
    ToolFormat("apertus", APERTUS.tags, APERTUS.read, APERTUS.write, APERTUS.opens, ends_thinking=APERTUS.opens),
    ToolFormat("lfm2", LFM2.tags, LFM2.read, LFM2.write, ("List of tools: ", "<|im_start|>"), pythonic.NAME,
               spell=LFM2.spell),
    ToolFormat("olmo3", OLMO3.tags, OLMO3.read, OLMO3.write, (OLMO3.open, "<functions>"), pythonic.NAME,
               spell=OLMO3.spell),
    ToolFormat("llama3_json", llama_tools.TAGS, llama_tools.read, llama_tools.write, ("dictionary of argument name",), is_marked=False),
    ToolFormat("pythonic", pythonic.TAGS, pythonic.read, pythonic.write, ("[func_name1(",), pythonic.CALLABLE, is_marked=False),
)  # fmt: skip


def tool_format_of(template: ChatTemplate) -> ToolFormat | None:
    """Return the format whose markers the template uses for the calls of earlier messages, or None."""
    return next((each for each in FORMATS if all(map(template.mentions, each.told_by))), None)


def think_tags_of(template: ChatTemplate) -> ThinkTags | None:
    return next((tags for tags in thinking.TAGS if template.mentions(tags.open) or template.mentions(tags.close)), None)

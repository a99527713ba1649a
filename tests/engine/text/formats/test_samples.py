"""Sample answers from the description of each format, cut in every way, and the cost of reading a long call."""

import json
import re
import sys
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.text.formats import AnswerRules, CallableTool, Thinking
from pilotlight.engine.text.formats.format_registry import FORMATS, ToolFormat, think_tags_of, tool_format_of
from pilotlight.engine.text.formats.tools import kimi
from pilotlight.engine.text.formats.tools.thinking import TAGS as THINK_TAGS
from pilotlight.engine.text.formats.tools.thinking import ThinkTags
from pilotlight.sites.site import ToolFormatName
from tests.engine.text.formats.reading import Read, assert_same_however_cut, chunked, format_of, parts_of, read, told

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "tags": {"type": "array"}, "done": {"type": "boolean"}, "to": {"type": ["string", "null"]},
        "kind": {"$ref": "#/$defs/kind"},
    },
    "$defs": {"kind": {"enum": ["a", "b"]}},
}  # fmt: skip
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "note": NOTE}
PARIS = ("call", "get_weather", '{"city": "Paris"}')
ROME = ("call", "get_weather", '{"city": "Rome", "days": 3}')


class FreshId(str):
    """A stand-in for any id that Mistral's templates accept."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.fullmatch("[A-Za-z0-9]{9}", other) is not None

    def __ne__(self, other: object) -> bool:
        return not self == other


FRESH = FreshId("a fresh id")


class Sample(NamedTuple):
    format: str
    text: str
    expected: list[Read]
    special: bool = False  # whether tags that are tokens are special tokens
    options: dict[str, Any] | None = None


MARK = "]<]minimax[>["
M3_OPEN = f"{MARK}<tool_call>\n"
M3_PARIS = f'{MARK}<invoke name="get_weather">{MARK}<city>Paris{MARK}</city>{MARK}</invoke>\n'
M3_ROME = f'{MARK}<invoke name="get_weather">{MARK}<city>Rome{MARK}</city>{MARK}<days>3{MARK}</days>{MARK}</invoke>\n'
SOLAR = "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>%s<|tool_call:end|>"
SOLAR_THOUGHT = "<|think|>Need the weather.\n<|end|><|begin|>assistant"
THINK = {tags.open: tags for tags in THINK_TAGS}
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
    '<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{"city": "Rome", "days": 3}<|tool_call_end|><|tool_calls_section_end|>'
)
CALLED_BY_ID = [(*PARIS, "functions.get_weather:0"), (*ROME, "functions.get_weather:1")]
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
DEEPSEEK = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
MINIMAX = '<invoke name="get_weather">\n<parameter name="city">%s</parameter>\n</invoke>\n'
SEED = "<seed:tool_call>\n<function=get_weather>\n<parameter=city>%s</parameter>\n</function>\n</seed:tool_call>"
DSML = '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">%s</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
DSML_DAYS = 'Rome</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
COHERE = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
    '    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": {"city": "Rome", "days": 3}}\n]<|END_ACTION|>'
)
ANALYSIS = "<|channel|>analysis<|message|>Need the weather.\n<|end|><|start|>assistant"
OF_PARIS, OF_ROME = PARIS[2], ROME[2]
LIST = f'[{{"name": "get_weather", "arguments": {OF_PARIS}}}, {{"name": "get_weather", "arguments": {OF_ROME}}}]'

# Each sample follows the description that its format's module names.
SAMPLES = [
    Sample(
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("text", "I look."), PARIS, ROME],
    ),
    Sample(
        "qwen3_coder",  # no outer tag; text with lines, quotes and a closing tag; values of other types
        '<function=note>\n<parameter=text>\na </parameter> "b"\\\n\n</parameter>\n<parameter=tags>\n["x", 1]\n</parameter>\n'
        "<parameter=done>\nTrue\n</parameter>\n<parameter=to>\nnull\n</parameter>\n<parameter=kind>\nb\n</parameter>\n</function>\n</tool_call>",
        [("call", "note", json.dumps({"text": 'a </parameter> "b"\\\n', "tags": ["x", 1], "done": True, "to": None, "kind": "b"}))],
    ),
    Sample(
        "seed_oss",
        "<seed:think>Need it.</seed:think>\nI look.\n\n" + SEED % "Paris" + SEED % "Rome</parameter>\n<parameter=days>3",
        [("reasoning", "Need it."), ("text", "I look."), PARIS, ROME], True, {"think": THINK["<seed:think>"], "thinking": Thinking.MAYBE},
    ),
    Sample(
        "minimax_m2",
        "I look.\n<minimax:tool_call>\n" + MINIMAX % "Paris" + MINIMAX % 'Rome</parameter>\n<parameter name="days">3' + "</minimax:tool_call>",
        [("text", "I look."), PARIS, ROME],
    ),
    Sample(
        "minimax_m2",  # calls outside a section, and without a name, are text
        MINIMAX % "Oslo" + '<minimax:tool_call>\n<invoke name="">\n' + MINIMAX % "Oslo",
        [("text", MINIMAX % "Oslo" + '<minimax:tool_call>\n<invoke name="">\n' + MINIMAX % "Oslo")],
    ),
    Sample(
        "minimax_m2",  # text with lines and a closing tag
        '<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">\na </parameter> b\n</parameter>\n'
        '<parameter name="tags">["x", 1]</parameter>\n</invoke>\n</minimax:tool_call>',
        [("call", "note", json.dumps({"text": "\na </parameter> b\n", "tags": ["x", 1]}))],
    ),
    Sample(
        "deepseek_v32",
        f"I look.\n\n<｜DSML｜function_calls>\n{DSML % 'Paris'}{DSML % DSML_DAYS}</｜DSML｜function_calls>",
        [("text", "I look."), PARIS, ROME],
    ),
    Sample(
        "deepseek_v4",  # the attribute decides, not the schema; other attributes end the call
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="note">\n<｜DSML｜parameter name="text" string="false">[1, true]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="true">[]</｜DSML｜parameter>\n<｜DSML｜parameter name="to" string="no">Ann',
        [("call", "note", '{"text": [1, true], "tags": "[]"}'), ("text", '" string="no">Ann')],
    ),
    Sample(
        "cohere_command3", f"<|START_THINKING|>Need it.<|END_THINKING|>{COHERE}", [("reasoning", "Need it."), PARIS, ROME], True,
        {"think": THINK["<|START_THINKING|>"], "thinking": Thinking.MAYBE},
    ),
    Sample("cohere_command3", "<|START_RESPONSE|>It is sunny.<|END_RESPONSE|>", [("text", "It is sunny.")]),
    Sample("cohere_command3", "<|START_RESPONSE|>It is sunny.<|END_RESPONSE|>", [("text", "It is sunny.")], True, {"schemas": {}}),
    Sample("cohere_command4", f"<|START_TEXT|>I look.<|END_TEXT|>{COHERE}", [("text", "I look."), PARIS, ROME]),
    Sample("cohere_command4", "<|START_ACTION|>[1]<|END_ACTION|>", [("text", "<|START_ACTION|>[1]<|END_ACTION|>")]),
    Sample(
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        [("text", "I look."), PARIS, ROME],
    ),
    Sample(
        "hermes",
        f'I look.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {OF_PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OF_ROME}}}\n</tool_call> Done.',
        [("text", "I look."), PARIS, ROME, ("text", "Done.")],
    ),
    Sample(
        "gemma4",
        'I look.\n<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>',
        [("text", "I look."), ("call", "get_weather", '{"city":"Paris"}'), ("call", "get_weather", '{"city":"Rome","days":3}')],
        True,
    ),
    Sample(
        "gemma4",  # text with quotes, lines and braces; keys that look like other values; an object in a list
        '<|tool_call>call:note{text:<|"|>a "b"}\\\n{<|"|>,tags:[<|"|>x<|"|>,1,{true:null}],done:false,to:null,7:[]}<tool_call|>',
        [("call", "note", '{"text":"a \\"b\\"}\\\\\\n{","tags":["x",1,{"true":null}],"done":false,"to":null,"7":[]}')],
        True,
    ),
    Sample("gemma4", "<|tool_call>no call<tool_call|>", [("text", "<|tool_call>no call<tool_call|>")]),
    Sample("glm45", "Say <tool_call> and go.", [("text", "Say <tool_call> and go.")]),
    Sample("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    Sample(
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {OF_PARIS}}}; {{"name": "get_weather", "parameters": {OF_ROME}}}',
        [PARIS, ROME],
        True,
    ),
    Sample("llama3_json", f'<|python_start|>{{"name": "get_weather", "parameters": {OF_PARIS}}}<|python_end|>', [PARIS], True),
    Sample("llama3_json", '{"name": "Bob", "parameters": {}}', [("text", '{"name": "Bob", "parameters": {}}')]),
    Sample("llama3_json", "It is {sunny}. \n", [("text", "It is {sunny}. \n")]),
    Sample("pythonic", '[get_weather(city="Paris"), get_weather(city=\'Rome\', days=3)]', [PARIS, ROME]),
    Sample(
        "pythonic",
        "<|python_start|>[note(text='it\\'s \"so\"', tags=[1, (2, None)], done=True, to=None)]<|python_end|>",
        [("call", "note", '{"text": "it\'s \\"so\\"", "tags": [1, [2, null]], "done": true, "to": null}')],
        True,
    ),
    Sample("pythonic", "[other(1)] is text", [("text", "[other(1)] is text")]),
    Sample("kimi_k2", f"I look.{KIMI}", [("text", "I look."), *CALLED_BY_ID], True),
    Sample(
        "kimi_k2", f"<think>Need it. {KIMI}", [("reasoning", "Need it."), *CALLED_BY_ID], True,
        {"think": THINK_TAGS[0], "thinking": Thinking.MAYBE},
    ),
    Sample("deepseek_v3", "I look." + DEEPSEEK % f"{V3 % OF_PARIS}\n{V3 % OF_ROME}", [("text", "I look."), PARIS, ROME], True),
    Sample("deepseek_v31", "I look." + DEEPSEEK % f"{V31 % OF_PARIS}{V31 % OF_ROME}", [("text", "I look."), PARIS, ROME], True),
    Sample("deepseek_v31", DEEPSEEK % (V3 % OF_PARIS), [PARIS], True),
    Sample(
        "mistral",
        f"[TOOL_CALLS] {LIST}",
        [(*PARIS, FRESH), (*ROME, FRESH)],
        True,
    ),
    Sample("mistral_v11", f"[TOOL_CALLS]get_weather[ARGS]{OF_PARIS}[TOOL_CALLS]get_weather[ARGS]{OF_ROME}",
           [(*PARIS, FRESH), (*ROME, FRESH)], True),
    Sample("mistral_v11", f"I look.[TOOL_CALLS]get_weather[CALL_ID]abcd12345[ARGS]{OF_PARIS}", [("text", "I look."), (*PARIS, "abcd12345")], True),
    Sample(
        "harmony", f"{ANALYSIS}<|channel|>final<|message|>It is sunny.", [("reasoning", "Need the weather."), ("text", "It is sunny.")], True
    ),
    Sample(
        "harmony",
        f"{ANALYSIS}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{OF_PARIS}<|call|>",
        [("reasoning", "Need the weather."), PARIS],
        True,
    ),
    Sample(
        "harmony",  # recipient after the role, text for the user, and a call of a tool that was not offered
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis to=browser.search code<|message|>{}<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{OF_PARIS}",
        [("text", "I look."), ("reasoning", "{}"), PARIS],
        True,
    ),
    Sample("granite", f"<|tool_call|>{LIST}", [PARIS, ROME], True),
    Sample("granite", f"I look. <tool_call> {LIST} Done.", [("text", "I look."), PARIS, ROME, ("text", "Done.")]),
    Sample("granite", "<tool_call> starts no list", [("text", "<tool_call> starts no list")]),
    Sample("nemotron_json", f"I look.\n<TOOLCALL>{LIST}</TOOLCALL>\nDone.", [("text", "I look."), PARIS, ROME, ("text", "Done.")]),
    Sample("nemotron_json", "<TOOLCALL>[{}]</TOOLCALL>", [("text", "<TOOLCALL>[{}]</TOOLCALL>")]),
    Sample(
        "nemotron_json",  # arguments encoded as a string, and white space
        '<TOOLCALL>[\n  {"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n]\n</TOOLCALL>', [PARIS], True,
    ),
    Sample("hunyuan_a13b", f"<tool_calls>{LIST}</tool_calls>", [PARIS, ROME]),
    Sample(
        "apertus",
        f'I look.<|tools_prefix|>[{{"get_weather": {OF_PARIS}}}, {{"get_weather": {OF_ROME}}}]<|tools_suffix|>Done.',
        [("text", "I look."), PARIS, ROME, ("text", "Done.")],
        True,
    ),
    Sample(
        "apertus",  # calls within the reasoning
        f'<|inner_prefix|>Need it.<|tools_prefix|>[{{"get_weather": {OF_PARIS}}}]<|tools_suffix|>', [("reasoning", "Need it."), PARIS], True,
        {"think": THINK["<|inner_prefix|>"], "thinking": Thinking.MAYBE},
    ),
    Sample("apertus", '<|tools_prefix|>[{"a": 1}]<|tools_suffix|>', [("text", '<|tools_prefix|>[{"a": 1}]<|tools_suffix|>')]),
    Sample(
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris"), get_weather(city=\'Rome\', days=3)]<|tool_call_end|>I look.',
        [PARIS, ROME, ("text", "I look.")],
        True,
    ),
    Sample("lfm2", "<|tool_call_start|>[1, 2]<|tool_call_end|>", [("text", "<|tool_call_start|>[1, 2]<|tool_call_end|>")]),
    Sample(
        "olmo3",
        'I look.<function_calls>\nget_weather(city="Paris")\nget_weather(city="Rome", days=3)\n</function_calls>',
        [("text", "I look."), PARIS, ROME],
    ),
    Sample(
        "olmo3", '<function_calls>note(text="a\\nb", done=true, to=null)</function_calls>',
        [("call", "note", '{"text": "a\\nb", "done": true, "to": null}')],
    ),
    Sample("apriel", f'I look.\n<tool_calls>[{{"name": "get_weather", "arguments": {OF_PARIS}, "id": "call_1"}}]</tool_calls>',
           [("text", "I look."), PARIS]),
    Sample("apriel", f"Need it.\n<tool_calls>{LIST}</tool_calls>", [("reasoning", "Need it."), PARIS, ROME], False,
           {"think": THINK["Here are my reasoning steps:"], "thinking": Thinking.OPEN}),
    Sample("solar_open", f"{SOLAR_THOUGHT}<|content|>It is sunny.<|end|>", [("reasoning", "Need the weather."), ("text", "It is sunny.")], True),
    Sample("solar_open", "It is sunny.", [("text", "It is sunny.")], True),
    Sample(
        "solar_open",
        f"{SOLAR_THOUGHT}<|content|>I look.<|end|><|begin|>assistant<|tool_calls|>{SOLAR % OF_PARIS}{SOLAR % OF_ROME}<|calls|>",
        [("reasoning", "Need the weather."), ("text", "I look."), (*PARIS, "a1b2c3d4e5"), (*ROME, "a1b2c3d4e5")], True,
    ),
    Sample("minimax_m3", f"I look.{M3_OPEN}{M3_PARIS}{M3_ROME}{MARK}</tool_call>Done.", [("text", "I look."), PARIS, ROME, ("text", "Done.")], True),
    Sample(
        "minimax_m3",  # parts of values in tags, JSON, and text
        f'{M3_OPEN}{MARK}<invoke name="note">{MARK}<tags>{MARK}<item>a{MARK}</item>{MARK}<item>{MARK}<b>2{MARK}</b>{MARK}<c>'
        f'{MARK}<item>x{MARK}</item>{MARK}</c>{MARK}</item>{MARK}</tags>{MARK}<text>1 < 2{MARK}</text>{MARK}<to>null{MARK}</to>{MARK}</invoke>\n'
        f'{MARK}<invoke name="note">{MARK}<tags>[1, {{}}]{MARK}</tags>{MARK}</invoke>\n'
        f'{MARK}<invoke name="note">{MARK}<tags>{MARK}</tags>{MARK}<text>{MARK}</text>{MARK}<done>true{MARK}</done>{MARK}</invoke>\n'
        f"{MARK}</tool_call>",
        [
            ("call", "note", '{"tags": ["a", {"b": 2, "c": ["x"]}], "text": "1 < 2", "to": null}'),
            ("call", "note", '{"tags": [1, {}]}'),
            ("call", "note", '{"tags": [], "text": "", "done": true}'),
        ],
        True,
    ),
    Sample("minimax_m3", f"{MARK}<tool_call> starts nothing", [("text", f"{MARK}<tool_call> starts nothing")]),
    Sample("olmo3", "<function_calls>\n</function_calls>", [("text", "<function_calls>\n</function_calls>")]),
]  # fmt: skip


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.format)
def test_a_sample_is_read_the_same_however_it_is_cut(sample: Sample, tags: bool) -> None:
    options = {"schemas": SCHEMAS, "tags": tags, **(sample.options or {})}
    if sample.special and tags:
        options["special"] = next(each.tags for each in FORMATS if each.name == sample.format)
    assert_same_however_cut(sample.format, sample.text, sample.expected, **options)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.format)
def test_an_answer_that_is_cut_shows_no_markup_and_calls_nothing_else(sample: Sample) -> None:
    tags = (*next(each.tags for each in FORMATS if each.name == sample.format), "<think>")
    shown = {part[1] for part in sample.expected if part[0] in ("text", "reasoning")}
    for end in range(len(sample.text)):
        options = {"schemas": SCHEMAS, **(sample.options or {})}
        parts = read(sample.format, sample.text[:end], tags=False, is_cut=True, **options)
        for part in parts:
            if part[0] in ("text", "reasoning"):
                assert any(said.startswith(part[1].rstrip()) for said in shown), (end, part)
            else:
                assert part[1] in SCHEMAS
                assert not any(tag in part[2] for tag in tags if tag != "</parameter>")


THOUGHT = "Let me <b>think</b>.\nYes"


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (Thinking.OPEN, f"\n{THOUGHT}\n</think>\n\nSo.", [("reasoning", THOUGHT), ("text", "So.")]),
        (Thinking.MAYBE, f"<think>\n{THOUGHT}\n</think>\n\nSo.", [("reasoning", THOUGHT), ("text", "So.")]),
        (Thinking.MAYBE, "\n So.", [("text", "\n So.")]),
        (Thinking.MAYBE, "<b>So</b>", [("text", "<b>So</b>")]),
        (Thinking.MAYBE, "<think>\n\n</think>\n\nSo.", [("text", "So.")]),
        (Thinking.MAYBE, "</think>\n\nSo.", [("text", "So.")]),
        (Thinking.CLOSED, "So <think>.", [("text", "So <think>.")]),
        (Thinking.OPEN, THOUGHT, [("reasoning", THOUGHT)]),
        (Thinking.OPEN, f"<think>\n{THOUGHT}</think>", [("reasoning", THOUGHT)]),
        (
            Thinking.OPEN,
            f'{THOUGHT}: <tool_call></think><tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>',
            [("reasoning", f"{THOUGHT}: <tool_call>"), ("call", "f", "{}")],
        ),
    ],
)
def test_reasoning_is_separated(thinking: Thinking, text: str, expected: list[Read], tags: bool) -> None:
    assert_same_however_cut("hermes", text, expected, tags=tags, think=THINK_TAGS[0], thinking=thinking)


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize("think", THINK_TAGS, ids=[each.open for each in THINK_TAGS])
def test_every_family_s_reasoning_is_told_by_its_template_and_separated(think: ThinkTags, tags: bool) -> None:
    source = "{% set close = '" + think.close + "' %}{{ messages[0].content }}"
    assert think_tags_of(ChatTemplate({"default": source}, {})) == think
    thought = f"{think.open}{think.label}\nNeed it.\n{think.close}\nSo."
    assert read(None, thought, think=think, thinking=Thinking.MAYBE, tags=tags) == [
        ("reasoning", "Need it."),
        ("text", "So."),
    ]
    assert read(None, f"Need it.{think.close}So.", think=think, thinking=Thinking.OPEN, tags=tags) == [
        ("reasoning", "Need it."),
        ("text", "So."),
    ]


@pytest.mark.parametrize("end", ["<think>", "<think>\n", "<think>\n\n</think>\n\n", "</think>", "assistant\n"])
@pytest.mark.parametrize("tags", [True, False])
def test_the_end_of_a_prompt_shows_where_it_leaves_the_reasoning(end: str, tags: bool) -> None:
    answers, tokenizer = format_of("hermes", tags=tags, think=THINK_TAGS[0])
    prompt = [
        tokenizer.id_of(chunk)
        for chunk in chunked(f"<think> user </think>\n{end}", THINK_TAGS[0][:2] if tags else (), None)
    ]
    expected = Thinking.CLOSED if "</" in end else Thinking.OPEN if "<" in end else Thinking.MAYBE
    assert answers.thinking_after(prompt) is expected
    assert answers.thinking_after(prompt, "a <think> b") is Thinking.OPEN
    assert answers.thinking_after(prompt, "a <think> b </think> c") is Thinking.CLOSED


SOUP = [
    '{"name": "get_weather", "arguments": {"city": "b"}}', "{", "}", '"', "\\", "\\u12", "\\ud83d", "\\ude00", "name", "note", "functions.note:0",
    " ", "\n", "[", "]", ",", ":", "note(", "text=", ")", "'", "```json", "to=functions.note ", "analysis", "final", "\u00e9", "\U0001f600", "1",
    "NaN", "<", ">",
]  # fmt: skip


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_model_writes_is_read_the_same_however_it_is_cut(data: st.DataObject) -> None:
    tools = data.draw(st.sampled_from(FORMATS))
    think = None if tools.frames_all else data.draw(st.sampled_from([None, THINK_TAGS[0]]))
    pieces = st.sampled_from([*SOUP, *tools.tags * 2, *(think[:2] if think else ())])
    text = data.draw(st.lists(pieces, max_size=14).map("".join))
    tags = data.draw(st.booleans())
    options: dict[str, Any] = {
        "tags": tags,
        "special": tools.tags if tags and data.draw(st.booleans()) else (),
        "think": think,
        "thinking": data.draw(st.sampled_from(Thinking)),
        "schemas": SCHEMAS,
        "is_cut": data.draw(st.booleans()),
    }
    cuts = data.draw(st.sets(st.integers(0, len(text.encode())), max_size=4))
    whole, by_byte, by_cuts = (
        [part[:3] for part in read(tools.name, text, cuts=each, **options)] for each in ((), None, cuts)
    )
    assert whole == by_byte == by_cuts  # without the ids of calls, which may be random


TEMPLATES = {
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>' + '```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁sep｜>",
    "mistral_v11": "[TOOL_CALLS]' + name + '[ARGS]",
    "mistral": "[TOOL_CALLS] [",
    "glm45": "<tool_call>{function-name}\n<arg_key>",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=a>",
    "gemma4": "<|tool_call>call:{{ name }}",
    "seed_oss": "<seed:tool_call>\n<function=example_function_name>\n<parameter=a>",
    "deepseek_v32": "<' + dsml + 'function_calls>{# ｜DSML｜ #}",
    "deepseek_v4": "<' + dsml + 'tool_calls>{# ｜DSML｜ #}",
    "cohere_command3": "<|START_ACTION|>[<|START_RESPONSE|>",
    "cohere_command4": "<|START_ACTION|>[<|START_TEXT|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="tool-name-1">',
    "hermes": "<tool_call>\n{",
    "granite": "respond with <|tool_call|> and a list",
    "nemotron_json": "<TOOLCALL>[",
    "hunyuan_a13b": "<tool_calls>' + calls + '</tool_calls> else 助手：",
    "apriel": "within <tool_call> tags: \\n<tool_calls>[' ~ ']</tool_calls>",
    "solar_open": "<|begin|>assistant<|think|><|end|><|begin|>assistant<|tool_calls|>",
    "minimax_m3": "{% set mark = ']<]minimax[>[' %}{{ mark ~ '<tool_call>' }}",
    "apertus": "<|tools_prefix|>' + '[",
    "lfm2": "<|im_start|>system\nList of tools: [",
    "olmo3": "<functions>' + tools + '</functions> <function_calls>",
    "pythonic": "Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
}


def test_the_site_file_names_every_format() -> None:
    assert set(get_args(ToolFormatName)) == {each.name for each in FORMATS}


def test_the_format_is_chosen_by_the_template() -> None:
    assert {each.name for each in FORMATS} == TEMPLATES.keys()
    for name, source in TEMPLATES.items():
        found = tool_format_of(ChatTemplate({"default": source}, {}))
        assert found is not None
        assert found.name == name
    assert tool_format_of(ChatTemplate({"default": "plain"}, {})) is None


LONG = {
    "gemma4": ('<|tool_call>call:note{text:<|"|>', '<|"|>}<tool_call|>'),
    "hermes": ('<tool_call>{"name": "note", "arguments": {"text": "', '"}}</tool_call>'),
    "qwen3_coder": ("<tool_call><function=note><parameter=text>\n", "\n</parameter></function></tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="note"><parameter name="text">',
        "</parameter></invoke></minimax:tool_call>",
    ),
    "glm45": ("<tool_call>note\n<arg_key>tags</arg_key><arg_value>[", "]</arg_value></tool_call>"),
    "llama3_json": ('{"name": "note", "parameters": {"text": "', '"}}'),
    "pythonic": ("[note(text='", "')]"),
    "harmony": ('<|channel|>commentary to=functions.note<|message|>{"text": "', '"}<|call|>'),
    "kimi_k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>{"text": "',
        '"}',
    ),
    "deepseek_v31": ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>note<｜tool▁sep｜>{"text": "', '"}'),
    "mistral_v11": ('[TOOL_CALLS]note[ARGS]{"text": "', '"}'),
    "nemotron_json": ('<TOOLCALL>[{"name": "note", "arguments": {"text": "', '"}}]</TOOLCALL>'),
    "apertus": ('<|tools_prefix|>[{"note": {"text": "', '"}}]<|tools_suffix|>'),
    "olmo3": ('<function_calls>note(text="', '")</function_calls>'),
}


def work_for(name: str, num_tokens: int, piece: bytes) -> int:
    """Return a measure of the work to read a call of `num_tokens` tokens: function calls and copied characters."""
    before, behind = LONG[name]
    answers, tokenizer = format_of(name)
    assert answers.tools is not None
    parser = answers.parser(Thinking.CLOSED, SCHEMAS)
    first = [tokenizer.id_of(chunk) for chunk in chunked(before, answers.tools.tags, None)]
    last = [tokenizer.id_of(chunk) for chunk in chunked(behind, answers.tools.tags, None)]
    token_ids = [*first, *[tokenizer.id_of(piece)] * num_tokens, *last]
    work = num_parts = 0

    def profile(frame: Any, event: str, arg: object) -> None:
        nonlocal work
        work += 1

    scanner = parser._scanner
    sys.setprofile(profile)
    try:
        for token_id in token_ids:
            num_parts += len(parser.push(token_id))
            work += len(scanner.text)
    finally:
        sys.setprofile(None)
    assert num_parts >= (num_tokens if name != "glm45" else 3)
    return work


@pytest.mark.parametrize("piece", [b"ab ", b"\n", b"\\n", "\u00e9".encode(), b"1, "], ids=repr)
@pytest.mark.parametrize("name", LONG)
def test_the_work_for_a_call_grows_with_its_length_and_no_faster(name: str, piece: bytes) -> None:
    assert work_for(name, 4000, piece) < 4.3 * work_for(name, 1000, piece)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_call_of_100k_tokens_takes_four_times_the_work_of_one_of_25k(name: str) -> None:
    assert work_for(name, 100_000, b"ab ") < 4.1 * work_for(name, 25_000, b"ab ")


@pytest.mark.parametrize("special", [True, False])
def test_a_control_token_inside_a_string_ends_its_call_and_the_next_is_not_lost(special: bool) -> None:
    answers, tokenizer = format_of("kimi_k2", special=kimi.TAGS if special else ())
    parser = answers.parser(Thinking.CLOSED, SCHEMAS)
    text = KIMI.replace('"Paris"', '"Par')
    token_ids = [tokenizer.id_of(chunk) for chunk in chunked(text, kimi.TAGS, None)]
    broken, whole = told(parts_of(parser, token_ids))
    assert (broken[2], whole) == ('{"city": "Par}', CALLED_BY_ID[1])


ODD: list[dict[str, Any]] = [
    {"properties": 3},
    {
        "properties": {
            "a": True,
            "b": 3,
            "c": {"type": 3},
            "d": {"type": [3, "string"]},
            "e": {"anyOf": 3},
            "f": {"enum": {}},
        }
    },
    {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/x"}, "c": {"$ref": 3}}, "$defs": 3, "required": 3},
    {
        "properties": {
            "a": {"$ref": "$defs/x"},
            "b": {"$ref": "https://a.example/t.json#/$defs/x"},
            "c": {"$ref": 3, "type": "string"},
        },
        "$defs": {"x": {"type": "string"}},
    },
]


@pytest.mark.parametrize("schema", ODD)
@pytest.mark.parametrize("tools", FORMATS, ids=lambda tools: tools.name)
def test_an_invalid_schema_breaks_no_reader_and_is_written_or_refused(
    tools: ToolFormat, schema: dict[str, Any]
) -> None:
    answers, _ = format_of(tools.name, tags=False)
    assert "answer: " in answers.grammar(Thinking.CLOSED, AnswerRules((CallableTool("f", schema),)))
    called = {
        "qwen3_coder": "".join(f"<parameter={key}>\n1\n</parameter>\n" for key in "abcdef"),
        "minimax_m2": "".join(f'<parameter name="{key}">1</parameter>\n' for key in "abcdef"),
        "glm45": "".join(f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in "abcdef"),
    }
    if tools.name in called:
        text = {
            "qwen3_coder": f"<function=f>\n{called[tools.name]}</function>",
            "minimax_m2": f'<minimax:tool_call>\n<invoke name="f">\n{called[tools.name]}</invoke>',
            "glm45": f"<tool_call>f\n{called[tools.name]}</tool_call>",
        }
        ((kind, name, arguments),) = read(tools.name, text[tools.name], tags=False, schemas={"f": schema})
        assert (kind, name, json.loads(arguments).keys()) == ("call", "f", set("abcdef"))

"""Chat templates, rendered in a sandbox exactly as by transformers."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.text.chat_template import BrokenTemplateError, ChatTemplate, ChatTemplateError
from tests.fakes import CHATML, byte_tokenizer

LOOPS = """\
{%- if not messages %}{{ raise_exception('nothing to say') }}{% endif %}
{{- bos_token }}
{% for message in messages %}
    {% if message.role == 'nobody' %}
        {% continue %}
    {% endif %}
    [{{ message['role'] | upper }}] {{ message.content | trim }}{{ message.tool_calls | tojson if message.tool_calls }}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}[ASSISTANT]{{ eos_token }}{% endif %}"""

TOOLS_INDENTED = """\
{%- set ns = namespace(found=false) %}
{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% set ns.found = true %}{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{% endfor %}{{ ns.found }}{{ tools is defined }}{{ documents is none }}{{ unk_token is defined }}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'It\'s <b>"weather"</b> & more \u00e9',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "S\u00e3o <Paulo>"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <kind> & 'brief'"}, {"role": "user", "content": "  Hi \n"}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "Thanks"},
    ],
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer().save(str(file))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )


@pytest.mark.parametrize("source", [CHATML, LOOPS, TOOLS_INDENTED], ids=["chatml", "loops", "tools"])
@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_it_renders_what_transformers_renders(reference: Any, source: str, conversation: int, tools: Any) -> None:
    messages = CONVERSATIONS[conversation]
    template = ChatTemplate({"default": source}, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    for prompt in (True, False):
        expected = reference.apply_chat_template(
            messages, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False
        )
        assert template.render(messages, tools, add_generation_prompt=prompt) == expected


def test_a_template_may_refuse() -> None:
    with pytest.raises(ChatTemplateError, match="nothing to say"):
        ChatTemplate({"default": LOOPS}, {}).render([])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.extend([1]) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 // 0 }}",
        "{{ 2 ** (2 ** 40) }}",
        "{{ (7 ** 60000000) % 3 }}",
        "{% for i in range(9) %}{% set n = (9 ** 1200) * (9 ** 1200) %}{{ n }}{% endfor %}",
        "{{ messages[0].content * 10 ** 9 }}",
        "{{ 10 ** 9 * [0] }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%.*f' % (99999999, 1.0) }}",
        "{{ '%(a)99999s' % {'a': 'b'} }}",
    ],
)
def test_a_hostile_or_broken_template_is_an_error_and_nothing_more(attack: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate({"default": attack}, {}).render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_a_template_changes_lists_of_its_own_or_a_copy_of_the_callers() -> None:
    """Some templates of Kimi K2 keep the ids of calls in a list until their results come."""
    source = (
        "{% set own = namespace(ids=[]) %}{% for message in messages %}{% set _ = own.ids.append(message.id) %}{% endfor %}"
        "{{ own.ids.pop(0) }} {{ own.ids | join }} {% set _ = messages.append(tools[0].pop()) %}{{ messages | length }} {{ kept.pop() }}"
    )
    messages, tools, kept = ([{"id": "a"}, {"id": "b"}], [["t"]], {"kept": ["k"]})
    template = ChatTemplate({"default": source}, {})
    for _ in range(2):
        assert template.render(messages, tools, variables=kept) == "a b 3 k"
    assert (messages, tools, kept) == ([{"id": "a"}, {"id": "b"}], [["t"]], {"kept": ["k"]})


def test_a_filters_result_can_be_written_as_json() -> None:
    source = "{{ messages | map(attribute='id') | tojson }} {{ messages | selectattr('id', 'eq', 'b') | tojson }}"
    assert ChatTemplate({"default": source}, {}).render([{"id": "a"}, {"id": "b"}]) == '["a", "b"] [{"id": "b"}]'
    with pytest.raises(ChatTemplateError, match="not JSON serializable"):
        ChatTemplate({"default": "{{ nothing | tojson }}"}, {}).render([])


def test_operators_compute_what_they_do_elsewhere() -> None:
    source = "{{ 2 ** 10 }} {{ 2.5 ** 2 }} {{ '-' * 8 }} {{ 7 % 4 }} {{ '%s: %05.1f%%' % ('a', 1.25) }} {{ 3 * [1] }} {{ 1.5 * 2 }}"
    assert ChatTemplate({"default": source}, {}).render([]) == "1024 6.25 -------- 3 a: 001.2% [1, 1, 1] 3.0"


def test_no_constant_is_computed_while_a_template_is_compiled() -> None:
    """Python's compiler would compute the first constant for minutes, in a call that cannot be interrupted."""
    template = ChatTemplate(
        {"default": "{% if false %}{{ (7 ** 60000000) % 3 }}{{ 'a' * 10 ** 12 }}{% endif %}fine"}, {}
    )
    assert template.render([]) == "fine"


DEEP = "{% for a in b %}" * 30 + "{% endfor %}" * 30


@pytest.mark.parametrize("source", ["{% if %}", "{{ 1 +", DEEP, "{{ " + "(" * 5_000 + ")" * 5_000 + " }}"])
def test_invalid_jinja_is_a_sentence_whenever_it_is_asked(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    assert not template.is_compiled
    for use in (template.compile, template.compile, lambda: template.render([])):
        with pytest.raises(BrokenTemplateError, match="not valid Jinja"):
            use()
    assert template.why_broken is not None
    assert template.is_compiled


class Sources(dict[str, str]):
    """Templates by name, with the number of times that they were taken to be compiled."""

    num_taken = 0

    def items(self) -> Any:
        self.num_taken += 1
        return super().items()


def test_a_template_is_compiled_once_however_many_threads_ask() -> None:
    sources = Sources(default=CHATML)
    template = ChatTemplate(sources, {})
    assert template.mentions("<tool_call>")
    assert sources.num_taken == 0, "a look for names must not compile the template"
    with ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(lambda _: template.render([{"role": "user", "content": "Hi"}]), range(32)))
    assert len(texts) == 1
    assert sources.num_taken == 1


def test_named_templates_are_chosen_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template.render([], None) == "plain"
    assert template.render([], []) == "plain"
    assert template.render([], TOOLS) == "with tools"


def test_a_jinja_file_wins_over_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "old", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("new {{ eos_token }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = ChatTemplate.from_directory(tmp_path)
    assert template.render([]) == "new </s>"
    assert template.render([], TOOLS) == "tools"


def test_a_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    template = ChatTemplate.from_directory(tmp_path)
    assert template.is_compiled, "the template must not need Jinja"
    with pytest.raises(ChatTemplateError, match="completions endpoint"):
        template.render([])


def test_a_malformed_template_entry_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [1]}')
    with pytest.raises(ChatTemplateError, match="a string or a list"):
        ChatTemplate.from_directory(tmp_path)

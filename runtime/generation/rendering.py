"""Renders conversations with a model's chat template.

A template comes with its checkpoint and is a program, which may be slow, use gigabytes or never end. So it runs in a child process with limits.
Templates of embedded models are trusted and run here: short conversations in the event loop, long ones in a thread. Independent of token ids.
"""

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from pilotlight.dialects.requests import Conversation
from pilotlight.engine.api.guarded_pool import GuardedJob, JobCall, JobEndedError, JobError
from pilotlight.engine.text.chat_template import (
    BrokenTemplateError,
    ChatTemplate,
    ChatTemplateError,
    Messages,
    Tools,
    check_template,
    import_ahead,
    import_environment,
    render_template,
)
from pilotlight.engine.text.formats import Speller
from pilotlight.engine.tokenizer.tokenizer import SHIELD_BEGIN, SHIELD_END, Tokenizer, unmarked
from pilotlight.runtime.generation.message_forms import other_forms, with_single_calls
from pilotlight.runtime.models.checkpoint_children import children, run_guarded

RENDER_BYTES = 512 << 20
IMPORT_CPU_S = 10.0
MAX_CHILDREN = 2  # limit of child processes for one model's template
# Marks the end of a message that the answer continues: shields around nothing, which no shielded text contains.
_END = SHIELD_BEGIN + SHIELD_END


class Rendering:
    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, cpu_s: float, spell: Speller, *, is_trusted: bool
    ) -> None:
        """`cpu_s` limits the CPU time of a rendering in a child process.

        `spell`: writes calls that the template omits.
        """
        self._tokenizer = tokenizer
        self._spell = spell
        self._renderer: _Renderer = _Here(template) if is_trusted else _InChild(template, cpu_s)
        self._has_single_calls = template.mentions("tool_calls[0]")  # it renders only the first call of a message
        self._checking = asyncio.Lock()
        self.is_checked = not template.sources
        self.why_broken: str | None = None  # why the template is unusable; None if it is usable or not checked yet

    async def check(self) -> None:
        """Compile the template, once for all requests. Raises BrokenTemplateError if it cannot be used."""
        async with self._checking:
            if not self.is_checked:
                try:
                    await self._renderer.compile()
                except BrokenTemplateError as error:
                    self.why_broken = str(error)
                self.is_checked = True
        if self.why_broken is not None:
            raise BrokenTemplateError(self.why_broken)

    async def text(self, conversation: Conversation, *, is_short: bool) -> str:
        """Return the rendered conversation. Raises ChatTemplateError, EngineError.
        Special tokens in a client's text are escaped."""
        if not self.is_checked or self.why_broken is not None:
            await self.check()
        told = (conversation.messages, conversation.tools or None, dict(conversation.variables))
        shield = self._tokenizer.shield
        messages, tools, variables = shield(told) if is_short else await asyncio.to_thread(shield, told)
        if self._has_single_calls:
            messages = with_single_calls(messages)
        asked = _TemplateInput(messages, tools, conversation.adds_generation_prompt, variables)
        continued = messages[-1]["content"] if conversation.continues_last else None
        render = partial(self._text, continued=continued, is_short=is_short)
        refusal: ChatTemplateError | None = None
        for form in self._forms(messages):
            try:
                return await render(asked._replace(messages=form))
            except (BrokenTemplateError, _StoppedError):
                raise
            except ChatTemplateError as error:
                refusal = refusal or error
        raise ChatTemplateError(unmarked(str(refusal)))

    def _forms(self, messages: Messages) -> Iterator[Messages]:
        yield messages
        yield from other_forms(messages, self._spell)

    async def _text(self, asked: "_TemplateInput", *, continued: str | None, is_short: bool) -> str:
        """`continued`: content of the last message if the answer continues it."""
        if continued is None:
            return await self._renderer.render(asked, is_short=is_short)
        text = await self._renderer.render(asked._replace(messages=_with_end(asked.messages)), is_short=is_short)
        return _left_open(text, continued)


def expect_conversation(*, is_trusted: bool) -> None:
    """Prepare to render a conversation while its model is still loading."""
    if is_trusted:
        import_ahead()
    else:
        children().submit(GuardedJob(JobCall(import_environment), IMPORT_CPU_S, RENDER_BYTES))


class _StoppedError(ChatTemplateError):
    """The template was stopped by a limit."""


class _TemplateInput(NamedTuple):
    """The arguments of a template."""

    messages: Messages
    tools: Tools | None
    adds_prompt: bool
    variables: Mapping[str, Any]


class _Renderer(Protocol):
    """Compiles and renders a template, here or in a child process."""

    async def compile(self) -> None: ...

    async def render(self, asked: "_TemplateInput", *, is_short: bool) -> str: ...


class _Here:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    async def compile(self) -> None:
        await asyncio.to_thread(self._template.compile)

    async def render(self, asked: "_TemplateInput", *, is_short: bool) -> str:
        messages, tools, adds_prompt, variables = asked
        render = partial(self._template.render, messages, tools, add_generation_prompt=adds_prompt, variables=variables)
        return render() if is_short else await asyncio.to_thread(render)


class _InChild:
    def __init__(self, template: ChatTemplate, cpu_s: float) -> None:
        self._template = template
        self._cpu_s = cpu_s
        self._places = asyncio.Semaphore(MAX_CHILDREN)

    async def compile(self) -> None:
        try:
            await self._run(JobCall(check_template, (self._template.as_json,)))
        except JobEndedError as error:
            raise BrokenTemplateError(f"the model's chat template cannot be compiled: {error}") from None

    async def render(self, asked: "_TemplateInput", *, is_short: bool) -> str:
        try:
            call = JobCall(render_template, (self._template.as_json, *asked))
            text: str = await self._run(call)
        except JobEndedError as error:
            message = f"the model's chat template was stopped while it rendered this conversation: {error}; shorten it"
            raise _StoppedError(message) from None
        return text

    async def _run(self, call: JobCall) -> Any:
        async with self._places:
            try:
                return await run_guarded(GuardedJob(call, self._cpu_s, RENDER_BYTES))
            except JobError as error:
                kind = BrokenTemplateError if error.name == BrokenTemplateError.__name__ else ChatTemplateError
                raise kind(str(error)) from None


def _with_end(messages: Messages) -> Messages:
    """Return the messages with `_END` after the last one's content, but before white space at its end."""
    *others, last = messages
    content = last["content"] or ""
    core = content.rstrip()
    return (*others, {**last, "content": f"{core}{_END}{content[len(core) :]}"})


def _left_open(text: str, content: str) -> str:
    """Return a rendered conversation up to the end of its last message's content, which has `_END`."""
    before, end, after = text.rpartition(_END)
    if not end or not content.strip() or not before.endswith(content.strip()):
        sentence = "the model's chat template changes the text of the last message, so it cannot be continued"
        raise ChatTemplateError(sentence)
    space = content[len(content.rstrip()) :]
    return before + space if after.startswith(space) else before  # some templates strip the content

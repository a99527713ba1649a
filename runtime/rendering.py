"""Conversations to prompts' texts by one model's chat template, which may take long or never end.

Templates come with checkpoints and are programs. A short conversation is rendered where it is asked for, if the template has been quick so far; every
other one in a thread, and after RENDER_S that is told to end and the conversation is refused. Refuses to know tokens' ids.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from dialects.requests import Conversation
from engine.chat_template import BrokenTemplateError, ChatTemplate, ChatTemplateError, Messages
from engine.tokenizer import Tokenizer, unmarked
from runtime.message_forms import other_forms

RENDER_S = 10.0  # 6 MiB of tool calls and nothing else take the embedded model's template 4 s
QUICK_S = 0.02  # of CPU time for one conversation: a slower template is kept off the loop
MAX_THREADS = 2  # of one model's template


class _EndedError(BaseException):  # which nothing on the way catches
    pass


class Rendering:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._is_quick = False  # until it has been seen to be
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def text(self, conversation: Conversation, *, is_short: bool) -> str:
        """Special tokens that somebody wrote are marked in it. Raises ChatTemplateError."""
        if is_short and self._is_quick:
            return self._timed(conversation)
        return await self._in_thread(lambda: self._timed(conversation) if is_short else self._text(conversation))

    def _timed(self, conversation: Conversation) -> str:
        self._template.compile()
        began = time.thread_time()
        try:
            return self._text(conversation)
        finally:
            self._is_quick = time.thread_time() - began < QUICK_S

    def _text(self, conversation: Conversation) -> str:
        try:
            return self._rendered(conversation, conversation.messages)
        except BrokenTemplateError:
            raise
        except ChatTemplateError as error:
            for messages in other_forms(conversation.messages):
                with suppress(ChatTemplateError):
                    return self._rendered(conversation, messages)
            raise error from None

    def _rendered(self, conversation: Conversation, messages: Messages) -> str:
        told = (messages, conversation.tools, conversation.variables)
        messages, tools, variables = self._tokenizer.shield(told)
        adds = conversation.adds_generation_prompt
        try:
            text = self._template.render(messages, tools or None, add_generation_prompt=adds, variables=variables)
        except ChatTemplateError as error:
            raise type(error)(unmarked(str(error))) from None
        return _left_open(text, messages[-1]["content"]) if conversation.continues_last else text

    async def _in_thread(self, render: Callable[[], str]) -> str:
        """A thread of its own: what does not end must not keep the places of a pool that others need."""
        await self._threads.acquire()
        loop = asyncio.get_running_loop()
        rendered: Future[str] = Future()
        rendered.set_running_or_notify_cancel()
        rendered.add_done_callback(lambda _: loop.call_soon_threadsafe(self._threads.release))
        thread = threading.Thread(target=_work, args=(render, rendered), name="render", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(RENDER_S):
                return await asyncio.wrap_future(rendered)
        except TimeoutError:
            message = f"the model's chat template was not done with this conversation after {RENDER_S:g} s; shorten it"
            raise ChatTemplateError(message) from None
        finally:
            if not rendered.done():
                _end(thread)


def _left_open(text: str, content: str) -> str:
    """Return a rendered conversation up to the end of its last message's content."""
    for written in (content, content.strip()):  # some templates trim
        if written and (start := text.rfind(written)) >= 0:
            return text[: start + len(written)]
    raise ChatTemplateError(
        "the model's chat template does not write the last message as it is: it cannot be continued"
    )


def _work(render: Callable[[], str], rendered: Future[str]) -> None:
    try:
        rendered.set_result(render())
    except BaseException as error:  # of one that was ended, nobody hears
        rendered.set_exception(error)


def _end(thread: threading.Thread) -> None:
    """End a thread at its next step in Python: a template's loops are made of such."""
    import ctypes

    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_EndedError))

"""Forms of a conversation, for chat templates that refuse some of them or leave out a part.

Arguments of calls are objects or JSON text. Arguments that are not a JSON object, such as those of a truncated call, are text or the only value of an
object. A system message stays separate, or is merged into the user's message next to it. Several calls share a message, or each has a separate one;
so does text before calls. For templates that render no calls, calls become text in the model's format.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pilotlight.engine.text.chat_template import Messages
from pilotlight.engine.text.formats import Speller

INVALID_ARGUMENTS = "INVALID_JSON"  # Anthropic's documentation uses this key for arguments that are not a JSON object


def other_forms(messages: Messages, spell: Speller) -> Iterator[Messages]:
    """Yield other forms of a conversation, the most widely accepted first.

    `spell`: writes calls in the model's format.
    """
    seen = [messages]
    with_calls_as_text = partial(_with_calls_as_text, spell=spell)
    for place in (_as_they_are, _with_system_folded, partial(_with_system_folded, keeps_first=False)):
        placed = place(messages)
        for separate in (_as_they_are, _with_text_apart, _with_bare_calls, with_calls_as_text, _without_text):
            separated = separate(placed)
            for write in (_as_they_are, _with_arguments_as_text, _with_arguments_as_objects):
                form = write(separated)
                if form not in seen:
                    seen.append(form)
                    yield form


def with_single_calls(messages: Messages) -> Messages:
    """Return the messages with each call in a separate message, which its result follows.

    Templates of Llama 3 refuse two calls in a message, and that of gpt-oss leaves out the second.
    """
    written: list[dict[str, Any]] = []
    remaining = deque(messages)
    while remaining:
        message = remaining.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            written.append(message)
            continue
        results: dict[str | None, list[dict[str, Any]]] = {}  # by the id of their call
        while remaining and remaining[0]["role"] == "tool":
            result = remaining.popleft()
            results.setdefault(result.get("tool_call_id"), []).append(result)
        for number, one in enumerate(calls):
            said = message if number == 0 else {"role": message["role"], "content": ""}
            written.append({**said, "tool_calls": [one]})
            written += results.pop(one.get("id"), ())
        written += (result for others in results.values() for result in others)
    return tuple(written)


def _as_they_are(messages: Messages) -> Messages:
    return messages


def _with_text_apart(messages: Messages) -> Messages:
    """Return the messages with the text before calls in a separate message.

    Templates of Llama 3, Command and Hermes omit text beside calls.
    """
    separated: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            separated.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        separated.append(message)
    return tuple(separated)


def _with_bare_calls(messages: Messages) -> Messages:
    """Return the messages with None as the content of calls.

    DeepSeek R1's template omits calls with any other content.
    """
    return _with_content_of_calls(_with_text_apart(messages), None)


def _without_text(messages: Messages) -> Messages:
    """Return the messages without the text before calls.

    Mistral Nemo's template omits it beside calls, and refuses it as a message if an answer follows the results.
    """
    return _with_content_of_calls(messages, "")


def _with_content_of_calls(messages: Messages, content: str | None) -> Messages:
    return tuple({**message, "content": content} if message.get("tool_calls") else message for message in messages)


def _with_calls_as_text(messages: Messages, spell: Speller) -> Messages:
    """Return the messages with calls as text at the end of their message."""
    written: list[dict[str, Any]] = []
    for message in _with_arguments_as_objects(messages):
        if calls := message.get("tool_calls"):
            named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**others, "content": (f"{message['content']}\n" if message["content"] else "") + spell(named)}
        written.append(message)
    return tuple(written)


def _with_arguments_as_text(messages: Messages) -> Messages:
    """Return the messages with the arguments of calls as JSON text, which DeepSeek's templates need."""
    return _rewritten(
        messages, lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    )


def _with_arguments_as_objects(messages: Messages) -> Messages:
    return _rewritten(messages, lambda given: {INVALID_ARGUMENTS: given} if isinstance(given, str) else given)


def _rewritten(messages: Messages, write: Callable[[Any], Any]) -> Messages:
    return tuple(
        {**message, "tool_calls": [_with_arguments(call, write) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    )


def _with_arguments(call: dict[str, Any], write: Callable[[Any], Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": write(function["arguments"])}}


def _with_system_folded(messages: Messages, *, keeps_first: bool = True) -> Messages:
    """Join system messages at the start, and merge each later one into the previous or next user message.

    `keeps_first`: False to merge those at the start, too, because Gemma's templates refuse them.
    """
    folded: list[dict[str, Any]] = []
    pending: str | None = None  # content of system messages for the next user message
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system" and folded and folded[-1]["role"] in ("system", "user") and pending is None:
            folded[-1] = {**folded[-1], "content": _joined(folded[-1]["content"], content)}
        elif role == "system" and (folded or not keeps_first):
            pending = content if pending is None else _joined(pending, content)
        else:
            if pending is not None and role != "user":
                folded.append({"role": "user", "content": pending})
            elif pending is not None:
                message = {**message, "content": _joined(pending, content)}
            pending = None
            folded.append(message)
    return (*folded, *([] if pending is None else [{"role": "user", "content": pending}]))


def _joined(first: Any, second: Any) -> Any:
    """Join two contents: two strings to one string, otherwise to one list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content

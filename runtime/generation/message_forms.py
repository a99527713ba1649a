"""Alternative forms of a conversation, for chat templates that refuse some of them.

Arguments of calls are objects or JSON text. Arguments that are not a JSON object, such as those of a truncated call, are text or the only value of an
object. A system message after the first message stays separate, or is merged into the user's message next to it. Several calls share a message, or
each has a separate one.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pilotlight.engine.text.chat_template import Messages

INVALID_ARGUMENTS = "INVALID_JSON"  # Anthropic's documentation uses this key for arguments that are not a JSON object


def other_forms(messages: Messages) -> Iterator[Messages]:
    """Yield other forms of a conversation, the most widely accepted first."""
    seen = [messages]
    for place in (_as_they_are, _with_system_folded):
        placed = place(messages)
        for write in (_as_they_are, _with_arguments_as_text, _with_arguments_as_objects):
            form = write(placed)
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


def _with_system_folded(messages: Messages) -> Messages:
    """Join system messages at the start, and merge each later one into the previous or next user message."""
    folded: list[dict[str, Any]] = []
    pending: str | None = None  # content of system messages for the next user message
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system" and folded and folded[-1]["role"] in ("system", "user") and pending is None:
            folded[-1] = {**folded[-1], "content": _joined(folded[-1]["content"], content)}
        elif role == "system" and folded:
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

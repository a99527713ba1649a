"""Probes of a chat template: whether content is text or parts, and what the template omits.

This module is independent of where templates come from, and of the rest of a conversation.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[dict[str, Any]]

_PROBE = "probe 2718"
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "A function", "parameters": {"type": "object", "properties": {}}},
}
REASONING = "reasoning"  # of the assistant, which Ministral's templates expect as a part of content
MESSAGES_OF = "messages of the role"
LATER_SYSTEM = "system messages after the first message"
CALLS = "tool calls"  # of messages whose content is an empty string
BARE_CALLS = "tool calls without content"
CALLS_WITH_TEXT = "tool calls with text, or the text"
_ROLES = ("user", "system", "assistant", "tool")  # ordered, because a role's probe has messages of earlier roles


def part_roles(template: "Template", special_tokens: dict[str, str]) -> frozenset[str]:
    """Return the roles whose content the template expects as a list of parts.

    For these roles it renders content only if that is in parts. The result contains REASONING if reasoning must be one of the parts.
    """
    roles: frozenset[str] = frozenset()
    for role in _ROLES:
        if not _shows(template, special_tokens, role, roles) and _shows(template, special_tokens, role, roles | {role}):
            roles |= {role}
    shown, as_part, as_other_part = (
        _rendered(template, special_tokens, messages, roles)
        for messages in (_reasoning(), _reasoning_part("thinking"), _reasoning_part("other"))
    )
    # Some templates print parts that they do not expect.
    return roles | {REASONING} if shown is False and as_part and not as_other_part else roles


def with_parts(messages: Messages, roles: frozenset[str]) -> Messages:
    """Return the messages, with the content of these roles as a list of parts."""
    return [_with_parts(message, roles) for message in messages] if roles else messages


def _with_parts(message: dict[str, Any], roles: frozenset[str]) -> dict[str, Any]:
    content, thoughts = message.get("content"), message.get("reasoning_content") if REASONING in roles else None
    if not (thoughts or message.get("role") in roles) or not isinstance(content, str):
        return message
    parts = [{"type": "thinking", "thinking": thoughts}] if thoughts else []
    return {**message, "content": [*parts, {"type": "text", "text": content}]}


def lost_places(
    template: "Template", special_tokens: dict[str, str], roles: frozenset[str], *, with_tools: bool
) -> frozenset[str]:
    """Return the places that the template omits without an error.

    Places are roles, later system messages and kinds of calls. `roles`: roles whose content the template expects as parts. `with_tools`: whether
    tools are declared.
    """
    tools = [_TOOL] if with_tools else None

    def shows(messages: Messages) -> bool | None:
        return _rendered(template, special_tokens, messages, roles, tools)

    def omits(messages: Messages) -> bool:
        return shows(messages) is False

    def omits_call(content: str | None, arguments: dict[str, str]) -> bool:
        shown = shows(_calling(content, arguments))
        # Some templates need arguments as text.
        return omits(_calling(content, json.dumps(arguments))) if shown is None else not shown

    lost = {f"{MESSAGES_OF} {role}" for role in _ROLES if omits(_probing(role))}
    if f"{MESSAGES_OF} user" in lost:  # the template transforms all content, so its output contains no probe
        return frozenset()
    if any(map(omits, _later_systems())):
        lost.add(LATER_SYSTEM)
    given = {"a": _PROBE}
    if omits_call("", given):
        lost.add(CALLS)
    if omits_call(None, given):
        lost.add(BARE_CALLS)
    if omits_call("Hi", given) or omits_call(_PROBE, {}):
        lost.add(CALLS_WITH_TEXT)
    return frozenset(lost)


def lost_place(messages: Messages, lost: frozenset[str]) -> str | None:
    """Return the first place in `lost` where the conversation has content or calls, or None."""
    return next((place for place in _places(messages) if place in lost), None)


def _places(messages: Messages) -> Iterator[str]:
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if content:
            yield LATER_SYSTEM if role == "system" and number else f"{MESSAGES_OF} {role}"
        if message.get("tool_calls"):
            yield CALLS_WITH_TEXT if content else BARE_CALLS if content is None else CALLS


def _shows(template: "Template", special_tokens: dict[str, str], role: str, roles: frozenset[str]) -> bool:
    return _rendered(template, special_tokens, _probing(role), roles) is True


def _rendered(
    template: "Template",
    special_tokens: dict[str, str],
    messages: Messages,
    roles: frozenset[str],
    tools: Sequence[dict[str, Any]] | None = None,
) -> bool | None:
    """Return whether the probe is in the rendered conversation; None if the template refuses it."""
    try:
        text: str = template.render(
            messages=with_parts(messages, roles),
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except Exception:  # a template may raise anything
        return None
    return _PROBE in text.lower()


def _later_systems() -> tuple[Messages, ...]:
    user, later = {"role": "user", "content": "Hello"}, {"role": "system", "content": _PROBE}
    return [user, later], [user, {"role": "assistant", "content": "Hi"}, later, user]


def _probing(role: str) -> Messages:
    user: dict[str, Any] = {"role": "user", "content": "Hello"}
    if role == "user":
        return [{**user, "content": _PROBE}]
    if role == "system":
        return [{"role": role, "content": _PROBE}, user]
    if role == "assistant":
        return [user, {"role": role, "content": _PROBE}, user]
    return _calling("", {}, result=_PROBE)


def _reasoning() -> Messages:
    user, asking, result = _calling("", {})
    return [user, {**asking, "reasoning_content": _PROBE, "reasoning": _PROBE, "thinking": _PROBE}, result]


def _reasoning_part(kind: str) -> Messages:
    return _calling([{"type": kind, "thinking": _PROBE}, {"type": "text", "text": ""}], {})


def _calling(content: str | list[dict[str, str]] | None, arguments: Any, result: str = "Done") -> Messages:
    name = "call12345"  # nine characters, as Mistral's templates require
    call = {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": result, "name": "f", "tool_call_id": name},
    ]

"""Whether a chat template reads a message's content as a text or as a list of parts: one that is given the other form leaves it out without a word.

Refuses to know where templates come from, and what else is in a conversation.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[dict[str, Any]]

_PROBE = "probe 2718"
_ROLES = ("user", "system", "assistant", "tool")  # each one's conversation has others of those before it


def part_roles(template: "Template", special_tokens: dict[str, str]) -> frozenset[str]:
    """Return the roles whose content the template reads as parts: where a probe is in what it renders only if the probe is a part."""
    roles: frozenset[str] = frozenset()
    for role in _ROLES:
        if not _shows(template, special_tokens, role, roles) and _shows(template, special_tokens, role, roles | {role}):
            roles |= {role}
    return roles


def with_parts(messages: Messages, roles: frozenset[str]) -> Messages:
    """Return messages in which the content of these roles is a list of parts."""
    if not roles:
        return messages
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if message.get("role") in roles and isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]


def _shows(template: "Template", special_tokens: dict[str, str], role: str, roles: frozenset[str]) -> bool:
    try:
        text: str = template.render(
            messages=with_parts(_probing(role), roles),
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
    except Exception:  # it refuses such a conversation in some way of its own
        return False
    return _PROBE in text.lower()


def _probing(role: str) -> Messages:
    user: dict[str, Any] = {"role": "user", "content": "Hello"}
    if role == "user":
        return [{**user, "content": _PROBE}]
    if role == "system":
        return [{"role": role, "content": _PROBE}, user]
    if role == "assistant":
        return [user, {"role": role, "content": _PROBE}, user]
    name = "call12345"  # nine characters, which is what templates of Mistral want
    call = {"id": name, "type": "function", "function": {"name": "f", "arguments": {}}}
    asking = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [user, asking, {"role": role, "content": _PROBE, "name": "f", "tool_call_id": name}]

"""Prompts in pieces: prompts share a prefix of pieces exactly if their texts for the model share it."""

from typing import Any

from pilotlight.dialects.table import prompt_pieces
from pilotlight.wire.errors import Dialect

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def pieces(*messages: dict[str, Any]) -> list[bytes]:
    return [piece for piece, _ in prompt_pieces(Dialect.OPENAI, {"messages": list(messages)})]


def backwards(value: Any) -> Any:
    """Return the same value with the keys in reverse order."""
    if isinstance(value, list):
        return [backwards(each) for each in value]
    return {key: backwards(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


def test_the_order_of_keys_makes_no_other_prefix() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert pieces(asked, called) == pieces(backwards(asked), backwards(called))


def test_whatever_reaches_the_prompt_makes_another_prefix() -> None:
    told = {"role": "tool", "content": "x", "name": "f", "tool_call_id": "1", "tool_calls": [CALL]}
    (plain,) = pieces(told)
    for name, other in (("role", "user"), ("content", "y"), ("name", "g"), ("tool_call_id", "2"), ("tool_calls", [])):
        assert pieces({**told, name: other}) != [plain], name
    assert pieces({**told, "unknown": 1}) == [plain]


def test_parts_of_unknown_kinds_are_left_to_the_model_to_refuse() -> None:
    kinds: list[Any] = [{}, [], None, 3]
    for kind in kinds:
        parts = [{"type": kind, "text": "Hi"}]
        assert len(pieces({"role": "user", "content": [{"type": "tool_result", "content": parts}, *parts]})) == 1


def test_a_billing_line_before_the_instructions_is_no_piece_in_any_dialect_that_has_instructions() -> None:
    line = "x-anthropic-billing-header: cch=1;"
    for dialect, name in ((Dialect.ANTHROPIC, "system"), (Dialect.OPENAI_RESPONSES, "instructions")):
        plain = list(prompt_pieces(dialect, {name: "Be brief."}))
        assert list(prompt_pieces(dialect, {name: f"{line}\nBe brief."})) == plain
        assert list(prompt_pieces(dialect, {name: line})) == []

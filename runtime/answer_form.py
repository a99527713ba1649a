"""What a request's answer must be, and how it is read: for its model, and where its prompt leaves the model's reasoning.

Knows formats and grammars by their interface alone; refuses to know what any of them looks like.
"""

from collections.abc import Iterable
from typing import Any

import orjson

from dialects.requests import Conversation, ValidGeneration
from dialects.workers_ai import ValidRun
from engine.formats import AnswerRules, CallableTool, Thinking, raw_parser
from engine.formats.grammars import document
from engine.formats.registry import ToolFormat
from engine.protocol import Constraint
from runtime.engines.model_state import AwakeModel
from runtime.output_processor import OutputProcessor
from wire.errors import ApiError

_ADDS_KEYS = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "propertyNames", "dependentRequired",
    "dependentSchemas", "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if",
}  # fmt: skip
FREE = {"type": "object"}  # arguments of a tool whose author leaves the model free


class AnswerForm:
    """The form of one request's answers."""

    def __init__(self, model: AwakeModel, request: ValidGeneration, prompt: tuple[int, ...]) -> None:
        """`prompt`: of a conversation, its tokens."""
        self._model = model
        self._request = request
        self._conversation = request.prompt if isinstance(request.prompt, Conversation) else None
        self._thinking = Thinking.CLOSED
        if self._conversation is not None:
            last = self._conversation.messages[-1]["content"] if self._conversation.continues_last else None
            self._thinking = model.text.answers.thinking_after(prompt, last)

    def processor(self) -> OutputProcessor:
        """Return what reads one answer. Raises ApiError."""
        text, conversation = self._model.text, self._conversation
        if conversation is None:
            parser = raw_parser(text.tokenizer)
        else:
            functions = [tool["function"] for tool in conversation.tools]
            schemas = {function["name"]: function.get("parameters") or {} for function in functions}
            if text.answers.tools is not None:
                _check_names(schemas, text.answers.tools)
            parser = text.answers.parser(self._thinking, schemas)
        return OutputProcessor(
            parser,
            stop=self._request.sampling.stop,
            shows_stop=self._request.sampling.shows_stop,
            hidden_token_ids=frozenset(
                (*self._model.info.eos_token_ids, *self._request.sampling.stop_token_ids),
            ),
            one_call_only=conversation is not None and not conversation.parallel_tool_calls,
            whole_calls=isinstance(self._request, ValidRun),
        )

    def constraint(self) -> Constraint | None:
        """Return what the answer must be, tool calls that it must or may have and the reasoning before it included. Raises ApiError."""
        conversation, answers, form = self._conversation, self._model.text.answers, self._request.constraint
        asked = None if form is None else Constraint(form.kind, form.text)
        if conversation is None:
            return asked
        is_demanded = conversation.must_call or conversation.strict_tools or conversation.allowed_tools is not None
        if asked is None and not is_demanded:
            return self._wished(conversation)
        if not conversation.tools and not answers.has_reasoning(self._thinking):
            return asked
        if conversation.tools and answers.tools is None:
            message = f"the chat template of {self._request.requested_model!r} writes no tool calls: leave tools out"
            raise ApiError("invalid_request", message, param="tools")
        if asked is not None and asked.kind != "lark":
            self._refuse_tags(asked.text, "what the answer must be")
        rules = AnswerRules(
            self._callable(conversation),
            is_single=not conversation.parallel_tool_calls,
            document=None if asked is None or conversation.must_call else document(asked),
            may_be_text=not conversation.must_call and asked is None,
            is_lenient=not conversation.strict_tools,
        )
        try:
            return Constraint("lark", answers.grammar(self._thinking, rules))
        except ValueError as error:
            raise ApiError(
                "invalid_request", f"the tools' schemas cannot be enforced: {error}", param="tools"
            ) from None

    def _wished(self, conversation: Conversation) -> Constraint | None:
        """Return what keeps calls that nobody demands within their tools' schemas, as far as the model's format and the schemas allow."""
        answers = self._model.text.answers
        if not conversation.tools or not answers.marks_calls:
            return None
        functions = [tool["function"] for tool in conversation.tools]
        rules = AnswerRules(
            tuple(CallableTool(each["name"], closed(_arguments(each))) for each in functions),
            is_single=not conversation.parallel_tool_calls,
            may_be_text=True,
            is_lenient=True,
        )
        try:
            grammar = answers.grammar(self._thinking, rules)
        except ValueError:
            return None
        spelled = self._model.text.tokenizer.spelled_tag(orjson.dumps([list(tool) for tool in rules.tools]).decode())
        return None if spelled else Constraint("lark", grammar, is_optional=True)

    def _callable(self, conversation: Conversation) -> tuple[CallableTool, ...]:
        return tuple(
            self._callable_tool(tool["function"], conversation)
            for tool in conversation.tools
            if conversation.allowed_tools is None or tool["function"]["name"] in conversation.allowed_tools
        )

    def _callable_tool(self, function: dict[str, Any], conversation: Conversation) -> CallableTool:
        """Return a tool with the schema that its calls follow: any object, where its author leaves the model free and none must be called."""
        name, is_bound = function["name"], conversation.must_call or function["name"] in conversation.strict_tools
        schema = _arguments(function) if is_bound else FREE
        self._refuse_tags(orjson.dumps([name, schema]).decode(), f"the schema of the tool {name[:100]!r}", "tools")
        return CallableTool(name, schema)

    def _refuse_tags(self, text: str, what: str, param: str | None = None) -> None:
        """Refuse a grammar's text that spells a token, for which it would be taken: that is no text."""
        if tag := self._model.text.tokenizer.spelled_tag(text):
            raise ApiError("invalid_request", f"{what} cannot be enforced: it spells the token {tag!r}", param=param)


def _check_names(names: Iterable[str], tool_format: ToolFormat) -> None:
    for name in names:
        if not tool_format.allows(name) or any(tag in name for tag in tool_format.tags):
            message = f"tools: this model's calls, in the format {tool_format.name}, cannot name {name[:100]!r}"
            raise ApiError("invalid_request", message, param="tools")


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **without_descriptions(function.get("parameters") or {})}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments that allows no keys beside those it names, if it names some and nothing else may add to them."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or any(word in schema for word in _ADDS_KEYS):
        return schema
    if isinstance(required, list) and not all(isinstance(key, str) and key in properties for key in required):
        return schema
    kept = {key: closed(value) if isinstance(value, dict) else value for key, value in properties.items()}
    return {**schema, "properties": kept, "additionalProperties": False}


def without_descriptions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without what it says to people."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if isinstance(value, dict):
            kept[key] = value if key in ("const", "default") else without_descriptions(value)
        elif isinstance(value, list) and key not in ("enum", "const", "default", "examples"):
            kept[key] = [without_descriptions(item) if isinstance(item, dict) else item for item in value]
        elif not (key in ("description", "title", "$comment") and isinstance(value, str)):
            kept[key] = value
    return kept

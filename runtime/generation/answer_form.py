"""The grammar that constrains a request's answers, and the processor that parses them.

Both depend on the model, and on whether the prompt ends inside its reasoning. Formats and grammars are used through their interfaces only.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import orjson
from msgspec.structs import replace

from pilotlight.dialects.requests import Conversation, ValidGeneration
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.text.formats import AnswerRules, CallableTool, Thinking, raw_parser
from pilotlight.engine.text.formats.format_registry import ToolFormat
from pilotlight.engine.text.formats.grammars import document
from pilotlight.runtime.generation.output_processor import OutputProcessor
from pilotlight.runtime.generation.tool_schemas import FREE, EnforcedSchema, enforced_schemas
from pilotlight.runtime.models.model_state import AwakeModel
from pilotlight.wire.errors import ApiError

CheckGrammar = Callable[[Constraint], Awaitable[str | None]]  # returns why it cannot be enforced, or None


class AnswerForm:
    """The form of one request's answers."""

    def __init__(self, model: AwakeModel, request: ValidGeneration, prompt: tuple[int, ...]) -> None:
        """`prompt` is the conversation as tokens."""
        self.left_out: tuple[str, ...] = ()  # fields of the tools' schemas that the constraint does not enforce
        self._model = model
        self._request = request
        self._conversation = request.prompt if isinstance(request.prompt, Conversation) else None
        self._thinking = Thinking.CLOSED
        if self._conversation is not None:
            last = self._conversation.messages[-1]["content"] if self._conversation.continues_last else None
            self._thinking = model.text.answers.thinking_after(prompt, last)

    def processor(self) -> OutputProcessor:
        """Return a processor that parses one answer's tokens. Raises ApiError."""
        text, conversation = self._model.text, self._conversation
        if conversation is None:
            parser = raw_parser(text.tokenizer)
        else:
            functions = [tool["function"] for tool in conversation.tools]
            schemas = {function["name"]: function.get("parameters") or {} for function in functions}
            if text.answers.tools is not None:
                _check_names(schemas, text.answers.tools)
            parser = text.answers.parser(self._thinking, schemas, self._unmarked(conversation))
        return OutputProcessor(
            parser,
            stop=self._request.sampling.stop,
            shows_stop=self._request.sampling.shows_stop,
            hidden_token_ids=frozenset(
                (*self._model.info.eos_token_ids, *self._request.sampling.stop_token_ids),
            ),
            one_call_only=conversation is not None and not conversation.parallel_tool_calls,
            whole_calls=self._request.wants_whole_calls,
        )

    def _unmarked(self, conversation: Conversation) -> frozenset[str]:
        """Return the tools that may be called without a call's markers, because no constraint is promised."""
        if self._request.constraint is not None or conversation.must_call:
            return frozenset()
        names = frozenset(tool["function"]["name"] for tool in conversation.tools)
        return (names if conversation.allowed_tools is None else conversation.allowed_tools) - conversation.strict_tools

    async def constraint(self, check: CheckGrammar) -> Constraint | None:
        """Return the answer's constraint, with its allowed or required tool calls and the reasoning before it.

        None if any answer is allowed. Raises ApiError, also if `check` does not accept the constraint."""
        conversation, answers, form = self._conversation, self._model.text.answers, self._request.constraint
        asked = None if form is None else Constraint(form.kind, form.text)
        if conversation is None:
            return await _passed(asked, check)
        is_demanded = conversation.must_call or conversation.strict_tools or conversation.allowed_tools is not None
        if asked is None and not is_demanded and not (conversation.tools and answers.marks_calls):
            return None
        if not conversation.tools and not answers.has_reasoning(self._thinking):
            return await _passed(asked, check)
        if conversation.tools and answers.tools is None:
            message = f"the chat template of {self._request.requested_model!r} writes no tool calls: leave tools out"
            raise ApiError("invalid_request", message, param="tools")
        if asked is not None and asked.kind != "lark":
            self._refuse_tags(asked.text, "what the answer must be")
        rules = AnswerRules(
            is_single=not conversation.parallel_tool_calls,
            document=None if asked is None or conversation.must_call else document(asked),
            may_be_text=not conversation.must_call and asked is None,
        )
        return await self._with_tools(conversation, rules, asked, check, is_optional=asked is None and not is_demanded)

    async def _with_tools(
        self,
        conversation: Conversation,
        rules: AnswerRules,
        asked: Constraint | None,
        check: CheckGrammar,
        *,
        is_optional: bool,
    ) -> Constraint:
        """Return the grammar of an answer that may contain calls.

        Each tool's schema is enforced as far as possible, and that of a strict tool completely. Raises ApiError."""
        callable_tools = [
            _CallableTool(number, tool["function"], is_strict=tool["function"]["name"] in conversation.strict_tools)
            for number, tool in enumerate(conversation.tools)
            if conversation.allowed_tools is None or tool["function"]["name"] in conversation.allowed_tools
        ]
        for tool in callable_tools:
            self._refuse_tags(tool.name, "the name of a tool", "tools")
        grammar, why = await self._grammar(rules, callable_tools, check)
        if grammar is None:
            await _passed(asked if rules.document is not None else None, check)
            for tool in callable_tools:
                await self._loosen(rules._replace(document=None), tool, check)
            grammar, why = await self._grammar(rules, callable_tools, check)
        if grammar is None:  # the grammars of all tools together are too large
            for tool in callable_tools:
                tool.free()
            grammar, why = await self._grammar(rules, callable_tools, check)
        if grammar is None:
            what = "the tools' schemas" if callable_tools else "what the answer must be"
            raise ApiError(
                "invalid_request", f"{what} cannot be enforced: {why}", param="tools" if callable_tools else None
            )
        self.left_out = tuple(tool.left_out for tool in callable_tools if tool.left_out)
        return replace(grammar, is_optional=is_optional)

    async def _loosen(self, rules: AnswerRules, tool: "_CallableTool", check: CheckGrammar) -> None:
        """Relax a tool's schema until it can be enforced.

        Raises ApiError if the tool is strict and its schema cannot be enforced.
        """
        while True:
            grammar, why = await self._grammar(rules, [tool], check)
            if grammar is not None:
                return
            tool.loosen(why)

    async def _grammar(
        self, rules: AnswerRules, tools: "list[_CallableTool]", check: CheckGrammar
    ) -> tuple[Constraint | None, str]:
        """Return the grammar of answers that may call these tools; None and the reason if it is unenforceable."""
        held = tuple(tool.held for tool in tools)
        if tag := self._model.text.tokenizer.spelled_tag(orjson.dumps([tool.schema for tool in held]).decode()):
            return None, f"it spells the token {tag!r}"  # text with this tag would be parsed as the special token
        try:
            grammar = Constraint("lark", self._model.text.answers.grammar(self._thinking, rules._replace(tools=held)))
        except ValueError as error:  # the model's call format cannot express the grammar
            return None, str(error)
        why = await check(grammar)
        return (grammar, "") if why is None else (None, why)

    def _refuse_tags(self, text: str, what: str, param: str | None = None) -> None:
        """Raise ApiError if the text spells a special token, because it would be parsed as the token."""
        if tag := self._model.text.tokenizer.spelled_tag(text):
            raise ApiError("invalid_request", f"{what} cannot be enforced: it spells the token {tag!r}", param=param)


class _CallableTool:
    """A tool that may be called, with the part of its schema that is enforced."""

    def __init__(self, number: int, function: dict[str, Any], *, is_strict: bool) -> None:
        """`number` is the tool's index in the request."""
        self.name: str = function["name"]
        self._number = number
        self._is_strict = is_strict
        self._further = enforced_schemas(function)
        self._enforced = next(self._further)

    @property
    def held(self) -> CallableTool:
        return CallableTool(self.name, self._enforced.schema, is_lenient=not self._is_strict)

    @property
    def left_out(self) -> str:
        """The path of the request's field that is not enforced; empty if every field is enforced."""
        return self._enforced.left_out and f"tools[{self._number}].{self._enforced.left_out}"

    def free(self) -> None:
        """Enforce no schema for the tool, unless it is strict."""
        if not self._is_strict:
            self._enforced = EnforcedSchema(FREE, "parameters")

    def loosen(self, why: str) -> None:
        """Use the next, less strict schema. Raises ApiError if the tool is strict or no schema is left."""
        following = next(self._further, None)
        if self._is_strict or following is None:
            culprit = f", for its {following.left_out}" if following is not None else ""
            message = f"the schema of the tool {self.name[:100]!r} cannot be enforced{culprit}: {why}"
            raise ApiError("invalid_request", message, param=f"tools[{self._number}]")
        self._enforced = following


async def _passed(constraint: Constraint | None, check: CheckGrammar) -> Constraint | None:
    """Return the constraint if it can be enforced; else raise ApiError."""
    if constraint is not None and (why := await check(constraint)) is not None:
        raise ApiError("invalid_request", why)
    return constraint


def _check_names(names: Iterable[str], tool_format: ToolFormat) -> None:
    for name in names:
        if not tool_format.allows(name) or any(tag in name for tag in tool_format.tags):
            message = f"tools: this model's call format, {tool_format.name}, cannot express the name {name[:100]!r}"
            raise ApiError("invalid_request", message, param="tools")

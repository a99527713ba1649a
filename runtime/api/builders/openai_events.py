"""OpenAI's objects and events: `chat.completion` and its chunks, and `text_completion`.

A completion starts with the prompt if the request asks to echo it."""

from typing import ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from pilotlight.dialects.custom_tools import InputReader, input_of
from pilotlight.dialects.openai_chat import ValidChat
from pilotlight.dialects.openai_completions import ValidCompletion
from pilotlight.engine.text.formats import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.runtime.api.builders.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined_logprobs,
    prompt_logprobs,
)
from pilotlight.runtime.generation.generator import Generation, Generator
from pilotlight.runtime.generation.output_processor import DeliveredToken, Delta
from pilotlight.wire.chat import (
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    Choice,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CustomCall,
    CustomDelta,
    FinishReason,
    FunctionCall,
    FunctionDelta,
    Message,
    MessageDelta,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from pilotlight.wire.sse import DONE, encode_event

encoder = msgspec.json.Encoder()


RequestT = TypeVar("RequestT", ValidChat, ValidCompletion)


class OpenAIBuilder(Generic[RequestT]):
    """Base of the builders of OpenAI's dialect: the id of the answer and its model's tokenizer."""

    num_events = 0
    prefix: ClassVar[str]  # prefix of the answer's id

    def __init__(self, request: RequestT, generator: Generator) -> None:
        self._request: RequestT = request
        self._identity = (
            f"{self.prefix}-{request.answer_name.nonce}", request.answer_name.created, request.requested_model,
        )  # fmt: skip
        self._started = {choice for choice, delivered in enumerate(request.delivery.choices) if delivered.has_started}
        self._models = generator.models.registry

    @property
    def tokenizer(self) -> Tokenizer:
        return self._models.tokenizer(self._request.model)

    def _usage_so_far(self, generation: Generation) -> Usage | UnsetType | None:
        """Return `usage` of a chunk before the last one: UNSET if not requested, None if only the last has it."""
        if not self._request.include_usage:
            return UNSET
        return generation.usage if self._request.usage_in_every_chunk else None

    def _prompt_logprobs(self, choice: int, generation: Generation) -> PromptLogprobs | UnsetType:
        num_logprobs = self._request.num_prompt_logprobs
        if num_logprobs is None:
            return UNSET
        prompt, logprobs = generation.prompt(choice), generation.prompt_logprobs(choice)
        return prompt_logprobs(prompt, logprobs, num_logprobs, self.tokenizer)

    def _token_ids(self, tokens: tuple[DeliveredToken, ...]) -> tuple[int, ...] | UnsetType:
        return tuple(token.token_id for token in tokens) if self._request.return_token_ids else UNSET


class ChatBuilder(OpenAIBuilder[ValidChat]):
    prefix = "chatcmpl"

    def __init__(self, request: ValidChat, generator: Generator) -> None:
        super().__init__(request, generator)
        self._inputs: dict[tuple[int, int], InputReader] = {}  # (choice, position of a custom tool call) -> reader
        self._resumed = set(self._started)  # choices that another site has started

    def events(self, delta: Delta, generation: Generation) -> bytes:
        """Return one event for each part of the delta and a separate one for the finish.
        A choice's first event has only the role. The last part's event has the delta's log-probabilities and token ids."""
        shown = tuple(token for token in delta.tokens if token.is_shown)
        events = b""
        if delta.choice in self._resumed:
            self._resumed.remove(delta.choice)
            for part in generation.shown_before(delta.choice):
                self._message_delta(part, delta.choice)
        if delta.choice not in self._started:
            self._started.add(delta.choice)
            events = self._event(generation, delta.choice, MessageDelta(role="assistant", content=""))
        for position, part in enumerate(delta.parts):
            is_last = position == len(delta.parts) - 1
            message = self._message_delta(part, delta.choice)
            events += self._event(generation, delta.choice, message, shown if is_last else ())
        if delta.finish_reason is not None:
            events += self._rest_of_inputs(delta.choice, generation)
            rest = delta.tokens if not delta.parts else delta.tokens[len(shown) :]
            events += self._event(generation, delta.choice, MessageDelta(), rest, delta.finish_reason)
        return events

    def ending(self, generation: Generation) -> bytes:
        usage = encode_event(self._chunk((), generation.usage)) if self._request.include_usage else b""
        return usage + encode_event(DONE)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        choices = tuple(map(self._choice, deltas))
        of_prompt = self._prompt_logprobs(0, generation)
        ids = generation.prompt() if self._request.return_token_ids else UNSET
        return encoder.encode(ChatCompletion(*self._identity, choices, generation.usage, of_prompt, ids))

    def _message_delta(self, part: Part, choice: int) -> MessageDelta:
        if isinstance(part, TextPart):
            return MessageDelta(content=part.text)
        if isinstance(part, ReasoningPart):
            return MessageDelta(reasoning_content=part.text, reasoning=part.text)
        if isinstance(part, CallPart) and part.name in self._request.custom_tools:
            self._inputs[choice, part.position] = InputReader()
            call_id = self._call_id(part, choice)
            made = ToolCallDelta(part.position, id=call_id, type="custom", custom=CustomDelta(part.name))
            return MessageDelta(tool_calls=(made,))
        if isinstance(part, CallPart):
            started = ToolCallDelta(part.position, FunctionDelta(part.name), self._call_id(part, choice), "function")
            return MessageDelta(tool_calls=(started,))
        assert isinstance(part, ArgumentsPart), "the end of a call is not sent to clients"
        if (reader := self._inputs.get((choice, part.position))) is not None:
            return _more_input(part.position, reader.push(part.text))
        return MessageDelta(tool_calls=(ToolCallDelta(part.position, FunctionDelta(arguments=part.text)),))

    def _rest_of_inputs(self, choice: int, generation: Generation) -> bytes:
        """Return the events of custom tool inputs that are only known at the end of an answer.
        These are inputs whose calls have an unexpected form."""
        events = b""
        for (of_choice, position), reader in self._inputs.items():
            if of_choice == choice and (rest := reader.finish()):
                events += self._event(generation, choice, _more_input(position, rest))
        return events

    def _tool_call(self, call: CallPart, arguments: str, choice: int) -> ToolCall:
        call_id = self._call_id(call, choice)
        if call.name in self._request.custom_tools:
            return ToolCall(call_id, type="custom", custom=CustomCall(call.name, input_of(arguments)))
        return ToolCall(call_id, FunctionCall(call.name, arguments))

    def _call_id(self, call: CallPart, choice: int) -> str:
        return call.id or f"call_{self._request.answer_name.item_id(choice, call.position)}"

    def _choice(self, delta: Delta) -> Choice:
        assert delta.finish_reason is not None
        calls = tuple(self._tool_call(call, arguments, delta.choice) for call, arguments in delta.calls)
        reasoning = delta.reasoning or UNSET
        message = Message(None if calls and not delta.text else delta.text, calls or UNSET, reasoning, reasoning)
        logprobs = self._logprobs(delta.tokens)
        return Choice(message, delta.finish_reason, logprobs, delta.choice, self._token_ids(delta.tokens))

    def _event(
        self,
        generation: Generation,
        choice: int,
        message: MessageDelta,
        tokens: tuple[DeliveredToken, ...] = (),
        finish_reason: FinishReason | None = None,
    ) -> bytes:
        logprobs = self._logprobs(tokens) if tokens else None
        ids = self._token_ids(tokens)
        prompt = generation.prompt() if self._request.return_token_ids and message.role is not UNSET else UNSET
        choices = (ChunkChoice(message, finish_reason, logprobs, choice, ids),)
        return encode_event(self._chunk(choices, self._usage_so_far(generation), prompt))

    def _chunk(
        self,
        choices: tuple[ChunkChoice, ...],
        usage: Usage | UnsetType | None,
        prompt: tuple[int, ...] | UnsetType = UNSET,
    ) -> bytes:
        return encoder.encode(ChatChunk(*self._identity, choices, usage, prompt))

    def _logprobs(self, tokens: tuple[DeliveredToken, ...]) -> ChatLogprobs | None:
        return None if self._request.sampling.num_logprobs is None else chat_logprobs(tokens, self.tokenizer)


def _more_input(position: int, text: str) -> MessageDelta:
    return MessageDelta(tool_calls=(ToolCallDelta(position, custom=CustomDelta(input=text)),))


class CompletionBuilder(OpenAIBuilder[ValidCompletion]):
    prefix = "cmpl"

    def __init__(self, request: ValidCompletion, generator: Generator) -> None:
        super().__init__(request, generator)
        self._echoed: dict[int, str] = {}  # number of a prompt -> its text, decoded at first use

    def events(self, delta: Delta, generation: Generation) -> bytes:
        is_first = delta.choice not in self._started
        self._started.add(delta.choice)
        choice = self._choice(delta, generation, is_first=is_first)
        return encode_event(self._completion((choice,), self._usage_so_far(generation)))

    def ending(self, generation: Generation) -> bytes:
        usage = encode_event(self._completion((), generation.usage)) if self._request.include_usage else b""
        return usage + encode_event(DONE)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        choices = tuple(self._choice(delta, generation, is_first=True) for delta in deltas)
        return self._completion(choices, generation.usage)

    def _completion(self, choices: tuple[CompletionChoice, ...], usage: Usage | UnsetType | None) -> bytes:
        return encoder.encode(Completion(*self._identity, choices, usage))

    def _choice(self, delta: Delta, generation: Generation, *, is_first: bool) -> CompletionChoice:
        request = self._request
        prompt_text = self._prompt_text(delta.choice, generation) if request.echo else ""
        text, logprobs = delta.text, self._logprobs(delta.tokens, len(prompt_text))
        if is_first and request.echo:
            text = prompt_text + text
            if logprobs is not None:
                logprobs = joined_logprobs(self._echoed_logprobs(delta.choice, generation), logprobs)
        of_prompt = self._prompt_logprobs(delta.choice, generation) if is_first else UNSET
        ids = self._token_ids(delta.tokens)
        prompt = generation.prompt(delta.choice) if is_first and request.return_token_ids else UNSET
        return CompletionChoice(text, delta.finish_reason, logprobs, delta.choice, of_prompt, ids, prompt)

    def _prompt_text(self, choice: int, generation: Generation) -> str:
        number = choice // self._request.n
        if number not in self._echoed:
            prompt = self._request.prompts[number]
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(generation.prompt(choice))
            self._echoed[number] = text
        return self._echoed[number]

    def _echoed_logprobs(self, choice: int, generation: Generation) -> CompletionLogprobs:
        prompt, logprobs = generation.prompt(choice), generation.prompt_logprobs(choice)
        return echoed_logprobs(prompt, logprobs, self._request.sampling.num_logprobs or 0, self.tokenizer)

    def _logprobs(self, tokens: tuple[DeliveredToken, ...], offset: int) -> CompletionLogprobs | None:
        if self._request.sampling.num_logprobs is None:
            return None
        return completion_logprobs(tokens, self.tokenizer, offset)

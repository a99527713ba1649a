"""OpenAI's objects and events: a chat's deltas as `chat.completion` and its chunks, a completion's as `text_completion`, with the prompt before them
when it is to be echoed."""

import msgspec
from msgspec import UNSET, UnsetType

from dialects.openai_chat import ValidChat
from dialects.openai_completions import ValidCompletion
from dialects.requests import ValidGeneration
from engine.formats import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from engine.tokenizer import Tokenizer
from runtime.generation import Generation, Generator
from runtime.output_processor import DeliveredToken, Delta
from runtime.responses.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined_logprobs,
    prompt_logprobs,
)
from wire.chat import (
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    Choice,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
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
from wire.sse import DONE, encode_event

encoder = msgspec.json.Encoder()


class OpenAIBuilder:
    """The common part of every object and chunk of one answer: its identity, its model's tokenizer."""

    num_events = 0

    def __init__(self, request: ValidGeneration, generator: Generator, prefix: str) -> None:
        self.id = f"{prefix}-{request.answer_name.nonce}"
        self.created = request.answer_name.created
        self.model = request.requested_model
        self._begun = {choice for choice, delivered in enumerate(request.delivery.choices) if delivered.has_begun}
        self._models = generator.models.registry
        self._name = request.model

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self._models.tokenizer(self._name)
        assert tokenizer is not None, "an answer has deltas only once its model has been loaded"
        return tokenizer


class ChatBuilder(OpenAIBuilder):
    def __init__(self, request: ValidChat, generator: Generator) -> None:
        super().__init__(request, generator, "chatcmpl")
        self._answer_name = request.answer_name
        self._include_usage = request.include_usage
        self._usage_in_every_chunk = request.usage_in_every_chunk
        self._return_token_ids = request.return_token_ids
        self._wants_logprobs = request.sampling.num_logprobs is not None
        self._num_prompt_logprobs = request.num_prompt_logprobs

    def events(self, delta: Delta, generation: Generation) -> bytes:
        """Return one event per part, the tokens with the last; the finish has an event of its own."""
        shown = tuple(token for token in delta.tokens if token.is_shown)
        events = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            events = self._event(generation, delta.choice, MessageDelta(role="assistant", content=""))
        for position, part in enumerate(delta.parts):
            is_last = position == len(delta.parts) - 1
            message = self._message_delta(part, delta.choice)
            events += self._event(generation, delta.choice, message, shown if is_last else ())
        if delta.finish_reason is not None:
            rest = delta.tokens if not delta.parts else delta.tokens[len(shown) :]
            events += self._event(generation, delta.choice, MessageDelta(), rest, delta.finish_reason)
        return events

    def ending(self, generation: Generation) -> bytes:
        events = b""
        if self._include_usage:
            events = encode_event(self._chunk((), generation.usage))
        return events + encode_event(DONE)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        choices = tuple(map(self._choice, deltas))
        of_prompt: PromptLogprobs | UnsetType = UNSET
        if self._num_prompt_logprobs is not None:
            of_prompt = prompt_logprobs(
                generation.prompt(), generation.prompt_logprobs(0), self._num_prompt_logprobs, self.tokenizer
            )
        ids = generation.prompt() if self._return_token_ids else UNSET
        return encoder.encode(
            ChatCompletion(self.id, self.created, self.model, choices, generation.usage, of_prompt, ids)
        )

    def _message_delta(self, part: Part, choice: int) -> MessageDelta:
        if isinstance(part, TextPart):
            return MessageDelta(content=part.text)
        if isinstance(part, ReasoningPart):
            return MessageDelta(reasoning_content=part.text, reasoning=part.text)
        if isinstance(part, CallPart):
            begun = ToolCallDelta(part.position, FunctionDelta(part.name), self._call_id(part, choice), "function")
            return MessageDelta(tool_calls=(begun,))
        assert isinstance(part, ArgumentsPart), "the end of a call is nobody's to see"
        return MessageDelta(tool_calls=(ToolCallDelta(part.position, FunctionDelta(arguments=part.text)),))

    def _call_id(self, call: CallPart, choice: int) -> str:
        return call.id or f"call_{self._answer_name.item_id(choice, call.position)}"

    def _choice(self, delta: Delta) -> Choice:
        assert delta.finish_reason is not None
        calls = tuple(
            ToolCall(self._call_id(call, delta.choice), FunctionCall(call.name, arguments))
            for call, arguments in delta.calls
        )
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
        prompt = generation.prompt() if self._return_token_ids and message.role is not UNSET else UNSET
        usage = generation.usage if self._usage_in_every_chunk else None
        return encode_event(self._chunk((ChunkChoice(message, finish_reason, logprobs, choice, ids),), usage, prompt))

    def _chunk(
        self, choices: tuple[ChunkChoice, ...], usage: Usage | None, prompt: tuple[int, ...] | UnsetType = UNSET
    ) -> bytes:
        told: Usage | UnsetType | None = usage if self._include_usage else UNSET
        return encoder.encode(ChatChunk(self.id, self.created, self.model, choices, told, prompt))

    def _token_ids(self, tokens: tuple[DeliveredToken, ...]) -> tuple[int, ...] | UnsetType:
        return tuple(token.token_id for token in tokens) if self._return_token_ids else UNSET

    def _logprobs(self, tokens: tuple[DeliveredToken, ...]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self.tokenizer) if self._wants_logprobs else None


class CompletionBuilder(OpenAIBuilder):
    def __init__(self, request: ValidCompletion, generator: Generator) -> None:
        super().__init__(request, generator, "cmpl")
        self._include_usage = request.include_usage
        self._usage_in_every_chunk = request.usage_in_every_chunk
        self._return_token_ids = request.return_token_ids
        self._num_logprobs = request.sampling.num_logprobs
        self._num_prompt_logprobs = request.num_prompt_logprobs
        self._prompts = request.prompts
        self._num_each = request.n
        self._echo = request.echo
        self._echoed: dict[int, str] = {}  # prompts' texts, by number, once they are known

    def events(self, delta: Delta, generation: Generation) -> bytes:
        is_first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        choice = self._choice(delta, generation, is_first=is_first)
        usage = generation.usage if self._usage_in_every_chunk else None
        return encode_event(self._completion((choice,), usage if self._include_usage else UNSET))

    def ending(self, generation: Generation) -> bytes:
        events = b""
        if self._include_usage:
            events = encode_event(self._completion((), generation.usage))
        return events + encode_event(DONE)

    def whole(self, deltas: list[Delta], generation: Generation) -> bytes:
        choices = tuple(self._choice(delta, generation, is_first=True) for delta in deltas)
        return self._completion(choices, generation.usage)

    def _completion(self, choices: tuple[CompletionChoice, ...], usage: Usage | UnsetType | None) -> bytes:
        return encoder.encode(Completion(self.id, self.created, self.model, choices, usage))

    def _choice(self, delta: Delta, generation: Generation, *, is_first: bool) -> CompletionChoice:
        prompt_text = self._prompt_text(delta.choice, generation) if self._echo else ""
        text, logprobs = delta.text, self._logprobs(delta.tokens, len(prompt_text))
        if is_first and self._echo:
            text = prompt_text + text
            if logprobs is not None:
                logprobs = joined_logprobs(self._echoed_logprobs(delta.choice, generation), logprobs)
        of_prompt = self._prompt_logprobs(delta.choice, generation) if is_first else UNSET
        ids: tuple[int, ...] | UnsetType = UNSET
        prompt: tuple[int, ...] | UnsetType = UNSET
        if self._return_token_ids:
            ids = tuple(token.token_id for token in delta.tokens)
            prompt = generation.prompt(delta.choice) if is_first else UNSET
        return CompletionChoice(text, delta.finish_reason, logprobs, delta.choice, of_prompt, ids, prompt)

    def _prompt_text(self, choice: int, generation: Generation) -> str:
        number = choice // self._num_each
        if number not in self._echoed:
            prompt = self._prompts[number]
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(generation.prompt(choice))
            self._echoed[number] = text
        return self._echoed[number]

    def _echoed_logprobs(self, choice: int, generation: Generation) -> CompletionLogprobs:
        prompt, logprobs = generation.prompt(choice), generation.prompt_logprobs(choice)
        return echoed_logprobs(prompt, logprobs, self._num_logprobs or 0, self.tokenizer)

    def _prompt_logprobs(self, choice: int, generation: Generation) -> PromptLogprobs | UnsetType:
        if self._num_prompt_logprobs is None:
            return UNSET
        prompt, logprobs = generation.prompt(choice), generation.prompt_logprobs(choice)
        return prompt_logprobs(prompt, logprobs, self._num_prompt_logprobs, self.tokenizer)

    def _logprobs(self, tokens: tuple[DeliveredToken, ...], offset: int) -> CompletionLogprobs | None:
        return None if self._num_logprobs is None else completion_logprobs(tokens, self.tokenizer, offset)

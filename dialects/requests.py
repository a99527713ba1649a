"""Parsed requests, independent of the dialect. Later stages do not validate them again."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from pilotlight.dialects.body.images import ImagePart
from pilotlight.wire.hop.continuation import NOTHING_DELIVERED, AnswerName, Delivered, Delivery

# Bodies up to this size are parsed on the event loop, in milliseconds; longer ones are parsed in a thread.
INLINE_BYTES = 16 << 10


class AnswerConstraint(Struct, frozen=True):
    """A constraint on the answer's form.

    The answer must be a document of a JSON Schema, a text that matches a regular expression, one of the strings of a JSON array, or a sentence of a
    grammar in Lark's notation. The engine checks whether it can enforce it."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str


class Conversation(Struct, frozen=True):
    """Messages and tools as chat templates expect them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool = True
    variables: dict[str, Any] = {}  # additional variables for the template
    adds_generation_prompt: bool = True  # append the start of the assistant's turn
    continues_last: bool = False  # the answer continues the last message, whose turn the prompt leaves open
    drops_oldest: bool = False  # drop the oldest messages if the prompt is too long
    must_call: bool = False  # the answer must contain a tool call
    allowed_tools: frozenset[str] | None = None  # tools that may be called; None allows all
    # tools whose arguments must follow their schemas, even in calls that are not forced
    strict_tools: frozenset[str] = frozenset()
    images: tuple[ImagePart, ...] = ()  # in the order of their placeholders in `messages`


class Sampling(Struct, frozen=True):
    """Sampling parameters. None means the model's default."""

    max_tokens: int | None = None
    usual_max_tokens: int | None = None  # used if neither the request nor the model sets a limit; None for no limit
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None  # None derives the seed from the answer's name
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    shows_stop: bool = False  # the answer includes the stop string that ends it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # alternatives per token of the answer; None for no log-probabilities


class Insertion(Struct, frozen=True):
    """A text with a gap that the answer fills."""

    before: str
    after: str


Prompt = Conversation | Insertion | str | tuple[int, ...]


class ValidGeneration(Struct, frozen=True):
    """A request of any generating endpoint.

    `model` is the site's name of the model, `requested_model` the name that the client sent, `n` the number of answers to each prompt."""

    model: str
    requested_model: str
    prompt: Prompt
    sampling: Sampling
    stream: bool
    n: int = 1
    constraint: AnswerConstraint | None = None
    ignored: tuple[str, ...] = ()  # unknown fields of the body
    num_bytes: int = 0  # size of the body
    num_prompt_logprobs: int | None = None  # alternatives per prompt token; None for no log-probabilities
    # The router that forwards the request chooses the name, so that another site can continue the same answer.
    answer_name: AnswerName = msgspec.field(default_factory=AnswerName.fresh)
    delivery: Delivery = NOTHING_DELIVERED  # the part of the answer that other sites have delivered already
    # Beginnings of the prompt, from the router: (digest, number of tokens), the longest first.
    prefixes: tuple[tuple[int, int], ...] = ()
    waited_s: float = 0.0  # time that it has waited at other sites

    cache_salt: str = ""  # the prompt shares cached blocks only with requests of the same tenant and salt
    # Cut a longer prompt to this many last tokens; -1: to as many as leave room for the answer.
    most_prompt_tokens: int | None = None
    lora: str | None = None  # the adapter, if the request names it separately from the model

    @property
    def asked_model(self) -> str:
        """Return the requested model, including its adapter."""
        return f"{self.requested_model}:{self.lora}" if self.lora else self.requested_model

    @property
    def prompt_field(self) -> str:
        """Return the name of the request's field with the prompt."""
        return "messages" if isinstance(self.prompt, Conversation) else "prompt"

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt,)

    @property
    def num_choices(self) -> int:
        """Return the number of answers: `n` for each prompt."""
        return self.n * len(self.prompts)

    def delivered(self, choice: int) -> Delivered:
        return self.delivery.choices[choice] if choice < len(self.delivery.choices) else Delivered()

    @property
    def num_prompt_alternatives(self) -> int | None:
        """Return the number of alternatives per prompt token; None if no log-probabilities are requested."""
        return self.num_prompt_logprobs

    @property
    def wants_prompt_only(self) -> bool:
        return False

    @property
    def wants_whole_calls(self) -> bool:
        """Tell whether a tool call is sent only when it is complete."""
        return False


EmbeddingInput = str | tuple[int, ...]


class ValidEmbedding(Struct, frozen=True):
    model: str
    requested_model: str
    inputs: tuple[EmbeddingInput, ...]
    dimensions: int | None = None  # None keeps all dimensions
    as_base64: bool = False
    pooling: Literal["mean", "cls"] | None = None  # None uses the model's own pooling
    field: str = "input"  # name of the request's field with the texts
    ignored: tuple[str, ...] = ()
    # name of the checkpoint's prompt to put before every text; None uses the default one
    prompt_name: str | None = None

    def where(self, position: int) -> str:
        """Return the name of the text at a position, for error messages."""
        return self.field if len(self.inputs) == 1 else f"{self.field}[{position}]"


class ScoredText(Struct, frozen=True):
    """A text to classify, or a pair of texts to score together."""

    first: str
    second: str | None = None  # None for a single text
    where: str = "input"  # name of the text in error messages; of a pair, the name of the second text


class ValidScoring(Struct, frozen=True):
    """A request for scores: of documents by a query, of pairs, or of the classes of texts."""

    model: str
    requested_model: str
    texts: tuple[ScoredText, ...]
    kind: Literal["rerank", "score", "classify"]
    top_n: int | None = None  # number of documents to return, best first; None returns all
    returns_texts: bool = False  # include the documents in the answer
    is_raw: bool = False  # return logits instead of probabilities
    truncates: bool = False  # cut a text that is too long for the model at its end; of a pair, the second text
    most_second_tokens: int | None = None  # a pair's second text is cut to this many tokens
    instruction: str | None = None  # for models whose template accepts one; None uses the template's own
    is_bare: bool = False  # return text-embeddings-inference's form: a bare list
    ignored: tuple[str, ...] = ()
    pooling: None = None  # pooling is the model's own


TextRequest = ValidEmbedding | ValidScoring  # requests that compute a result from texts without generating

"""What a request asks for, whatever its dialect: the values that come out of parsing, which nothing behind it checks again."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from pilotlight.dialects.body.images import ImagePart
from pilotlight.wire.hop.continuation import NOTHING_DELIVERED, AnswerName, Delivered, Delivery
from pilotlight.wire.hop.data_sites import NO_OTHERS, DataSites

# Of a body: what is in it is worked on at once, in milliseconds at worst, and what is in a longer one in a thread.
INLINE_BYTES = 16 << 10


class AnswerConstraint(Struct, frozen=True):
    """The form of an answer: a document by a JSON schema, a text by a regular expression, one of a JSON array's strings, or a sentence of a
    grammar in Lark's notation. Whether it can be enforced is the engine's to say."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str


class Conversation(Struct, frozen=True):
    """Messages and tools as chat templates expect them."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool = True
    variables: dict[str, Any] = {}  # further ones that the template may read
    adds_generation_prompt: bool = True  # what begins the assistant's turn
    continues_last: bool = False  # the answer goes on with the last message, which its prompt leaves open
    drops_oldest: bool = False  # messages, where all of them are too long
    must_call: bool = False  # some tool
    allowed_tools: frozenset[str] | None = None  # that may be called; None: all
    strict_tools: frozenset[str] = frozenset()  # whose arguments follow their schemas, whoever decides to call
    images: tuple[ImagePart, ...] = ()  # in the order of the parts that stand for them in `messages`


class Sampling(Struct, frozen=True):
    """Sampling parameters; None: as the model's own defaults say."""

    max_tokens: int | None = None
    usual_max_tokens: int | None = None  # where neither the request nor the model's configuration says; None: all
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None  # None: as the answer's name says
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    shows_stop: bool = False  # the stop string that ends the answer is part of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # of each token of the answer; None: none


Prompt = Conversation | str | tuple[int, ...]


class ValidGeneration(Struct, frozen=True):
    """A request of any generating endpoint. `model` is the site's own name, `requested_model` what the client called it, `n` how many
    answers it wants to each of its prompts."""

    model: str
    requested_model: str
    prompt: Prompt
    sampling: Sampling
    stream: bool
    n: int = 1
    constraint: AnswerConstraint | None = None
    ignored: tuple[str, ...] = ()  # fields of its body that mean nothing here
    num_bytes: int = 0  # of its body
    num_prompt_logprobs: int | None = None  # alternatives in the table of the prompt's tokens; None: no table
    # Of a request that a router sent, that router's choice: so another site can go on with the same answer.
    answer_name: AnswerName = msgspec.field(default_factory=AnswerName.fresh)
    delivery: Delivery = NOTHING_DELIVERED  # what the client has of the answer already, from another site
    prefixes: tuple[
        tuple[int, int], ...
    ] = ()  # digests by which the router knows the prompt's beginnings, longest first

    data_sites: DataSites = NO_OTHERS  # that may see it beside this one, as a router says
    cache_salt: str = ""  # its prompt shares what is cached with those of the same tenant and salt alone
    most_prompt_tokens: int | None = (
        None  # the last ones of a longer prompt are read; -1: as many as leave room for the answer
    )
    lora: str | None = None  # the adapter, where the request names it beside the model

    @property
    def asked_model(self) -> str:
        """The model as the client asks for it, its adapter included."""
        return f"{self.requested_model}:{self.lora}" if self.lora else self.requested_model

    @property
    def prompt_field(self) -> str:
        """The request's name for its prompt."""
        return "messages" if isinstance(self.prompt, Conversation) else "prompt"

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt,)

    @property
    def num_choices(self) -> int:
        """The number of answers: `n` to each prompt in turn."""
        return self.n * len(self.prompts)

    def delivered(self, choice: int) -> Delivered:
        return self.delivery.choices[choice] if choice < len(self.delivery.choices) else Delivered()

    @property
    def num_prompt_alternatives(self) -> int | None:
        """The number of alternatives that the engine reports of each prompt token; None: no table."""
        return self.num_prompt_logprobs

    @property
    def wants_prompt_only(self) -> bool:
        return False

    @property
    def wants_whole_calls(self) -> bool:
        """A tool call is shown at its end, all of it."""
        return False


EmbeddingInput = str | tuple[int, ...]


class ValidEmbedding(Struct, frozen=True):
    model: str
    requested_model: str
    inputs: tuple[EmbeddingInput, ...]
    dimensions: int | None = None  # None: all
    as_base64: bool = False
    pooling: Literal["mean", "cls"] | None = None  # None: as the model was made for
    field: str = "input"  # the request's name for its texts
    ignored: tuple[str, ...] = ()
    prompt_name: str | None = None  # of the checkpoint's prompts, which stands before every text; None: its default one

    def where(self, position: int) -> str:
        """Return a client's name for one of its texts."""
        return self.field if len(self.inputs) == 1 else f"{self.field}[{position}]"


class ScoredText(Struct, frozen=True):
    """A text whose classes are scored, or a pair of texts that are scored together."""

    first: str
    second: str | None = None  # None: it is one text
    where: str = "input"  # a client's name for it, or for the second one of a pair


class ValidScoring(Struct, frozen=True):
    """A request for scores: of documents by a query, of pairs, or of the classes of texts."""

    model: str
    requested_model: str
    texts: tuple[ScoredText, ...]
    kind: Literal["rerank", "score", "classify"]
    top_n: int | None = None  # documents in the answer, the best first; None: all
    returns_texts: bool = False  # documents are part of the answer
    is_raw: bool = False  # logits in place of scores
    truncates: bool = False  # a text that is too long for the model is cut at its end; of a pair the second one
    most_second_tokens: int | None = None  # of a pair's second text, which is cut there
    instruction: str | None = None  # for a model whose template has a place for one; None: its own
    is_bare: bool = False  # the answer is text-embeddings-inference's: a list, without anything round it
    ignored: tuple[str, ...] = ()
    pooling: None = None  # as the model was made for


TextRequest = ValidEmbedding | ValidScoring  # whose texts are computed and not continued

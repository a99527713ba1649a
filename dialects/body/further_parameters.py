"""Parameters that bodies.py does not declare: harmless ones are ignored, unsupported ones are refused.

Any other unknown field is ignored, and a header of the answer names it."""

from typing import Any, NamedTuple


class UnsupportedParameter(NamedTuple):
    """A parameter of other APIs that is refused, except for its `neutral` values, which have no effect."""

    neutral: tuple[Any, ...]
    instead: str


_CONSTRAIN = "constrain the answer with structured_outputs"
_LARK = "grammars are written in Lark's notation here: send one as structured_outputs.grammar"

UNSUPPORTED: dict[str, UnsupportedParameter] = {
    "n": UnsupportedParameter((1,), "one answer per request is supported here; send several requests"),
    "best_of": UnsupportedParameter((1,), "answers are not ranked; ask for as many as n, and choose among them"),
    "echo": UnsupportedParameter((False,), "only the continuation is returned; /ai/v1/completions echoes"),
    "suffix": UnsupportedParameter(("",), "inserting before a suffix is not supported"),
    "modalities": UnsupportedParameter((["text"],), 'only ["text"] is supported'),
    "audio": UnsupportedParameter((), "audio is not supported"),
    "image": UnsupportedParameter((), "images are not supported"),
    "functions": UnsupportedParameter(([],), "use tools"),
    "function_call": UnsupportedParameter(("none",), "use tools and tool_choice"),
    "skip_special_tokens": UnsupportedParameter((True,), "special tokens are never part of an answer's text"),
    "web_search_options": UnsupportedParameter((), "web search is not supported"),
    "lora": UnsupportedParameter(("",), "ask for an adapter as part of the model's name: BASE:ADAPTER"),
    "requests": UnsupportedParameter((), "batches are not supported yet; send one request per prompt"),
    "prompt_logprobs": UnsupportedParameter((), "logprobs are not part of this answer; see /ai/v1/chat/completions"),
    # Parameters of Responses, which the response store removes before parsing.
    "previous_response_id": UnsupportedParameter((), "responses are not stored here; send the whole conversation"),
    "background": UnsupportedParameter((False,), "responses are not stored here; wait for the answer"),
    "conversation": UnsupportedParameter((), "send the conversation's items, or previous_response_id"),
    "mcp_servers": UnsupportedParameter(([],), "connect to MCP servers in your client, and declare their tools"),
    "moderation": UnsupportedParameter((), "nothing is moderated here"),
    # SGLang's and llama.cpp's names for structured_outputs. Chats and completions declare `regex` and `json_schema`; other endpoints refuse them.
    "regex": UnsupportedParameter(("",), _CONSTRAIN),
    "ebnf": UnsupportedParameter(("",), _LARK),
    "grammar": UnsupportedParameter(("",), _LARK),
    "json_schema": UnsupportedParameter(("", {}), _CONSTRAIN),
    # Parameters of vLLM that would change the answer, so they cannot be ignored.
    "use_beam_search": UnsupportedParameter((False,), "answers are sampled, or greedy with temperature 0"),
    "bad_words": UnsupportedParameter(
        ([],), "a word of several tokens cannot be forbidden; forbid single tokens by logit_bias"
    ),
    "allowed_token_ids": UnsupportedParameter(
        ([],),
        "a list of allowed tokens is not supported; constrain the answer with structured_outputs, such as a choice",
    ),
    # Accepted by chats and completions; the other endpoints refuse them.
    "include_stop_str_in_output": UnsupportedParameter((False,), "a stop string is never part of an answer"),
    # -1 means "truncate texts that are too long"; here such a text is refused
    "truncate_prompt_tokens": UnsupportedParameter((-1,), "a prompt that is too long is refused, never cut"),
    "documents": UnsupportedParameter(([],), "put them into the messages"),
    "chat_template": UnsupportedParameter(("",), "the model's own template is used"),
    "prompt_embeds": UnsupportedParameter((), "a prompt is text or token ids"),
    "return_tokens_as_token_ids": UnsupportedParameter((False,), "ask for return_token_ids"),
    "cache_salt": UnsupportedParameter(
        ("",), "a prompt shares its cache only with prompts of the same key and account"
    ),
}

# Bookkeeping of other services, which can be ignored.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "spaces_between_special_tokens",
    "prediction",  # makes OpenAI faster and does not change the answer
})  # fmt: skip

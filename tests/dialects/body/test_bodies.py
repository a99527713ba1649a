"""A table of request bodies for every endpoint, each with its outcome: "ok", or the status, the error code and the parameter in the error.

A change is appended as text to the smallest valid body of the endpoint: of two equal keys the last one counts.
"""

from typing import Any

import orjson
import pytest

from pilotlight.dialects.anthropic import parse_messages
from pilotlight.dialects.body.bodies import read_tool_choice
from pilotlight.dialects.embeddings_api import parse_embedding
from pilotlight.dialects.openai_chat import parse_chat
from pilotlight.dialects.openai_completions import parse_completion
from pilotlight.dialects.openai_responses import parse_response
from pilotlight.dialects.workers_ai_api import parse_run, parse_run_embedding
from pilotlight.wire.errors import ApiError, Dialect

ONES = ", ".join(["1"] * 64)
TEXTS = ", ".join(['"a"'] * 2048)
DEEP = ('{"a": ' * 900, "}" * 900)


def over(base: str, change: str) -> bytes:
    return ("{" + ", ".join(inner for text in (base, change) if (inner := text[1:-1])) + "}").encode()


def known(name: str) -> str | None:
    return "tiny" if name == "tiny" else None


def outcome(endpoint: str, raw: bytes, *, strict: bool = True) -> str:
    try:
        parse(endpoint, raw, strict=strict)
    except ApiError as error:
        return f"{error.status(Dialect.OPENAI)} {error.word} {error.param}"
    return "ok"


def parse(endpoint: str, raw: bytes, *, strict: bool = True) -> Any:
    match endpoint:
        case "chat":
            return parse_chat(raw, known, strict=strict)
        case "completion":
            return parse_completion(raw, known, strict=strict)
        case "embedding":
            return parse_embedding(raw, known, strict=strict)
        case "run":
            return parse_run(raw, known, "tiny", strict=strict)
        case "run_embedding":
            return parse_run_embedding(raw, known, "tiny", strict=strict)
        case "messages":
            return parse_messages(raw, known, strict=strict)
        case "responses":
            return parse_response(raw, known, strict=strict)
    raise ValueError(endpoint)


BASES = {
    "chat": '{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}',
    "completion": '{"model": "tiny", "prompt": "Hi"}',
    "run": "{}",
    "embedding": '{"model": "tiny", "input": "Hi"}',
    "run_embedding": "{}",
    "messages": '{"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}',
    "responses": '{"model": "tiny", "input": "Hi"}',
}


RAW: list[tuple[str, list[bytes]]] = [
    ("400 malformed_json None", [
        b'{', b'', b"[" * 100_000, b'{"a":' * 2000, b'\xef\xbb\xbf{}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}],}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} x', b"{'model': 'tiny'}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 01}', b'\x1f\x8b',
    ]),
    ("400 invalid_request None", [b'[1, 2]', b'"text"', b'null', b'3']),
    ("ok", [
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\u0000b"}]}',
        b'{"model": "nope", "model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 9, "temperature": 1}',
    ]),
]  # fmt: skip

CHATS: list[tuple[str, list[str]]] = [
    ("ok", [
        '{}', '{"messages": [{"role": "developer", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": ""}]}', '{"messages": [{"role": "user", "content": []}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}',
        '{"messages": [{"role": "user", "content": "Hi", "name": "bob"}]}',
        '{"messages": [{"role": "user", "content": "Hi", "audio": null}]}',
        '{"messages": [{"role": "user", "content": "Hi", "annotations": []}]}',
        '{"messages": [{"role": "user", "content": "Hi", "tool_calls": []}]}',
        '{"messages": [{"role": "user", "content": "Hi", "tool_calls": null}]}',
        '{"messages": [{"role": "assistant", "content": null, "refusal": "I cannot"}]}',
        '{"messages": [{"role": "assistant", "content": "a", "foreign": 1, "parsed": null}]}',
        '{"messages": [{"role": "assistant", "content": "", "tool_calls": null}]}',
        '{"messages": [{"role": "assistant"}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "' + "[" * 5000 + '"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}, "index": 0}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}, "foreign": 2}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"id": null, "function": {"name": "f", "arguments": "{}"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"index": 18446744073709551615, "function": {"name": "f", "arguments": "{}"}}]}]}',
        '{"temperature": 5}', '{"temperature": 0}', '{"temperature": -0.0}', '{"temperature": null}', '{"top_p": 1}',
        '{"top_p": 1e-9}', '{"min_p": 0}', '{"top_k": -1}', '{"top_k": 18446744073709551615}',
        '{"max_tokens": 9223372036854775808}', '{"max_completion_tokens": 3, "max_tokens": 5}', '{"stream": true}',
        '{"stop": "x"}', '{"stop": []}', '{"stop": ""}', '{"stop": ["a", ""]}', '{"top_p": 0}',
        '{"top_p": 0.0}', '{"stop": ["a", "b", "c", "d"]}', '{"stop_token_ids": []}',
        '{"stop_token_ids": [0, 5]}', '{"stop_token_ids": [' + ONES + ']}',
        '{"stop_token_ids": [18446744073709551615]}', '{"seed": 0}', '{"seed": -1}', '{"seed": -9223372036854775808}',
        '{"seed": 9223372036854775807}', '{"presence_penalty": 2}', '{"repetition_penalty": 0}',
        '{"repetition_penalty": 0.0}', '{"repetition_penalty": -0.0}', '{"repetition_penalty": 0.01}',
        '{"repetition_penalty": 100}', '{"logit_bias": {}}', '{"logit_bias": {"5": 100, "6": -100.0}}',
        '{"logit_bias": {"0123": 1}}', '{"ignore_eos": true}', '{"n": 1}', '{"n": 1.0, "max_tokens": 5.0, "top_k": 2.0, "seed": 3.0}',
        '{"n": 16}', '{"n": null}', '{"max_tokens": -1}', '{"max_tokens": -1.0, "max_completion_tokens": -1}',
        '{"logprobs": true}', '{"logprobs": true, "top_logprobs": 20}', '{"prompt_logprobs": 20}',
        '{"stream": true, "stream_options": {"include_usage": true, "include_obfuscation": false}}',
        '{"stream": true, "stream_options": {}}', '{"stream_options": null}', '{"tools": []}',
        '{"tools": [{"type": "function", "function": {"name": "f"}}]}',
        '{"tools": [{"type": "function", "function": {"name": "' + "f" * 128 + '"}}]}',
        '{"tools": [{"type": "function", "function": {"name": "' + "😀" * 128 + '"}}]}',
        '{"tools": [{"type": "function", "function": {"name": "f", "strict": false}}]}',
        '{"tools": [{"type": "function", "function": {"name": "f", "strict": null}}]}',
        '{"tools": [{"type": "function", "function": {"name": "f", "strict": true}}]}',
        '{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}',
        '{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "f"}}}',
        '{"response_format": {"type": "json_object"}}', '{"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}}',
        '{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {}}}}',
        '{"structured_outputs": {"regex": "a"}}', '{"structured_outputs": {"json_object": true, "json": null}}',
        '{"guided_json": "{}"}', '{"guided_json": {}}', '{"guided_choice": ["a"]}', '{"guided_grammar": "start: a"}',
        '{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": null}, "description": null}}]}',
        '{"tool_choice": "auto"}', '{"tool_choice": "none"}', '{"parallel_tool_calls": false}', '{"echo": false}',
        '{"best_of": 1}', '{"best_of": 1.0}', '{"response_format": {"type": "text"}}', '{"audio": null}',
        '{"modalities": ["text"]}', '{"functions": []}', '{"function_call": "none"}', '{"verbosity": "low"}',
        '{"suffix": ""}',
        '{"user": 3, "metadata": [], "store": "x", "service_tier": {}, "prompt_cache_key": 1, "prompt_cache_retention": 1, "safety_identifier": 1}',
    ]),
    ("404 model_not_found model", [
        '{"model": "nope"}', '{"model": ""}', '{"model": "nope", "stream_options": {}}',
        '{"model": "nope", "messages": [{"role": "user"}]}',
    ]),
    ("400 invalid_request model", ['{"model": 3}', '{"model": null}', '{"model": ["tiny"]}']),
    ("400 invalid_request messages", [
        '{"messages": null}', '{"messages": []}', '{"messages": "Hi"}', '{"messages": {}}',
        '{"messages": [], "n": 0}',
    ]),
    ("400 invalid_request messages[0]", ['{"messages": [null]}', '{"messages": ["Hi"]}', '{"messages": [[]]}']),
    ("400 invalid_request messages[0].role", [
        '{"messages": [{}]}', '{"messages": [{"role": "wizard", "content": "Hi"}]}',
        '{"messages": [{"role": 3, "content": "Hi"}]}', '{"messages": [{"role": ["user"], "content": "Hi"}]}',
        '{"messages": [{"role": null, "content": "Hi"}]}', '{"messages": [{"content": "Hi"}]}',
        '{"messages": [{"role": "user", "content": [3], "role": "wizard"}]}',
        '{"messages": [{"content": [3], "role": "wizard"}]}',
    ]),
    ("400 invalid_request messages[0].content", [
        '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "system"}]}',
        '{"messages": [{"role": "tool"}]}',
        '{"messages": [{"role": "user", "content": 3}]}', '{"messages": [{"role": "user", "content": true}]}',
        '{"messages": [{"role": "user", "content": null}]}', '{"messages": [{"role": "user", "content": {}}]}',
        '{"messages": [{"role": "user", "content": [3]}]}', '{"messages": [{"role": "user", "content": ["Hi"]}]}',
        '{"messages": [{"role": "user", "content": [null]}]}', '{"messages": [{"role": "user", "content": [{}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": 3}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": "refusal", "text": "no"}]}]}',
        '{"messages": [{"role": "assistant", "content": 3, "foreign": 1}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    ]),
    ("400 unsupported_parameter messages[0].content", [
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]}',
        '{"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}',
    ]),
    ("400 unknown_parameter messages[0].contnt", ['{"messages": [{"role": "user", "content": "Hi", "contnt": "Hi"}]}']),
    ("400 invalid_request messages[0].name", [
        '{"messages": [{"role": "user", "content": "Hi", "name": 3}]}',
        '{"messages": [{"role": "user", "content": "Hi", "contnt": 1, "name": 3}]}',
    ]),
    ("400 invalid_request messages[0].tool_call_id", ['{"messages": [{"role": "user", "content": "Hi", "tool_call_id": 3}]}']),
    ("400 unknown_parameter messages[0].strict", ['{"messages": [{"role": "user", "content": "Hi", "strict": true}]}']),
    ("400 invalid_request messages[0].audio", [
        '{"messages": [{"role": "user", "content": "Hi", "audio": {}}]}',
        '{"messages": [{"role": "assistant", "content": "a", "foreign": 1, "audio": {"id": "x"}}]}',
    ]),
    ("400 invalid_request messages[0].function_call", ['{"messages": [{"role": "user", "content": "Hi", "function_call": {}}]}']),
    ("400 invalid_request messages[0].annotations", ['{"messages": [{"role": "user", "content": "Hi", "annotations": {}}]}']),
    ("400 invalid_request messages[0].refusal", ['{"messages": [{"role": "user", "content": "Hi", "refusal": 1}]}']),
    ("400 invalid_request messages[0].reasoning_content", ['{"messages": [{"role": "user", "content": "Hi", "reasoning_content": []}]}']),
    ("400 invalid_request messages[0].tool_calls", [
        '{"messages": [{"role": "user", "content": "Hi", "tool_calls": {}}]}',
        '{"messages": [{"role": "user", "content": "Hi", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}',
    ]),
    ("400 unknown_parameter messages[0].tool_calls[0].foreign", [
        '{"messages": [{"role": "user", "content": "Hi", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "foreign": 1}]}]}',
    ]),
    ("400 invalid_request messages[1].content", [
        '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [3]}, {"role": "wizard", "content": "a"}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0].function.arguments", [
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0].function.arguments", [
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": null}}]}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0].function.name", [
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3, "arguments": "{}"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0].function", [
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": null}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0]", [
        '{"messages": [{"role": "assistant", "tool_calls": [3]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [null]}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0].type", [
        '{"messages": [{"role": "assistant", "tool_calls": [{"type": "code", "function": {"name": "f", "arguments": "{}"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"type": null, "function": {"name": "f", "arguments": "{}"}}]}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0].id", [
        '{"messages": [{"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f", "arguments": "{}"}}]}]}',
    ]),
    ("400 invalid_request messages[0].tool_calls[0].index", [
        '{"messages": [{"role": "assistant", "tool_calls": [{"index": true, "function": {"name": "f", "arguments": "{}"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"index": 1.0, "function": {"name": "f", "arguments": "{}"}}]}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"index": -18446744073709551615, "function": {"name": "f", "arguments": "{}"}}]}]}',
    ]),
    ("400 unknown_parameter temprature", ['{"temprature": 0.5}']),
    ("400 invalid_request temperature", [
        '{"temperature": "0.5"}', '{"temperature": -1}', '{"temperature": -1e-300}', '{"temperature": 5.0000001}',
        '{"temperature": true}', '{"temperature": 18446744073709551616}', '{"temperature": 9223372036854775808}',
        '{"temperature": []}', '{"n": 0, "temperature": 9, "model": 3}',
        '{"messages": [{"role": "user", "content": [3]}], "temperature": 9, "tool_choice": 3}',
    ]),
    ("400 malformed_json None", ['{"temperature": 1e999}', '{"temperature": NaN}', '{"temperature": Infinity}']),
    ("400 invalid_request top_p", ['{"top_p": -0.1}', '{"top_p": 1.1}', '{"top_p": "0"}']),
    ("400 invalid_request min_p", ['{"min_p": 1.5}']),
    ("400 invalid_request top_k", ['{"top_k": -2}', '{"top_k": 2.5}', '{"top_k": 18446744073709551616}', '{"top_k": false}']),
    ("400 invalid_request max_tokens", [
        '{"max_tokens": 0}', '{"max_tokens": -5}', '{"max_tokens": 1.5}', '{"max_tokens": 0.0}', '{"max_tokens": 1e300}',
        '{"max_tokens": true}', '{"max_tokens": "5"}', '{"max_tokens": 99999999999999999999}',
        '{"seed": "1", "max_tokens": 0}',
    ]),
    ("400 invalid_request max_completion_tokens", ['{"max_completion_tokens": 0}']),
    ("400 invalid_request stream", ['{"stream": "yes"}', '{"stream": 1}']),
    ("400 invalid_request stop", ['{"stop": ["a", 3]}', '{"stop": {}}', '{"stop": 3}', '{"stop": false}']),
    ("400 invalid_request stop_token_ids[0]", [
        '{"stop_token_ids": [-1]}', '{"stop_token_ids": [true]}', '{"stop_token_ids": [1.0]}',
        '{"stop_token_ids": ["1"]}',
    ]),
    ("400 invalid_request stop_token_ids", ['{"stop_token_ids": 3}', '{"stop_token_ids": [' + ONES + ', 1]}']),
    ("400 invalid_request stop_token_ids[2]", ['{"stop_token_ids": [0, 1, null]}']),
    ("400 invalid_request seed", [
        '{"seed": 9223372036854775808}', '{"seed": 18446744073709551615}', '{"seed": 1180591620717411303424}',
        '{"seed": -9223372036854775809}', '{"seed": 1.5}', '{"seed": "1"}',
    ]),
    ("400 invalid_request presence_penalty", ['{"presence_penalty": -3}']),
    ("400 invalid_request frequency_penalty", ['{"frequency_penalty": 2.5}', '{"frequency_penalty": "1"}']),
    ("400 invalid_request repetition_penalty", [
        '{"repetition_penalty": false}', '{"repetition_penalty": 0.001}', '{"repetition_penalty": 100.5}',
        '{"repetition_penalty": -1}', '{"repetition_penalty": "1"}',
    ]),
    ("400 invalid_request logit_bias", [
        '{"logit_bias": [1]}', '{"logit_bias": "x"}', '{"logit_bias": {"a": 1}}', '{"logit_bias": {"": 1}}',
        '{"logit_bias": {"-1": 1}}', '{"logit_bias": {"٣": 1}}', '{"logit_bias": {"1234567890": 1}}',
        '{"logit_bias": {"5": 100.5}}', '{"logit_bias": {"5": true}}', '{"logit_bias": {"5": null}}',
        '{"logit_bias": {"5": "1"}}', '{"stop": "", "n": 0, "logit_bias": 3}',
    ]),
    ("400 invalid_request ignore_eos", ['{"ignore_eos": 0}']),
    ("400 invalid_request n", ['{"n": 0}', '{"n": 17}', '{"n": true}', '{"n": 1.5}', '{"model": "nope", "n": 0}']),
    ("400 invalid_request logprobs", ['{"logprobs": 3}']),
    ("400 invalid_request top_logprobs", [
        '{"logprobs": true, "top_logprobs": 21}', '{"logprobs": false, "top_logprobs": 2}', '{"top_logprobs": 0}',
        '{"top_logprobs": -1}', '{"model": "nope", "top_logprobs": 1}',
    ]),
    ("400 invalid_request prompt_logprobs", ['{"prompt_logprobs": 21}', '{"prompt_logprobs": 1, "stream": true}']),
    ("400 invalid_request stream_options", [
        '{"stream_options": {"include_usage": true}}', '{"stream": true, "stream_options": "x"}',
        '{"stream": true, "stream_options": []}',
    ]),
    ("400 unknown_parameter stream_options.include_usge", ['{"stream": true, "stream_options": {"include_usge": true}}']),
    ("400 unknown_parameter stream_options.strict", ['{"stream": true, "stream_options": {"strict": true}}']),
    ("400 invalid_request stream_options.include_usage", [
        '{"stream": true, "stream_options": {"include_usage": null}}',
        '{"stream": true, "stream_options": {"include_usage": 1}}',
    ]),
    ("400 invalid_request tools", [
        '{"tools": {}}',
        '{"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}]}',
    ]),
    ("400 invalid_request tools[0]", ['{"tools": [3]}', '{"tools": [null]}']),
    ("400 invalid_request tools[0].type", [
        '{"tools": [{}]}', '{"tools": [{"type": "web_search", "function": {"name": "f"}}]}',
        '{"tools": [{"function": {"name": "f"}}]}',
    ]),
    ("400 invalid_request tools[0].function", ['{"tools": [{"type": "function"}]}', '{"tools": [{"type": "function", "function": "f"}]}']),
    ("400 invalid_request tools[0].function.name", [
        '{"tools": [{"type": "function", "function": {"name": ""}}]}',
        '{"tools": [{"type": "function", "function": {"name": "' + "é" * 129 + '"}}]}',
        '{"tools": [{"type": "function", "function": {"name": 3}}]}',
        '{"tools": [{"type": "function", "function": {}}]}',
    ]),
    ("400 invalid_request tools[0].function.strict", [
        '{"tools": [{"type": "function", "function": {"name": "f", "strict": 0}}]}',
        '{"tools": [{"type": "function", "function": {"name": "f", "strict": "no"}}]}',
    ]),
    ("400 unknown_parameter tools[0].function.strictt", ['{"tools": [{"type": "function", "function": {"name": "f", "strictt": true}}]}']),
    ("400 unknown_parameter tools[0].strict", ['{"tools": [{"type": "function", "strict": true, "function": {"name": "f"}}]}']),
    ("400 invalid_request tools[0].function.parameters", ['{"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}']),
    ("400 invalid_request tools[0].function.description", ['{"tools": [{"type": "function", "function": {"name": "f", "description": 3}}]}']),
    ("400 invalid_request tools[1].function.name", [
        '{"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": 3}}]}',
    ]),
    ("400 unknown_parameter tools[0].functoin", ['{"tools": [{"type": "function", "function": {"name": "f"}, "functoin": 1}]}']),
    ("400 invalid_request tool_choice", [
        '{"tool_choice": "required"}', '{"tool_choice": {"type": "function", "function": {"name": "f"}}}',
        '{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}}',
        '{"tool_choice": {"type": "function"}}', '{"tool_choice": {"type": "allowed_tools", "function": {"name": "f"}}}',
    ]),
    ("400 invalid_request tool_choice", [
        '{"tool_choice": "perhaps"}', '{"tool_choice": 3}', '{"tool_choice": []}', '{"tool_choice": {"type": "custom", "name": "f"}}',
        *(
            f'{{"tools": [{{"type": "function", "function": {{"name": "f"}}}}], '
            f'"tool_choice": {{"type": "allowed_tools", "allowed_tools": {allowed}}}}}'
            for allowed in (
                "7", "null", "{}", '{"mode": "auto", "tools": []}', '{"mode": "auto", "tools": 7}', '{"mode": "none", "tools": [{"name": "f"}]}',
                '{"tools": [{"name": "f"}]}', '{"mode": "auto", "tools": [{"name": "f"}, {"name": "g"}]}', '{"mode": "auto", "tools": [7]}',
                '{"mode": [], "tools": [{"name": "f"}]}',
            )
        ),
        '{"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "f"}]}}}',
    ]),
    ("400 invalid_request parallel_tool_calls", ['{"parallel_tool_calls": "no"}']),
    ("400 unsupported_parameter echo", ['{"echo": true}', '{"echo": 0}']),
    ("400 unsupported_parameter best_of", ['{"best_of": true}', '{"best_of": 2}']),
    ("400 invalid_request response_format", [
        '{"response_format": {"type": "yaml"}}', '{"response_format": "json_object"}', '{"response_format": {}}',
        '{"response_format": {"type": "json_schema"}}', '{"response_format": {"type": "json_schema", "json_schema": []}}',
        '{"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 3}}}',
        '{"response_format": {"type": "json_schema", "json_schema": {"a": ' + DEEP[0] + "{}" + DEEP[1] + "}}}",
    ]),
    ("400 invalid_request structured_outputs", [
        '{"structured_outputs": {}}', '{"structured_outputs": {"regex": "a", "choice": ["a"]}}',
        '{"structured_outputs": {"yaml": "a"}}', '{"structured_outputs": {"regex": ""}}',
        '{"structured_outputs": {"json": "{"}}', '{"structured_outputs": {"json": [1]}}', '{"structured_outputs": []}',
        '{"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}',
    ]),
    ("400 invalid_request guided_choice", ['{"guided_choice": []}', '{"guided_choice": [1]}', '{"guided_choice": "a"}', '{"guided_choice": [""]}']),
    ("400 unsupported_parameter audio", ['{"audio": {"voice": "x"}}', '{"audio": 1, "unknown": 1}']),
    ("400 unsupported_parameter modalities", ['{"modalities": ["text", "audio"]}']),
    ("400 unsupported_parameter functions", ['{"functions": [{}]}']),
    ("400 invalid_request reasoning_effort", ['{"reasoning_effort": "huge"}', '{"reasoning_effort": 3}']),
    ("400 invalid_request chat_template_kwargs", [
        '{"chat_template_kwargs": {"messages": []}}', '{"chat_template_kwargs": [1]}',
        '{"chat_template_kwargs": {"x": ' + DEEP[0] + "{}" + DEEP[1] + "}}",
    ]),
    ("400 invalid_request continue_final_message", [
        '{"continue_final_message": true}', '{"continue_final_message": 1}',
        '{"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": true, "add_generation_prompt": true}',
    ]),
    ("400 invalid_request min_tokens", ['{"min_tokens": -1}', '{"min_tokens": 5, "max_tokens": 4}', '{"min_tokens": 1.5}']),
    ("400 unsupported_parameter skip_special_tokens", ['{"skip_special_tokens": false}']),
    ("400 unsupported_parameter lora", ['{"lora": "x"}']),
    ("400 unknown_parameter prompt", ['{"prompt": "Hi"}']),
    ("400 unknown_parameter ", ['{"": 1}']),
    ("400 unknown_parameter temperature ", ['{"temperature ": null}']),
    ("400 unknown_parameter n\x00", ['{"n\\u0000": 1}']),
    ("400 unknown_parameter xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", [
        '{"' + "x" * 300 + '": 1}',
    ]),
    ("400 unknown_parameter unknown", ['{"unknown": 1, "temperature": 9}', '{"temperature": 9, "unknown": 1}']),
]  # fmt: skip

COMPLETIONS: list[tuple[str, list[str]]] = [
    ("400 invalid_request prompt", [
        '{"prompt": null}', '{"prompt": []}', '{"prompt": [[]]}', '{"prompt": [[[1]]]}', '{"prompt": [["a"]]}',
        '{"prompt": [1, -2]}', '{"prompt": [1, "a"]}', '{"prompt": ["a", 1]}', '{"prompt": [true]}',
        '{"prompt": [1, true]}', '{"prompt": [1.0]}', '{"prompt": [1, 2.0]}', '{"prompt": [18446744073709551616]}',
        '{"prompt": {"a": 1}}', '{"prompt": 3}', '{"prompt": [null]}', '{"prompt": [{}]}',
    ]),
    ("ok", [
        '{"prompt": ""}', '{"prompt": [""]}', '{"prompt": ["a"]}', '{"prompt": [[1, 2]]}',
        '{"prompt": ["a", "b"]}', '{"prompt": [[1], [2]]}', '{"prompt": ["a", [1]]}',
        '{"prompt": [18446744073709551615]}', '{"prompt": [0]}', '{"max_tokens": -1}', '{"echo": true}', '{"max_tokens": 0, "echo": true}',
        '{"logprobs": 0}', '{"logprobs": 20}', '{"n": 16}',
        '{"stream": true, "stream_options": {"include_usage": false}}',
    ]),
    ("400 invalid_request echo", ['{"echo": "yes"}', '{"prompt": "", "echo": 3}', '{"echo": 3, "logprobs": -1, "n": 0}']),
    ("400 invalid_request max_tokens", [
        '{"max_tokens": 0}', '{"max_tokens": -2, "echo": true}', '{"max_tokens": 0, "model": "nope"}',
        '{"prompt": "", "max_tokens": -2}',
    ]),
    ("404 model_not_found model", ['{"max_tokens": 0, "echo": true, "model": "nope"}']),
    ("400 invalid_request prompt_logprobs", ['{"prompt_logprobs": 1, "stream": true}']),
    ("400 unsupported_parameter best_of", ['{"best_of": 3}']),
    ("400 invalid_request suffix", ['{"suffix": "x", "echo": true}', '{"suffix": "x", "prompt": [1, 2]}']),
    ("400 invalid_request logprobs", ['{"logprobs": true}', '{"logprobs": 21}']),
    ("400 unknown_parameter messages", ['{"messages": []}']),
    ("400 unknown_parameter tools", ['{"tools": []}']),
    ("400 invalid_request stream_options", ['{"stream_options": {"include_usage": false}}']),
    ("400 invalid_request model", ['{"prompt": "", "model": 3}']),
]  # fmt: skip

RUNS: list[tuple[str, list[str]]] = [
    ("400 invalid_request prompt", [
        '{}', '{"prompt": ""}', '{"prompt": 3}', '{"prompt": ["a"]}',
        '{"messages": [{"role": "user", "content": "Hi"}], "prompt": "x"}',
    ]),
    ("ok", [
        '{"prompt": "Hi"}', '{"prompt": "Hi", "raw": true}', '{"messages": [{"role": "user", "content": "Hi"}]}',
        '{"messages": null, "prompt": "x"}', '{"prompt": "Hi", "n": 1}', '{"prompt": "Hi", "lora": ""}',
        '{"prompt": "Hi", "tools": [{"name": "f", "parameters": {}}]}',
        '{"prompt": "Hi", "tools": [{"name": "f"}, {"type": "function", "function": {"name": "g"}}]}',
        '{"messages": [{"role": "assistant", "content": "a", "x": 1}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]}',
    ]),
    ("400 invalid_request raw", ['{"prompt": "Hi", "raw": 1}']),
    ("400 invalid_request messages", ['{"messages": []}']),
    ("400 unknown_parameter model", ['{"prompt": "Hi", "model": "tiny"}']),
    ("400 unsupported_parameter n", ['{"prompt": "Hi", "n": 2}']),
    ("400 unsupported_parameter requests", ['{"prompt": "Hi", "requests": []}']),
    ("400 unsupported_parameter prompt_logprobs", ['{"prompt": "Hi", "prompt_logprobs": 3}']),
    ("400 unknown_parameter promt", ['{"promt": "Hi"}']),
    ("400 invalid_request tools[0].function.name", [
        '{"prompt": "Hi", "tools": [{"name": ""}]}', '{"prompt": "Hi", "tools": [{}]}',
        '{"prompt": "Hi", "tools": [{"nme": "f"}]}',
    ]),
    ("400 invalid_request tools[0].function.strict", ['{"prompt": "Hi", "tools": [{"name": "f", "strict": 1}]}']),
    ("400 invalid_request tools[0].type", ['{"prompt": "Hi", "tools": [{"name": "f", "function": {}}]}']),
    ("400 invalid_request tools[0].function", ['{"prompt": "Hi", "tools": [{"type": "function"}]}']),
    ("400 invalid_request tools[0]", ['{"prompt": "Hi", "tools": [3]}']),
    ("400 invalid_request tools", ['{"prompt": "Hi", "tools": "f"}']),
    ("400 invalid_request max_tokens", ['{"prompt": "Hi", "max_tokens": 0}']),
    ("400 unknown_parameter stream_options", ['{"prompt": "Hi", "stream": true, "stream_options": {}}']),
    ("400 unknown_parameter messages[0].x", ['{"messages": [{"role": "user", "content": "a", "x": 1}]}']),
]  # fmt: skip

EMBEDDINGS: list[tuple[str, list[str]]] = [
    ("400 invalid_request input", [
        '{"input": null}', '{"input": ""}', '{"input": []}', '{"input": [""]}', '{"input": ["a", ""]}',
        '{"input": [[]]}', '{"input": [1, -2]}', '{"input": [[1, -2]]}', '{"input": [1, "a"]}', '{"input": [true]}',
        '{"input": [[true]]}', '{"input": [1.0]}', '{"input": ["a", null]}', '{"input": ["a", {}]}', '{"input": 5}',
        '{"input": {}}', '{"input": ["a", []]}', '{"input": [' + TEXTS + ', "a"]}', '{"dimensions": 0, "input": 5}',
    ]),
    ("ok", [
        '{"input": "Hi"}', '{"input": ["a", "b"]}', '{"input": [1, 2]}', '{"input": [[1, 2], "a"]}',
        '{"input": [18446744073709551615]}', '{"input": [' + TEXTS + ']}', '{"encoding_format": "float"}',
        '{"encoding_format": "base64"}', '{"encoding_format": null}', '{"dimensions": 1}', '{"user": "u"}',
    ]),
    ("400 invalid_request encoding_format", ['{"encoding_format": "int8"}', '{"encoding_format": 3}', '{"dimensions": 0, "encoding_format": "x"}']),
    ("400 invalid_request dimensions", [
        '{"dimensions": 0}', '{"dimensions": 1.0}', '{"dimensions": true}', '{"dimensions": 18446744073709551616}',
        '{"model": "nope", "dimensions": 0}',
    ]),
    ("400 unknown_parameter dimenions", ['{"dimenions": 3}']),
    ("404 model_not_found model", ['{"model": "nope"}']),
    ("400 invalid_request model", ['{"model": null}']),
    ("400 unknown_parameter stream", ['{"stream": true}']),
]  # fmt: skip

RUN_EMBEDDINGS: list[tuple[str, list[str]]] = [
    ("400 invalid_request text", ['{}', '{"text": ""}', '{"text": [""]}']),
    ("ok", [
        '{"text": "Hi"}', '{"text": ["a", "b"]}', '{"text": "Hi", "pooling": "cls"}',
        '{"text": "Hi", "pooling": "mean"}', '{"text": "Hi", "pooling": null}',
    ]),
    ("400 invalid_request pooling", ['{"text": "Hi", "pooling": "max"}']),
    ("400 unknown_parameter truncate_inputs", ['{"text": "Hi", "truncate_inputs": true}']),
    ("400 unknown_parameter input", ['{"input": "Hi"}']),
    ("400 unknown_parameter prompt", ['{"text": "Hi", "prompt": "x"}']),
]  # fmt: skip

MESSAGES: list[tuple[str, list[str]]] = [
    ("ok", [
        '{}', '{"max_tokens": 1}', '{"stream": true}', '{"system": "Be brief."}', '{"system": []}', '{"temperature": 1}', '{"top_k": 0}',
        '{"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}', '{"top_p": 1}', '{"stop_sequences": ["a"]}',
        '{"metadata": {"user_id": "u"}}', '{"service_tier": "auto"}', '{"cache_control": {"type": "ephemeral"}}', '{"mcp_servers": []}',
        '{"thinking": {"type": "adaptive"}}', '{"thinking": {"type": "enabled", "budget_tokens": 1024}}', '{"output_config": {"effort": "max"}}',
        '{"tools": [{"name": "f", "input_schema": {}}]}', '{"tools": [{"type": "custom", "name": "f", "input_schema": {}, "strict": true}]}',
        '{"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}}', '{"tool_choice": {"type": "auto"}}',
        '{"messages": [{"role": "user", "content": []}]}', '{"messages": [{"role": "assistant", "content": "So"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}',
    ]),
    ("400 invalid_request max_tokens", ['{"max_tokens": 0}', '{"max_tokens": "9"}', '{"max_tokens": null}']),
    ("400 invalid_request messages", ['{"messages": []}', '{"messages": "Hi"}', '{"messages": [{"role": "assistant", "content": " "}]}']),
    ("400 invalid_request messages[0].role", ['{"messages": [{"role": "tool", "content": "a"}]}']),
    ("400 invalid_request messages[0].content", [
        '{"messages": [{"role": "user", "content": 1}]}', '{"messages": [{"role": "user"}]}',
        f'{{"messages": [{{"role": "user", "content": [{DEEP[0]}{{}}{DEEP[1]}]}}]}}',
    ]),
    ("400 invalid_request messages[0].content[0].type", ['{"messages": [{"role": "user", "content": [{}]}]}']),
    ("400 invalid_request messages[0].content[0].text", ['{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}']),
    ("400 unsupported_parameter messages[0].content[0]", ['{"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}']),
    ("400 invalid_request messages[0].content[0].input", ['{"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}']),
    ("400 invalid_request system", ['{"system": 1}', '{"system": [1]}']),
    ("400 invalid_request top_p", ['{"top_p": -1}']),
    ("400 invalid_request stop_sequences[0]", ['{"stop_sequences": [""]}']),
    ("400 invalid_request thinking.type", ['{"thinking": {}}']),
    ("400 invalid_request output_config.effort", ['{"output_config": {"effort": 1}}']),
    ("400 invalid_request output_config.format", ['{"output_config": {"format": "json"}}']),
    ("400 invalid_request output_format.schema", ['{"output_format": {"type": "json_schema"}}']),
    ("400 invalid_request tools[0].input_schema", [
        '{"tools": [{"name": "f"}]}', f'{{"tools": [{{"name": "f", "input_schema": {DEEP[0]}{{}}{DEEP[1]}}}]}}',
    ]),
    ("400 invalid_request tools", ['{"tools": [{"name": "f", "input_schema": {}}, {"name": "f", "input_schema": {}}]}']),
    ("400 invalid_request tool_choice.type", ['{"tool_choice": {}}']),
    ("400 invalid_request tool_choice.name", ['{"tool_choice": {"type": "tool"}}']),
    ("400 invalid_request tool_choice", ['{"tool_choice": {"type": "any"}}', '{"tool_choice": "any"}']),
    ("400 unsupported_parameter mcp_servers", ['{"mcp_servers": [{"type": "url"}]}']),
    ("400 unknown_parameter max_tokns", ['{"max_tokns": 1}']),
]  # fmt: skip

RESPONSES: list[tuple[str, list[str]]] = [
    ("ok", [
        '{}', '{"input": [{"role": "user", "content": "Hi"}]}', '{"instructions": "Be brief."}', '{"max_output_tokens": 1}', '{"store": true}',
        '{"include": ["reasoning.encrypted_content"]}', '{"metadata": {"a": "b"}}', '{"reasoning": {"effort": "low", "summary": "auto"}}',
        '{"text": {}}', '{"text": {"format": {"type": "text"}}}', '{"text": {"format": {"type": "json_object"}}}', '{"truncation": "auto"}',
        '{"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}', '{"tool_choice": "none"}', '{"background": false}',
        '{"stream": true, "stream_options": {"include_obfuscation": false}}', '{"prompt_cache_key": "a"}', '{"user": "u"}', '{"temperature": 2}',
        '{"input": [{"type": "reasoning", "id": "r", "summary": []}]}', '{"input": [{"type": "function_call_output", "call_id": "a", "output": ""}]}',
    ]),
    ("400 invalid_request input", ['{"input": []}', '{"input": ["Hi"]}', '{"input": 1}', '{"input": null}',
        f'{{"input": [{DEEP[0]}{{}}{DEEP[1]}]}}']),
    ("400 invalid_request input[0].role", ['{"input": [{"content": "Hi"}]}']),
    ("400 invalid_request input[0].content", ['{"input": [{"role": "user"}]}', '{"input": [{"role": "user", "content": [1]}]}']),
    ("400 unsupported_parameter input[0].content[0]", ['{"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}']),
    ("400 invalid_request input[0].content[0].file_data", ['{"input": [{"role": "user", "content": [{"type": "input_file"}]}]}']),
    ("400 unsupported_parameter input[0].type", ['{"input": [{"type": "song"}]}']),
    ("400 invalid_request input[0].arguments", ['{"input": [{"type": "function_call"}]}']),
    ("400 invalid_request input[0].call_id", ['{"input": [{"type": "function_call_output", "output": ""}]}']),
    ("400 invalid_request model", ['{"model": 1}', '{"model": null}']),
    ("404 model_not_found model", ['{"model": "other"}']),
    ("400 invalid_request reasoning.effort", ['{"reasoning": {"effort": "some"}}']),
    ("400 invalid_request text.verbosity", ['{"text": {"verbosity": "loud"}}']),
    ("400 invalid_request text.format", ['{"text": {"format": {"type": "xml"}}}', '{"text": {"format": 1}}']),
    ("400 invalid_request text.format.schema", ['{"text": {"format": {"type": "json_schema", "name": "n"}}}']),
    ("400 invalid_request tools[0].name", ['{"tools": [{"type": "function"}]}']),
    ("400 invalid_request tool_choice", [
        '{"tool_choice": "some"}', '{"tool_choice": {"type": "file_search"}}', '{"tool_choice": {"type": "function"}}',
        '{"tool_choice": {"type": "allowed_tools"}}', '{"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}',
        '{"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}}',
    ]),
    ("400 unsupported_parameter previous_response_id", ['{"previous_response_id": "r"}']),
    ("400 unsupported_parameter background", ['{"background": true}']),
    ("400 invalid_request metadata", ['{"metadata": []}']),
    ("400 unknown_parameter inputs", ['{"inputs": "Hi"}']),
]  # fmt: skip

TABLES = {
    "chat": CHATS,
    "completion": COMPLETIONS,
    "run": RUNS,
    "embedding": EMBEDDINGS,
    "run_embedding": RUN_EMBEDDINGS,
    "messages": MESSAGES,
    "responses": RESPONSES,
}
CASES = [
    (endpoint, expected, change)
    for endpoint, table in TABLES.items()
    for expected, changes in table
    for change in changes
]


@pytest.mark.parametrize(("expected", "raw"), [(expected, raw) for expected, raws in RAW for raw in raws])
def test_bytes_have_the_outcome_of_the_table(expected: str, raw: bytes) -> None:
    assert outcome("chat", raw) == expected


@pytest.mark.parametrize(("endpoint", "expected", "change"), CASES)
def test_a_body_has_the_outcome_of_the_table(endpoint: str, expected: str, change: str) -> None:
    raw = over(BASES[endpoint], change)
    assert outcome(endpoint, raw) == expected
    if "unknown_parameter" not in expected:  # other outcomes do not depend on `strict`
        assert outcome(endpoint, raw, strict=False) == expected


@pytest.mark.parametrize(
    ("endpoint", "param", "change"), [(e, o.split(" ", 2)[2], c) for e, o, c in CASES if "unknown_parameter" in o]
)
def test_an_unknown_field_is_left_out_and_named_unless_fields_are_strict(
    endpoint: str, param: str, change: str
) -> None:
    raw = over(BASES[endpoint], change)
    found = outcome(endpoint, raw, strict=False)
    if found != "ok":  # the body has another error, and is refused for it
        assert "unknown_parameter" not in found
        return
    names = [name[:100] for name in parse(endpoint, raw, strict=False).ignored]
    assert param in names or None in orjson.loads(raw).values()


def test_depth_within_the_reader_s_limit_is_refused_in_a_schema_and_in_a_message() -> None:
    schema = f'{{"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {DEEP[0]}{{}}{DEEP[1]}}}}}]}}'
    assert outcome("chat", over(BASES["chat"], schema)) == "400 invalid_request tools[0].function.parameters"
    content = f'{{"messages": [{{"role": "user", "content": [{DEEP[0]}{{}}{DEEP[1]}]}}]}}'
    assert outcome("chat", over(BASES["chat"], content)) == "400 invalid_request messages[0].content"


def test_numbers_come_out_as_the_engine_takes_them() -> None:
    change = '{"temperature": 1, "seed": -1, "repetition_penalty": 0, "logit_bias": {"05": 1}, "stop": "x", "max_tokens": 7, "top_k": -1}'
    sampling = parse("chat", over(BASES["chat"], change)).sampling
    assert (sampling.temperature, type(sampling.temperature)) == (1.0, float)
    assert (sampling.seed, sampling.repetition_penalty, sampling.max_tokens, sampling.top_k) == (2**63 - 1, None, 7, -1)
    assert (sampling.logit_bias, sampling.stop, sampling.stop_token_ids) == (((5, 1.0),), ("x",), ())
    assert sampling.top_p is None
    assert sampling.presence_penalty == 0.0
    assert not sampling.ignore_eos
    assert sampling.num_logprobs is None


def test_an_echoed_answer_keeps_what_templates_know() -> None:
    message = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "parsed": {"a": 1}, "name": "bot",
        "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "index": 0, "foreign": 1,
             "function": {"name": "f", "arguments": '{"a": null}', "parsed_arguments": {}}},
            {"function": {"name": "g", "arguments": {"b": [None]}}},
        ],
    }  # fmt: skip
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
    }
    body = {"model": "tiny", "messages": [message, result, {"role": "developer", "content": "Be brief."}]}
    assert parse("chat", orjson.dumps(body)).prompt.messages == (
        {
            "role": "assistant", "content": "", "name": "bot", "reasoning_content": "hm", "reasoning": "hm", "thinking": "hm", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": None}}},
                {"type": "function", "function": {"name": "g", "arguments": {"b": [None]}}},
            ],
        },
        {"role": "tool", "content": "1\n2", "tool_call_id": "c1"},
        {"role": "system", "content": "Be brief."},
    )  # fmt: skip


def test_tools_come_out_as_templates_expect_them() -> None:
    parameters = {"type": "object", "properties": {"a": {"default": None}}}
    plain = {"strict": False, "parameters": parameters, "description": "Does f.", "name": "f"}
    tools = [{"type": "function", "function": plain}, {"function": {"name": "g", "strict": None}, "type": "function"}]
    expected = (
        {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": parameters}},
        {"type": "function", "function": {"name": "g"}},
    )
    for endpoint, sent in (("chat", tools), ("run", tools), ("run", [tool["function"] for tool in tools])):
        parsed = parse(
            endpoint,
            over(BASES["chat"] if endpoint == "chat" else '{"prompt": "Hi"}', orjson.dumps({"tools": sent}).decode()),
        )
        assert orjson.dumps(parsed.prompt.tools) == orjson.dumps(
            expected
        )  # the order of keys counts, since templates print them
    chosen_none = over(BASES["chat"], orjson.dumps({"tools": tools, "tool_choice": "none"}).decode())
    assert parse("chat", chosen_none).prompt.tools == ()


def test_texts_and_token_ids_come_out_as_tuples() -> None:
    prompts: list[tuple[str, tuple[Any, ...]]] = [
        ('"Hi"', ("Hi",)), ('["Hi"]', ("Hi",)), ("[1, 2]", ((1, 2),)), ("[[1, 2]]", ((1, 2),)), ('["a", [1]]', ("a", (1,))),
    ]  # fmt: skip
    for sent, expected in prompts:
        assert parse("completion", over(BASES["completion"], f'{{"prompt": {sent}}}')).prompts == expected
    for sent, inputs in (
        ('"Hi"', ("Hi",)),
        ('["a", "b"]', ("a", "b")),
        ("[1, 2]", ((1, 2),)),
        ('[[1, 2], "a"]', ((1, 2), "a")),
    ):
        assert parse("embedding", over(BASES["embedding"], f'{{"input": {sent}}}')).inputs == inputs


ONLY_F = {"mode": "required", "tools": ["f"]}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("auto", "auto"), ("none", "none"), ("required", "required"), ("any", "required"), ({"name": "f"}, ONLY_F),
        ({"type": "function", "name": "f"}, ONLY_F), ({"type": "function", "function": {"name": "f"}}, ONLY_F),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}}, ONLY_F),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, ONLY_F),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}, {"name": "g"}]}, {"mode": "auto", "tools": ["f", "g"]}),
    ],
)  # fmt: skip
def test_a_choice_of_tools_is_read_in_each_of_its_forms(said: Any, meant: Any) -> None:
    assert read_tool_choice(said) == meant

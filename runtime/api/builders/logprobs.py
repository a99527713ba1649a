"""Log-probabilities in OpenAI's form, and in vLLM's form for the tokens of the prompt.

Independent of where the numbers come from.
"""

from collections.abc import Sequence
from itertools import accumulate

from pilotlight.engine.api.protocol import TokenLogprobs
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.runtime.generation.output_processor import DeliveredToken
from pilotlight.wire.chat import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)


def chat_logprobs(tokens: Sequence[DeliveredToken], tokenizer: Tokenizer) -> ChatLogprobs:
    return ChatLogprobs(tuple(_token_logprob(token, tokenizer) for token in tokens if token.is_shown))


def text_logprobs(texts: Sequence[str], tokens: Sequence[DeliveredToken], tokenizer: Tokenizer) -> list[ChatLogprobs]:
    """Return the log-probabilities of each text of an answer.

    Tokens of reasoning, calls and markup are left out."""
    spelled = [tokenizer.token_bytes(token.token_id) for token in tokens]
    ends = list(accumulate(map(len, spelled)))
    written, behind, found = b"".join(spelled), 0, []
    for text in texts:
        start = max(written.find(text.encode(), behind), behind)
        behind = start + len(text.encode())
        own = [
            token
            for token, piece, end in zip(tokens, spelled, ends, strict=True)
            if end > start and end - len(piece) < behind
        ]
        found.append(chat_logprobs(own, tokenizer))
    return found


def completion_logprobs(tokens: Sequence[DeliveredToken], tokenizer: Tokenizer, offset: int) -> CompletionLogprobs:
    """Return the log-probabilities of a completion's tokens.
    `offset` is the number of characters before the first token: the prompt's length if it is echoed, else 0."""
    shown = [token for token in tokens if token.is_shown and token.logprobs is not None]
    return CompletionLogprobs(
        tokens=tuple(tokenizer.token_text(token.token_id) for token in shown),
        token_logprobs=tuple(token.logprobs.logprob for token in shown if token.logprobs),
        top_logprobs=tuple(
            _top_by_text(token.token_id, token.logprobs, None, tokenizer) for token in shown if token.logprobs
        ),
        text_offset=tuple(offset + token.text_offset for token in shown),
    )


def echoed_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """Return the log-probabilities of an echoed prompt.
    The first token has none, because nothing precedes it."""
    return CompletionLogprobs(
        tokens=tuple(tokenizer.token_text(token_id) for token_id in token_ids),
        token_logprobs=(None, *(reported.logprob for reported in logprobs)),
        top_logprobs=(
            None,
            *(
                _top_by_text(token_id, reported, num_top, tokenizer)
                for token_id, reported in zip(token_ids[1:], logprobs, strict=True)
            ),
        ),
        text_offset=tuple(_offsets(token_ids, tokenizer)),
    )


def prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """Return a table for each prompt token; None for the first one, because nothing precedes it.
    A table maps token ids to log-probabilities: those of the token itself and of the likeliest ones in its place."""
    return (
        None,
        *(
            _by_id(token_id, reported, num_top, tokenizer)
            for token_id, reported in zip(token_ids[1:], logprobs, strict=True)
        ),
    )


def joined_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _by_id(token_id: int, reported: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    table = {str(token_id): PromptLogprob(reported.logprob, reported.rank, tokenizer.token_text(token_id))}
    for rank, (other, logprob) in enumerate(reported.top[:num_top], 1):
        if other != token_id:
            table[str(other)] = PromptLogprob(logprob, rank, tokenizer.token_text(other))
    return table


def _top_by_text(token_id: int, reported: TokenLogprobs, num_top: int | None, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the log-probabilities of the likeliest tokens, and of the actual one, by text."""
    there = (token_id, reported.logprob)
    return {tokenizer.token_text(other): logprob for other, logprob in (there, *reported.top[:num_top])}


def _offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the number of characters before each token.

    A token that begins inside a character counts from that character's start."""
    detokenizer = tokenizer.detokenizer()
    offsets, decoded = [], 0
    for token_id in token_ids:
        offsets.append(decoded + detokenizer.held_before(token_id))
        decoded += len(detokenizer.push(token_id))
    return offsets


def _token_logprob(token: DeliveredToken, tokenizer: Tokenizer) -> TokenLogprob:
    chosen, top = (token.logprobs.logprob, token.logprobs.top) if token.logprobs is not None else (0.0, ())
    return TokenLogprob(
        tokenizer.token_text(token.token_id),
        chosen,
        tuple(tokenizer.token_bytes(token.token_id)),
        tuple(
            TopLogprob(tokenizer.token_text(token_id), logprob, tuple(tokenizer.token_bytes(token_id)))
            for token_id, logprob in top
        ),
    )

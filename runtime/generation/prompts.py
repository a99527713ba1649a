"""Converts a request's prompt to tokens: render, encode, insert images, and check the length.

Independent of sequences and dialects.
"""

import asyncio
from typing import NamedTuple

from msgspec.structs import replace

from pilotlight.dialects.requests import INLINE_BYTES, Conversation, Insertion, Prompt, ValidGeneration
from pilotlight.engine.api.protocol import PromptImage
from pilotlight.engine.text.chat_template import BrokenTemplateError
from pilotlight.engine.text.fill_in import FillIn
from pilotlight.engine.text.image_prompt import ImagePlaceholders, ImagePromptError, SizedImage
from pilotlight.engine.tokenizer.tokenizer import surrounded
from pilotlight.runtime.generation.images import ImageReader
from pilotlight.runtime.models.model_state import AwakeModel
from pilotlight.wire.errors import ApiError

# Usual maximum of characters per token; prose has 4. A long text with more is encoded twice.
MANY_CHARACTERS = 16


class EncodedPrompt(NamedTuple):
    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...] = ()


async def encode(model: AwakeModel, request: ValidGeneration, prompt: Prompt, reader: ImageReader) -> EncodedPrompt:
    """Encode a prompt so that at least one more token fits into the context.

    Raises ApiError, ChatTemplateError, TokenizerError."""
    return await encode_with(model, request, prompt, await read_images(model, request, prompt, reader))


async def read_images(
    model: AwakeModel, request: ValidGeneration, prompt: Prompt, reader: ImageReader
) -> tuple[SizedImage, ...]:
    """Read a prompt's images, if it has any. Raises ApiError, also if the model has no vision."""
    if not isinstance(prompt, Conversation) or not prompt.images:
        return ()
    placeholders_of(model, request)
    return await reader.read(prompt.images, request.prompt_field)


async def encode_with(
    model: AwakeModel, request: ValidGeneration, prompt: Prompt, images: tuple[SizedImage, ...]
) -> EncodedPrompt:
    """Encode a prompt whose images have been read, as `encode` does."""
    if isinstance(prompt, Conversation) and prompt.drops_oldest:
        return await _encode_newest(model, request, prompt, images)
    return await _encode(model, request, prompt, images)


def placeholders_of(model: AwakeModel, request: ValidGeneration) -> ImagePlaceholders:
    """Return how the model's prompts represent images. Raises ApiError if the model has no vision."""
    if model.text.placeholders is None or model.info.image_token_id is None:
        # The first sentence is OpenAI's; clients recognize the error by it.
        message = f"Invalid content type. image_url is only supported by certain models. {request.requested_model!r} takes texts alone"
        raise ApiError("invalid_request", message, param=request.prompt_field)
    return model.text.placeholders


def fill_in_of(model: AwakeModel, request: ValidGeneration) -> FillIn:
    """Return the form of the model's prompts for filling in the middle. Raises ApiError if it has none."""
    if model.text.fill_in is None:
        message = f"{request.requested_model!r} cannot insert before a suffix: its vocabulary has no tokens for filling in the middle"
        raise ApiError("unsupported_parameter", message, param="suffix")
    return model.text.fill_in


async def _encode(
    model: AwakeModel, request: ValidGeneration, prompt: Prompt, images: tuple[SizedImage, ...]
) -> EncodedPrompt:
    placed: tuple[PromptImage, ...] = ()
    if isinstance(prompt, Conversation):
        placeholders = placeholders_of(model, request) if images else None
        if placeholders is not None:
            _check_room(model, request, images)
        token_ids = await _encode_conversation(model, request, prompt, placeholders)
        if placeholders is not None:
            try:
                token_ids, placed = placeholders.expand(token_ids, images)
            except ImagePromptError as error:
                raise ApiError("invalid_request", str(error), param=request.prompt_field) from None
    elif isinstance(prompt, Insertion):
        token_ids = await _encode_insertion(model, request, prompt)
    elif isinstance(prompt, str):
        token_ids = await _encode_text(model, request, prompt, is_rendered=False)
    else:
        token_ids = prompt
    token_ids = _truncated(model, request, token_ids, has_images=bool(placed))
    if not token_ids:
        raise ApiError("invalid_request", "the prompt is empty; send at least one token", param=request.prompt_field)
    if len(token_ids) >= model.info.context_length:
        raise _too_long(model, request, str(len(token_ids)))
    return EncodedPrompt(token_ids, placed)


def _truncated(
    model: AwakeModel, request: ValidGeneration, token_ids: tuple[int, ...], *, has_images: bool
) -> tuple[int, ...]:
    """Return the prompt's last tokens, as many as the request asks for. Raises ApiError."""
    most = request.most_prompt_tokens
    if most is None:
        return token_ids
    if most < 0:
        most = max(1, model.info.context_length - max(1, request.sampling.max_tokens or 1))
    if len(token_ids) > most and has_images:
        sentence = "truncate_prompt_tokens: a prompt with images cannot be truncated: shorten it"
        raise ApiError("invalid_request", sentence, param="truncate_prompt_tokens")
    return token_ids[-most:]


def _check_room(model: AwakeModel, request: ValidGeneration, images: tuple[SizedImage, ...]) -> None:
    """Raise ApiError for images that do not fit into the context. Call it before rendering."""
    placeholders = placeholders_of(model, request)
    try:
        num_tokens = sum(placeholders.num_tokens(image.width, image.height) for image in images)
    except ImagePromptError as error:
        raise ApiError("invalid_request", str(error), param=request.prompt_field) from None
    if num_tokens >= model.info.context_length:
        raise _too_long(model, request, f"{num_tokens} of images alone")


async def _encode_conversation(
    model: AwakeModel, request: ValidGeneration, prompt: Conversation, placeholders: ImagePlaceholders | None
) -> tuple[int, ...]:
    """`placeholders`: None without images."""
    _check_effort(model, prompt)
    try:
        text = await model.text.rendering.text(prompt, is_short=request.num_bytes <= INLINE_BYTES)
    except BrokenTemplateError as error:
        message = f"model {model.config.name!r} takes no conversations: {error}"
        raise ApiError("model_load_failed", message) from None
    if placeholders is not None and placeholders.around is not None:
        text = surrounded(text, *placeholders.around)
    return await _encode_text(model, request, text, is_rendered=True)


async def _encode_insertion(model: AwakeModel, request: ValidGeneration, prompt: Insertion) -> tuple[int, ...]:
    fill_in, shield = fill_in_of(model, request), model.text.tokenizer.shield
    before, after = await asyncio.to_thread(shield, (prompt.before, prompt.after))
    token_ids = await _encode_text(model, request, fill_in.prompt(before, after), is_rendered=True)
    return (*model.text.tokenizer.encode("", add_special_tokens=True), *token_ids)  # first the token that starts a text


def _check_effort(model: AwakeModel, prompt: Conversation) -> None:
    tools, effort = model.text.answers.tools, prompt.variables.get("reasoning_effort")
    if tools is not None and tools.efforts and effort is not None and effort not in tools.efforts:
        known = f"{', '.join(tools.efforts[:-1])} or {tools.efforts[-1]}"
        message = f"reasoning_effort: {str(effort)[:50]!r} is not a value that this model supports; use {known}"
        raise ApiError("invalid_request", message, param="reasoning_effort")


async def _encode_newest(
    model: AwakeModel, request: ValidGeneration, prompt: Conversation, images: tuple[SizedImage, ...]
) -> EncodedPrompt:
    """Encode the system message and as many of the last messages as fit, starting at a user message."""
    try:
        return await _encode(model, request, prompt, images)
    except ApiError as error:
        if error.word != "context_length_exceeded":
            raise
        too_long = error
    system = tuple(message for message in prompt.messages if message["role"] == "system")
    others = [message for message in prompt.messages if message["role"] != "system"]
    starts = [i for i, message in enumerate(others) if i and message["role"] == "user"]
    fitting: EncodedPrompt | None = None
    while starts:  # binary search, because each try is rendered and encoded
        middle = len(starts) // 2
        dropped = sum(map(_num_images, others[: starts[middle]]))
        try:
            newest = replace(prompt, messages=(*system, *others[starts[middle] :]))
            fitting = await _encode(model, request, newest, images[dropped:])
            starts = starts[:middle]
        except ApiError as error:
            if error.word != "context_length_exceeded":
                raise
            starts = starts[middle + 1 :]
    if fitting is None:
        raise too_long
    return fitting


def _num_images(message: dict[str, object]) -> int:
    content = message["content"]
    return sum(part["type"] == "image" for part in content) if isinstance(content, list) else 0


async def _encode_text(model: AwakeModel, request: ValidGeneration, text: str, *, is_rendered: bool) -> tuple[int, ...]:
    """Encode a text, or only the start of one that is far too long for the context.

    Encoding all of it would take seconds of CPU time before the refusal."""
    tokenizer, limit = model.text.tokenizer, model.info.context_length
    if request.most_prompt_tokens is not None:  # the request wants the prompt truncated at its start
        return await tokenizer.encode_prompt(text, is_rendered=is_rendered)
    beginning = text[: MANY_CHARACTERS * limit]
    for part in (beginning, text):
        # The rest of the text can change only the last few tokens of this part.
        token_ids = await tokenizer.encode_prompt(part, is_rendered=is_rendered, enough=2 * limit + 1)
        if len(token_ids) > 2 * limit:
            raise _too_long(model, request, f"more than {2 * limit}")
        if len(part) == len(text):
            break
    return token_ids


def _too_long(model: AwakeModel, request: ValidGeneration, num_tokens: str) -> ApiError:
    limit = model.info.context_length
    # Frameworks search for the first half of this sentence, and LangChain for "prompt is too long".
    message = f"this model's maximum context length is {limit} tokens, answer included; the prompt is too long: it has {num_tokens}"
    return ApiError("context_length_exceeded", message, param=request.prompt_field)

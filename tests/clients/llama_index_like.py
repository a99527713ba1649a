"""LlamaIndex: OpenAILike and OpenAILikeEmbedding."""

import harness
import openai
from harness import ANSWER, CHAT, QUESTION, Person, expect, get_weather
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

ADDRESS = {"api_base": harness.OPENAI_URL, "api_key": harness.KEY, "max_retries": 0}
MODEL = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, **ADDRESS}
llm = OpenAILike(model=CHAT, **MODEL)


tool = FunctionTool.from_defaults(get_weather)


def chat() -> None:
    expect(ANSWER in llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content, "chat")
    expect(llm.complete("Once upon a time", max_tokens=8).text, "complete")


def stream() -> None:
    chunks = list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    expect(len(chunks) > 3 and ANSWER in chunks[-1].message.content, chunks)


def tools() -> None:
    history = [ChatMessage(role="user", content=harness.WEATHER_QUESTION)]
    first = llm.chat_with_tools([tool], chat_history=history, strict=True)
    (call,) = llm.get_tool_calls_from_response(first)
    harness.expect_weather(call.tool_kwargs)
    told = ChatMessage(role="tool", content=harness.WEATHER_RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    final = llm.chat_with_tools([tool], chat_history=[*history, first.message, told], strict=True)
    expect("18" in final.message.content, final)


def forced_tool() -> None:
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    harness.expect_weather(call.tool_kwargs)


def strict_tool() -> None:
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, strict=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    harness.expect_weather(call.tool_kwargs)


def structured() -> None:
    for can_schema in (True, False):  # through response_format, and through a forced call
        able = OpenAILike(model=CHAT, should_use_structured_outputs=can_schema, **MODEL)
        made = able.structured_predict(Person, PromptTemplate(harness.PERSON_QUESTION))
        expect(isinstance(made, Person), made)


def embeddings() -> None:
    made = OpenAILikeEmbedding(model_name=harness.VECTORS, **ADDRESS).get_text_embedding_batch(["one", "two"])
    expect([len(vector) for vector in made] == [harness.VECTOR_SIZE] * 2, made)


def errors() -> None:
    harness.expect_raised(openai.NotFoundError, lambda: OpenAILike(model="nope", **MODEL).complete("x"), "nope")
    harness.expect_raised(openai.BadRequestError, lambda: llm.complete(harness.TOO_LONG), "maximum context length")


async def cancel() -> None:
    async def ask_forever() -> None:
        endless = OpenAILike(model=harness.ENDLESS, **MODEL)
        async for _ in await endless.astream_chat([ChatMessage(role="user", content=QUESTION)]):
            pass

    await harness.expect_cancelled(ask_forever())


if __name__ == "__main__":
    harness.main("llama-index-llms-openai-like", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": embeddings, "errors": errors, "cancel": cancel,
    })  # fmt: skip

"""langchain-openai: ChatOpenAI, OpenAI and OpenAIEmbeddings."""

import harness
import openai
from harness import ANSWER, CHAT, QUESTION, Person, expect, get_weather
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

ADDRESS = {"base_url": harness.OPENAI_URL, "api_key": harness.KEY, "max_retries": 0}
model = ChatOpenAI(model=CHAT, **ADDRESS)


def chat() -> None:
    answer = model.invoke(QUESTION)
    expect(ANSWER in answer.content and answer.usage_metadata["total_tokens"], answer)
    expect(all(ANSWER in one.content for one in model.batch([QUESTION] * 3)), "batch")
    texts = OpenAI(model=CHAT, max_tokens=4, **ADDRESS).generate(["Once upon", "A city"])  # two prompts in one request
    expect(len(texts.generations) == 2, texts)


def stream() -> None:
    chunks = list(ChatOpenAI(model=CHAT, stream_usage=True, **ADDRESS).stream(QUESTION))
    expect(len(chunks) > 3 and ANSWER in "".join(chunk.content for chunk in chunks), chunks)
    expect(any(chunk.usage_metadata for chunk in chunks), "usage")


def tools() -> None:
    bound = model.bind_tools([get_weather], strict=True)  # without strict, Ember renames the argument
    first = bound.invoke(harness.WEATHER_QUESTION)
    (call,) = first.tool_calls
    harness.expect_weather(call["args"])
    told = ToolMessage(harness.WEATHER_RESULT, tool_call_id=call["id"])
    expect("18" in bound.invoke([("user", harness.WEATHER_QUESTION), first, told]).content, "the second turn")


def forced_tool() -> None:
    for choice in ("any", "get_weather"):
        (call,) = model.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION).tool_calls
        harness.expect_weather(call["args"])


def strict_tool() -> None:
    (call,) = model.bind_tools([get_weather], strict=True, tool_choice="any").invoke(QUESTION).tool_calls
    harness.expect_weather(call["args"])


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        made = model.with_structured_output(Person, method=method).invoke(harness.PERSON_QUESTION)
        expect(isinstance(made, Person), (method, made))
    asked = [("system", harness.JSON_SYSTEM), ("user", harness.PERSON_QUESTION)]
    made = model.with_structured_output(None, method="json_mode").invoke(asked)
    expect(isinstance(made, dict), made)


def embeddings() -> None:
    made = OpenAIEmbeddings(model=harness.VECTORS, check_embedding_ctx_length=False, **ADDRESS).embed_documents(
        ["one", "two"]
    )
    expect([len(vector) for vector in made] == [harness.VECTOR_SIZE] * 2, made)


def errors() -> None:
    harness.expect_raised(openai.NotFoundError, lambda: ChatOpenAI(model="nope", **ADDRESS).invoke("x"), "nope")
    harness.expect_raised(ContextOverflowError, lambda: model.invoke(harness.TOO_LONG))


def cancel() -> None:
    harness.expect_stops(ChatOpenAI(model=harness.ENDLESS, **ADDRESS).stream(QUESTION), 3)


if __name__ == "__main__":
    harness.main("langchain-openai", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": embeddings, "errors": errors, "cancel": cancel,
    })  # fmt: skip

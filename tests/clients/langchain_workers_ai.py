"""langchain-cloudflare: ChatCloudflareWorkersAI and CloudflareWorkersAIEmbeddings."""

import harness
from harness import ANSWER, QUESTION, Anything, expect, get_weather
from langchain_cloudflare import ChatCloudflareWorkersAI, CloudflareWorkersAIEmbeddings
from langchain_core.messages import ToolMessage

ADDRESS = {"account_id": "account", "api_token": harness.KEY, "base_url": harness.CLOUDFLARE_URL, "temperature": 0.0}
NATIVE = ChatCloudflareWorkersAI(model="@pilotlight/ember", **ADDRESS)
COMPATIBLE = ChatCloudflareWorkersAI(model="@pilotlight/ember", endpoint_format="openai_compatible", **ADDRESS)
MODELS = (NATIVE, COMPATIBLE)  # the two API paths of the client


def chat() -> None:
    for model in MODELS:
        expect(ANSWER in model.invoke(QUESTION).content, model)


def stream() -> None:
    for model in MODELS:
        expect(ANSWER in "".join(chunk.content for chunk in model.stream(QUESTION)), model)


def tools() -> None:
    for model in MODELS:
        bound = model.bind_tools([harness.STRICT_TOOL])
        first = bound.invoke(harness.WEATHER_QUESTION)
        (call,) = first.tool_calls
        harness.expect_weather(call["args"])
        told = ToolMessage(harness.WEATHER_RESULT, tool_call_id=call["id"])
        expect("18" in bound.invoke([("user", harness.WEATHER_QUESTION), first, told]).content, "the second turn")


def forced_tool() -> None:
    for model in MODELS:
        for choice in ("any", "get_weather"):
            (call,) = model.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION).tool_calls
            harness.expect_weather(call["args"])


def strict_tool() -> None:
    for model in MODELS:
        (call,) = model.bind_tools([harness.STRICT_TOOL], tool_choice="any").invoke(QUESTION).tool_calls
        harness.expect_weather(call["args"])


def structured() -> None:
    """Check structured outputs.

    The client sends json_object for both methods if it does not know the model, so any object is accepted.
    """
    asked = [("system", harness.JSON_SYSTEM), ("user", harness.PERSON_QUESTION)]
    for model in MODELS:
        for method in ("json_schema", "json_mode"):
            made = model.with_structured_output(Anything, method=method).invoke(asked)
            expect(isinstance(made, Anything), (method, made))


def embeddings() -> None:
    made = CloudflareWorkersAIEmbeddings(
        model_name="@test/vectors",
        account_id="account",
        api_token=harness.KEY,
        api_base_url=f"{harness.CLOUDFLARE_URL}/accounts",
    ).embed_documents(["one", "two"])
    expect([len(vector) for vector in made] == [harness.VECTOR_SIZE] * 2, made)


def errors() -> None:
    missing = ChatCloudflareWorkersAI(model="@test/nope", **ADDRESS)
    harness.expect_raised(Exception, lambda: missing.invoke("x"))


def cancel() -> None:
    harness.expect_stops(ChatCloudflareWorkersAI(model="@test/endless", **ADDRESS).stream(QUESTION), 1)


if __name__ == "__main__":
    harness.main("langchain-cloudflare", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": embeddings, "errors": errors, "cancel": cancel,
    })  # fmt: skip

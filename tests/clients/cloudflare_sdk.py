"""cloudflare, the Python package: ai.run, ai.models and ai.finetunes."""

import array
import json
import struct
from pathlib import Path
from typing import Any

import cloudflare
import harness
from harness import ANSWER, QUESTION, expect

MODEL, ACCOUNT = "@pilotlight/ember", "account"
client = cloudflare.Cloudflare(api_token=harness.KEY, base_url=harness.CLOUDFLARE_URL, max_retries=0)
USER = {"role": "user", "content": QUESTION}
RUN_TOOL = harness.TOOL["function"]  # Cloudflare's form, without OpenAI's outer object


def run(model: str = MODEL, **inputs: Any) -> Any:
    """Run a model; inputs that the package has no arguments for are sent in `extra_body`."""
    extra = {name: inputs.pop(name) for name in ("tool_choice", "guided_json") if name in inputs}
    return plain(client.ai.run(model, account_id=ACCOUNT, extra_body=extra or None, **inputs))


def plain(result: Any) -> Any:
    return result.model_dump() if hasattr(result, "model_dump") else result


def chat() -> None:
    expect(ANSWER in run(messages=[USER])["response"], "messages")
    expect(run(prompt=QUESTION)["usage"]["total_tokens"] > 0, "prompt")
    listed = [model for model in client.ai.models.list(account_id=ACCOUNT, per_page=1)]
    expect(len(listed) == 5, listed)
    tasks = [plain(task)["name"] for task in client.ai.tasks.list(account_id=ACCOUNT)]
    expect(tasks == ["Text Generation", "Text Embeddings", "Text Classification"], tasks)
    schema = plain(client.ai.models.schema.get(account_id=ACCOUNT, model=MODEL))
    expect({"input", "output"} <= schema.keys(), schema)
    expect(client.user.tokens.verify().status == "active", "tokens")


def stream() -> None:
    inputs = {"messages": [USER], "stream": True}
    with client.ai.with_streaming_response.run(MODEL, account_id=ACCOUNT, **inputs) as answer:
        lines = [line for line in answer.iter_lines() if line]
    expect(lines[-1] == "data: [DONE]" and '"usage"' in lines[-2], lines)
    texts = [json.loads(line.removeprefix("data: "))["response"] for line in lines[:-1]]
    expect(ANSWER in "".join(texts), texts)


def tools() -> None:
    user = {"role": "user", "content": harness.WEATHER_QUESTION}
    for tool in (RUN_TOOL, harness.TOOL):
        (call,) = run(messages=[user], tools=[tool])["tool_calls"]
        harness.expect_weather(call["arguments"])
    called = {"role": "assistant", "content": json.dumps(call)}
    final = run(messages=[user, called, {"role": "tool", "content": harness.WEATHER_RESULT}], tools=[RUN_TOOL])
    expect(final["response"], final)


def forced_tool() -> None:
    for choice in ("required", "any", {"type": "function", "function": {"name": "get_weather"}}):
        (call,) = run(messages=[USER], tools=[harness.TOOL], tool_choice=choice)["tool_calls"]
        harness.expect_weather(call["arguments"])


def strict_tool() -> None:
    (call,) = run(messages=[USER], tools=[harness.STRICT_TOOL], tool_choice="required")["tool_calls"]
    harness.expect_weather(call["arguments"])


def structured() -> None:
    response_format = {"type": "json_schema", "json_schema": harness.BOUNDED_WEATHER}
    inputs = {"messages": [USER], "response_format": response_format}
    answer = run(**inputs)["response"]
    expect(isinstance(answer, dict), answer)
    harness.expect_weather(answer)


def embeddings() -> None:
    answer = run("@test/vectors", text=["one", "two"])
    expect([len(vector) for vector in answer["data"]] == [harness.VECTOR_SIZE] * 2, answer["shape"])


def adapter_files() -> dict[str, bytes]:
    """Return the files of an adapter for Ember, as PEFT would save them; it changes Ember's answers."""
    shape = json.loads((Path(harness.CHAT_FILES) / "config.json").read_text())
    hidden, name = shape["hidden_size"], "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"
    header, content = {}, b""
    for half, rows, columns in (("A", 4, shape["intermediate_size"]), ("B", hidden, 4)):
        values = array.array("f", [0.1 * (i % 7 - 3) for i in range(rows * columns)]).tobytes()
        place = [len(content), len(content) + len(values)]
        header[name.format(half)] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": place}
        content += values
    told = json.dumps(header).encode()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 400, "target_modules": ["down_proj"], "model_type": "llama"}
    weights = struct.pack("<Q", len(told)) + told + content
    return {"adapter_model.safetensors": weights, "adapter_config.json": json.dumps(config).encode()}


def finetunes() -> None:
    tunes = client.ai.finetunes
    made = tunes.create(account_id=ACCOUNT, model=MODEL, name="other-answers", description="of a test")
    expect(made.model == "ember" and made.public is False, made)
    for name, content in adapter_files().items():
        kept = tunes.assets.create(made.id, account_id=ACCOUNT, file=content, file_name=name)
        expect(kept.success, kept)
    listed = tunes.list(account_id=ACCOUNT)
    expect([each.name for each in listed] == ["other-answers"], listed)
    expect(list(tunes.public.list(account_id=ACCOUNT, limit=5)) == [], "public")
    plain_answer = run(messages=[USER])["response"]
    answers = {run(messages=[USER], max_tokens=20, lora=lora)["response"] for lora in (made.id, "other-answers")}
    expect(len(answers) == 1 and plain_answer not in answers, answers)
    taken = {"account_id": ACCOUNT, "model": MODEL, "name": "other-answers"}
    harness.expect_raised(cloudflare.ConflictError, lambda: tunes.create(**taken), "other-answers")
    pickled = {"account_id": ACCOUNT, "file": b"x", "file_name": "adapter_model.bin"}
    harness.expect_raised(cloudflare.APIStatusError, lambda: tunes.assets.create(made.id, **pickled), "file")
    client.delete(f"/accounts/{ACCOUNT}/ai/finetunes/{made.id}", cast_to=object)  # Cloudflare has no such call
    expect(tunes.list(account_id=ACCOUNT) == [], "it is removed")


def errors() -> None:
    harness.expect_raised(cloudflare.BadRequestError, lambda: run("@test/nope", prompt="x"), "nope")
    harness.expect_raised(cloudflare.BadRequestError, lambda: run(prompt="x", temperature=9), "temperature")
    long = harness.expect_raised(cloudflare.APIStatusError, lambda: run(prompt=harness.TOO_LONG), "context length")
    expect(long.status_code == 413, long)


def cancel() -> None:
    inputs = {"messages": [USER], "stream": True}
    with client.ai.with_streaming_response.run("@test/endless", account_id=ACCOUNT, **inputs) as answer:
        lines = answer.iter_lines()
        next(lines)
        harness.expect_running()
    harness.expect_idle()


if __name__ == "__main__":
    harness.main("cloudflare", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": embeddings, "fine-tunes": finetunes, "errors": errors, "cancel": cancel,
    })  # fmt: skip

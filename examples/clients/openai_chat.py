"""Stream a conversation with the official OpenAI client: `pip install openai`, `pilotlight up`, then run this."""

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8787/v1", api_key="anything")
messages: list[dict[str, str]] = []
for question in ("My name is Robin. What is the airport code of Lisbon?", "What is my name?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    answer = ""
    stream = client.chat.completions.create(
        model="ember", messages=messages, stream=True, stream_options={"include_usage": True}  # type: ignore[arg-type]
    )  # fmt: skip
    for chunk in stream:
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            print(
                f"\n  ({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.prompt_tokens_details.cached_tokens} of them cached)"
            )
    messages.append({"role": "assistant", "content": answer})

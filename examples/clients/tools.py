"""Let the embedded model call a tool, send it the result, and print its final answer."""

import json

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8787/v1", api_key="anything")
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages: list[dict[str, object]] = [{"role": "user", "content": "What is the weather in Paris?"}]
first = client.chat.completions.create(model="ember", messages=messages, tools=tools).choices[0].message  # type: ignore[call-overload]
for call in first.tool_calls or ():
    print(f"calls {call.function.name}({call.function.arguments})")
    messages.append(first.model_dump(exclude_none=True))
    messages.append(
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 18, "sky": "clear"})}
    )
final = client.chat.completions.create(model="ember", messages=messages, tools=tools).choices[0].message  # type: ignore[call-overload]
print(final.content)

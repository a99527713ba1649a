"""A chat with a tool: ask the model, run the tool that it calls, and stream its answer to the result.

curl -N localhost:8787 -d '{"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}'
"""

import json

from workers import Response, WorkerEntrypoint

WEATHER = {"Paris": {"temperature": 18, "sky": "clear"}, "Oslo": {"temperature": 4, "sky": "snow"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.method != "POST":
            return Response('POST {"messages": [...]}', status=405)
        messages = (await request.json())["messages"]
        return Response(self.answer(messages), headers={"content-type": "text/event-stream"})

    async def answer(self, messages):
        first = await self.env.AI.run(self.env.MODEL, {"messages": messages, "tools": TOOLS, "max_tokens": 100})
        calls = first.get("tool_calls") or []
        for call in calls:
            name, arguments = call["name"], call["arguments"]
            yield event({"tool": name, "arguments": arguments})
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [tool_call(call)]},
                {
                    "role": "tool",
                    "tool_call_id": "call_0",
                    "name": name,
                    "content": json.dumps(get_weather(**arguments)),
                },
            ]
        if not calls:
            yield event({"response": first["response"]})
        else:
            inputs = {"messages": messages, "tools": TOOLS, "max_tokens": 100, "stream": True}
            async for chunk in await self.env.AI.run(self.env.MODEL, inputs):
                yield chunk
            return
        yield "data: [DONE]\n\n"


def get_weather(city):
    return WEATHER.get(city, {"error": f"no weather known for {city}"})


def tool_call(call):
    arguments = json.dumps(call["arguments"])
    return {"id": "call_0", "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def event(data):
    return f"data: {json.dumps(data)}\n\n"

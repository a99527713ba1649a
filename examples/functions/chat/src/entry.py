"""A streaming chat: POST {"question": "..."} and read the answer's server-sent events as the model makes them."""

from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.method != "POST":
            return Response("POST a JSON object with a question\n", status=405, headers={"allow": "POST"})
        question = (await request.json())["question"]
        messages = [{"role": "user", "content": question}]
        stream = await self.env.AI.run("@pilotlight/ember", {"messages": messages, "stream": True, "max_tokens": 64})
        return Response(stream, headers={"content-type": "text/event-stream"})

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

import asgi
from workers import WorkerEntrypoint

app = FastAPI(title="Questions")


class Question(BaseModel):
    text: str = Field(min_length=1, max_length=2000)
    max_tokens: int = Field(64, ge=1, le=512)


@app.get("/")
async def models(request: Request) -> list[str]:
    env = request.scope["env"]
    return [model["name"] for model in await env.AI.models()]


@app.post("/ask")
async def ask(question: Question, request: Request) -> StreamingResponse:
    env = request.scope["env"]
    inputs = {"prompt": question.text, "max_tokens": question.max_tokens, "stream": True}
    return StreamingResponse(await env.AI.run(env.MODEL, inputs), media_type="text/event-stream")


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)

"""A cron summary: requests add events at any time, and once an hour the model sums them up in a sentence.

curl localhost:8787/ -d 'the pump was switched on'
curl 'localhost:8787/cdn-cgi/handler/scheduled?cron=0+*+*+*+*'    # under `pilotlight dev`: run it now
curl localhost:8787/
"""

import json
import uuid
from datetime import UTC, datetime

from workers import Response, WorkerEntrypoint

DAY_S = 86_400


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.method == "POST":
            now = datetime.now(UTC).isoformat()
            await self.env.EVENTS.put(f"event:{now}:{uuid.uuid4()}", await request.text(), expirationTtl=DAY_S)
            return Response("kept", status=202)
        digest = await self.env.EVENTS.get("digest", "json")
        return Response.json(digest or {"summary": None, "events": 0})

    async def scheduled(self, controller, env, ctx):
        events = await self.env.EVENTS.list(prefix="event:", limit=50)
        texts = [await self.env.EVENTS.get(key.name) for key in events["keys"]]
        summary = await self.summary(texts) if texts else "Nothing happened."
        at = datetime.fromtimestamp(controller.scheduledTime / 1000, UTC)
        digest = {"at": at.isoformat(), "cron": controller.cron, "events": len(texts), "summary": summary}
        await self.env.EVENTS.put("digest", json.dumps(digest))
        for key in events["keys"]:
            await self.env.EVENTS.delete(key.name)

    async def summary(self, texts):
        prompt = "Say in one sentence what happened:\n" + "\n".join(f"- {text}" for text in texts)
        answer = await self.env.AI.run(self.env.MODEL, {"prompt": prompt, "max_tokens": 40})
        return answer.response

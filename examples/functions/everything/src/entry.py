"""A function in which each path uses one binding.

It follows only the public documentation of Cloudflare's Python Workers, and could be deployed there unchanged.
"""

import json
from urllib.parse import urlparse

from js import Object, console
from pyodide.ffi import to_js
from workers import DurableObject, Response, WorkerEntrypoint, env


class MyDurableObject(DurableObject):
    def __init__(self, ctx, env):
        super().__init__(ctx, env)
        self.ctx.storage.sql.exec("CREATE TABLE IF NOT EXISTS visits (name TEXT PRIMARY KEY, count INTEGER)")

    async def fetch(self, request):
        result = self.ctx.storage.sql.exec("SELECT 'Hello, World!' as greeting").one()
        return Response(result.greeting)

    async def visit(self, name):
        cursor = self.ctx.storage.sql.exec(
            "INSERT INTO visits VALUES (?, 1) ON CONFLICT DO UPDATE SET count = count + 1 RETURNING count", name
        )
        await self.ctx.storage.put("last", name)
        return cursor.one().count

    async def last(self):
        return await self.ctx.storage.get("last")


class Named(WorkerEntrypoint):
    async def add(self, a, b):
        return a + b


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = urlparse(request.url).path.strip("/")
        handler = getattr(self, f"on_{path}", None)
        if handler is None:
            return Response("Not Found", status=404)
        return await handler(request)

    async def on_vars(self, request):
        return Response.json([self.env.GREETING, env.GREETING, self.env.SETTINGS.levels[1]])

    async def on_kv(self, request):
        await self.env.FOO.put("bar", "baz")
        bar = await self.env.FOO.get("bar")
        return Response(bar)

    async def on_d1(self, request):
        await self.env.DB.exec("CREATE TABLE IF NOT EXISTS qtable (id INTEGER PRIMARY KEY, quote TEXT NOT NULL);")
        await self.env.DB.prepare("INSERT OR REPLACE INTO qtable VALUES (?, ?)").bind(1, "Be curious").run()
        results = await self.env.DB.prepare("SELECT quote FROM qtable ORDER BY id LIMIT 1").all()
        return Response.json(results.results[0].quote)

    async def on_r2(self, request):
        await self.env.BUCKET.put("folder/file.txt", "stored")
        stored = await self.env.BUCKET.get("folder/file.txt")
        missing = await self.env.BUCKET.get("nothing")
        listed = await self.env.BUCKET.list()
        return Response.json([await stored.text(), missing is None, [entry.key for entry in listed.objects]])

    async def on_queue(self, request):
        message = to_js({"job": "count"}, dict_converter=Object.fromEntries)
        await self.env.QUEUE.send(message)
        return Response("sent")

    async def on_queued(self, request):
        return Response.json(await self.env.FOO.get("queued"))

    async def on_object(self, request):
        id = self.env.MY_DURABLE_OBJECT.idFromName("a")
        stub = self.env.MY_DURABLE_OBJECT.get(id)
        greeting = await stub.fetch(request.url)
        return Response.json([await greeting.text(), await stub.visit("ada"), await stub.last()])

    async def on_service(self, request):
        return Response.json(await self.env.SERVICE.add(1, 2))

    async def on_assets(self, request):
        return await self.env.ASSETS.fetch("http://assets.local/page")

    async def on_limit(self, request):
        outcomes = [await self.env.LIMITER.limit({"key": "me"}) for _ in range(3)]
        return Response.json([outcome.success for outcome in outcomes])

    async def on_ai(self, request):
        answer = await self.env.AI.run("@pilotlight/ember", {"prompt": "Hello", "max_tokens": 8})
        return Response.json({"response": answer.response})

    async def on_last(self, request):
        return Response.json(json.loads(await self.env.FOO.get("scheduled") or "null"))

    async def scheduled(self, controller, env, ctx):
        console.log(f"{controller.cron} was triggered")
        ctx.waitUntil(self.env.FOO.put("scheduled", json.dumps(controller.cron)))

    async def queue(self, batch):
        for message in batch.messages:
            await self.env.FOO.put("queued", message.body.job)
            message.ack()

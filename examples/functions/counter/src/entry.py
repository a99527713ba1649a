from urllib.parse import urlsplit

from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        name = urlsplit(request.url).path.strip("/")
        if request.method == "GET":
            found = await self.env.COUNTS.list(prefix=name)
            counts = {key.name: int(await self.env.COUNTS.get(key.name)) for key in found["keys"]}
            return Response.json(counts)
        if request.method != "POST" or not name:
            return Response("POST /NAME adds one, GET / returns the counts", status=405)
        # A key-value store has no transactions: two concurrent requests may count as one.
        count = int(await self.env.COUNTS.get(name) or 0) + 1
        await self.env.COUNTS.put(name, str(count), {"metadata": {"client": request.headers.get("cf-connecting-ip")}})
        return Response.json({name: count})

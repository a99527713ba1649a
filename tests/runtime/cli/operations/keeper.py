"""A function that on request writes to every kind of storage, or returns the content of all."""

from urllib.parse import urlparse

from workers import DurableObject, Response, WorkerEntrypoint


class Log(DurableObject):
    async def write(self, number):
        await self.ctx.storage.put(f"{number:06d}", number)

    async def written(self):
        return sorted(dict(await self.ctx.storage.list()).values())


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        word, _, number = urlparse(request.url).path.strip("/").partition("/")
        log = self.env.LOG.get(self.env.LOG.idFromName("log"))
        if word == "make":
            await self.env.DB.exec("CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY)")
        elif word == "write":
            await self.env.KV.put(number, "x" * 100 + number)
            await self.env.DB.prepare("INSERT INTO numbers VALUES (?)").bind(int(number)).run()
            await self.env.BUCKET.put(number, f"object {number} " * 100)
            await log.write(int(number))
            await self.env.QUEUE.send({"number": int(number)})
        elif word == "replace":
            await self.env.BUCKET.put("often", number * 1000)
        elif word == "read":
            rows = await self.env.DB.prepare("SELECT n FROM numbers ORDER BY n").all()
            found = {"d1": [row.n for row in rows.results], "object": [*await log.written()], "kv": [], "r2": []}
            for n in found["d1"]:
                stored, value = await self.env.BUCKET.get(str(n)), await self.env.KV.get(str(n))
                found["r2"] += [n] if stored is not None and await stored.text() == f"object {n} " * 100 else []
                found["kv"] += [n] if value == "x" * 100 + str(n) else []
            often = await self.env.BUCKET.get("often")
            found["often"] = len(set(await often.text()))
            found["secret"] = self.env.TOKEN
            return Response.json(found)
        return Response("done")

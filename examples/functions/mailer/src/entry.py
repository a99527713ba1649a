"""A queue consumer: requests queue jobs and return at once.

Jobs are handled later in batches, at least once, and retried after a failure.

curl localhost:8787/ -d '{"to": ["ada@example.com", "nobody"]}'
curl localhost:8787/
"""

from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.method == "POST":
            addresses = (await request.json())["to"]
            await self.env.JOBS.sendBatch([{"body": {"to": address}} for address in addresses])
            return Response.json({"queued": len(addresses)}, status=202)
        states = await self.env.STATE.list()
        return Response.json({key.name: await self.env.STATE.get(key.name) for key in states["keys"]})

    async def queue(self, batch):
        for message in batch.messages:
            address = message.body["to"]
            if batch.queue == "mailer-dead":
                await self.env.STATE.put(address, "given up")
            elif "@" in address:
                await self.send(address)
            else:
                print(f"{address} is not an address, attempt {message.attempts}")
                message.retry()

    async def send(self, address):
        """Record an address as sent. A job may be delivered twice, so this must be idempotent."""
        await self.env.STATE.put(address, "sent")

"""A queue consumer: requests put jobs into a queue and return at once; batches of them are done later, again where one fails, at least once.

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
                print(f"{address} is no address, attempt {message.attempts}")
                message.retry()

    async def send(self, address):
        """Delivered at least once, so what is done twice must do no harm: here the second writes what the first has written."""
        await self.env.STATE.put(address, "sent")

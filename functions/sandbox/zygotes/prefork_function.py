"""The function that prefork.py runs to warm up the zygote: operations that most functions use."""

from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):  # type: ignore[no-untyped-def]
        return Response(f"{request.method} {request.url}", headers={"x-host": request.headers.get("host", "")})

"""The function that warms up the zygote (prefork.py): common operations of functions."""

from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):  # type: ignore[no-untyped-def]
        return Response(f"{request.method} {request.url}", headers={"x-host": request.headers.get("host", "")})

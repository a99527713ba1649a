"""The service `js`: methods for the Python half, and calls of that half's methods."""

from datetime import UTC, datetime

from workers import Request, Response, WorkerEntrypoint


class JsRpcTester(WorkerEntrypoint):
    async def noArgs(self):
        return "hello from js"

    async def oneArg(self, given):
        return str(given)

    async def identity(self, given):
        return given

    async def handleResponse(self, response):
        assert isinstance(response, Response)
        return response

    async def handleRequest(self, request):
        assert isinstance(request, Request)
        return request


async def test(ctrl, env, ctx):
    for value in (1, "test", [1, 2, 3], {"key": 42}, 42, 1.2345, False, True, None, datetime.now(UTC)):
        assert await env.PythonRpc.identity(value) == value, value
    response = await env.PythonRpc.handle_response(Response("this is a response"))
    assert await response.text() == "this is a response"
    request = await env.PythonRpc.handle_request(Request("https://test.com", method="POST"))
    assert request.method == "POST"

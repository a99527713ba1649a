"""The service `tester`: a client that sends one message and waits for the reply."""

import asyncio


async def test(ctrl, env, ctx):
    response = await env.PYTHON.fetch("http://example.com/websocket", headers={"Upgrade": "websocket"})
    socket = response.webSocket
    assert socket is not None, "no WebSocket"
    socket.accept()
    received = asyncio.get_running_loop().create_future()
    socket.addEventListener("message", lambda message: received.set_result(message.data))
    socket.send("test")
    assert await asyncio.wait_for(received, 10) == "hello"
    socket.close()

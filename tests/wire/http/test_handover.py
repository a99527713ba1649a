"""Hypercorn is imported by the first connection that needs it, and by nothing before."""

import subprocess
import sys

SCRIPT = """
import asyncio, sys
import runtime.serve, edge_router.serve
from wire.http.handover import Handover
from wire.http.server import Server
from wire.http.listen import bind

def found():
    return sorted({name.partition(".")[0] for name in sys.modules} & {"hypercorn", "h2", "h11", "wsproto", "priority", "hpack"})

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

async def main():
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    others = Handover(app)
    server = Server(app, others=others, http2=True)
    await server.start(listener)
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(2):
        writer.write(b"POST / HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 3\\r\\n\\r\\none")
        await reader.readuntil(b"ok")
    print(found())
    opened = []
    for _ in range(3):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        opened.append((reader, writer))
    print({(await reader.readexactly(9))[3] for reader, _ in opened})
    print(found())
    await others.stop()
    await server.stop(0.1)

asyncio.run(main())
"""


def test_ordinary_requests_import_nothing_of_hypercorn_and_http2_does() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "{4}", "['h11', 'h2', 'hpack', 'hypercorn', 'priority', 'wsproto']"]
    assert done.stderr == ""

"""TCP for functions, in real isolates: allowed connections, denied ones, and attacks on the broker."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pilotlight.functions.host.network.egress import SOCKET_BUFFER_BYTES
from tests.functions.conftest import ServedMaker

HEAD = """
from workers import Response, WorkerEntrypoint
import asyncio, errno, json, os, socket, urllib.request

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        port = int(request.url.rpartition("/")[2])
"""


def default(body: str) -> str:
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return f"{HEAD}{lines}\n"


@asynccontextmanager
async def http_server() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line == b"\r\n":
                writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi")
                await writer.drain()
                break
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("tier", [1, 2])
async def test_plain_and_asynchronous_clients_reach_what_the_site_allows(make_served: ServedMaker, tier: int) -> None:
    source = """
found = [urllib.request.urlopen(f"http://localhost:{port}/").read().decode()]
with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    plain.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
    found.append(plain.makefile().read()[-2:])
reader, writer = await asyncio.open_connection("localhost", port)
writer.write(b"GET / HTTP/1.0\\r\\n\\r\\n")
found.append((await reader.read())[-2:].decode())
writer.close()
loose = socket.socket()
loose.setblocking(False)
await asyncio.get_running_loop().sock_connect(loose, ("127.0.0.1", port))
found += [loose.getpeername()[1] == port, loose.getblocking(), socket.gethostbyname("localhost")]
return Response.json(found)
"""
    async with http_server() as port, make_served(tier=tier, egress_allow=["localhost", "127.0.0.1"]) as served:
        served.add(default(source))
        assert json.loads(await served.get(f"/{port}")) == ["hi", "hi", "hi", True, False, "127.0.0.1"]


async def test_a_connection_is_refused_where_the_policy_says_so(make_served: ServedMaker) -> None:
    source = """
def why(act):
    try:
        act()
    except OSError as error:
        return [type(error).__name__, str(error)]
return Response.json([
    why(lambda: socket.create_connection(("10.0.0.1", 80))),
    why(lambda: socket.create_connection(("127.0.0.1", port))),
    why(lambda: socket.create_connection(("169.254.169.254", 80))),
    why(lambda: socket.create_connection(("8.8.8.8", 25))),
    why(lambda: socket.getaddrinfo("localhost", port)),
    why(lambda: socket.getaddrinfo("no.such.invalid", 80)),
    why(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
    why(lambda: socket.socket().bind(("0.0.0.0", 0))),
    socket.socket().connect_ex(("10.0.0.1", 80)),
])
"""
    async with http_server() as port, make_served() as served:
        served.add(default(source))
        *found, number = json.loads(await served.get(f"/{port}"))
    names, sentences = [each[0] for each in found], [each[1] for each in found]
    assert names == ["PermissionError"] * 4 + ["gaierror"] * 2 + ["PermissionError"] * 2
    assert "not a public address" in sentences[0]
    assert "on the site's own machine" in sentences[1]
    assert "not a public address" in sentences[2]
    assert "port 25 is closed" in sentences[3]
    assert "on the site's own machine" in sentences[4]
    assert sentences[5].count("[Errno") == 1
    assert "TCP connections only" in sentences[6]
    assert number == 13


async def test_connections_count_as_subrequests(make_served: ServedMaker) -> None:
    source = """
for count in range(10):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError as error:
        return Response.json([count, str(error)])
"""
    async with http_server() as port, make_served(egress_allow=["127.0.0.1"], limits={"subrequests": 4}) as served:
        served.add(default(source))
        count, sentence = json.loads(await served.get(f"/{port}"))
    assert count == 4
    assert "4 subrequests" in sentence


async def test_messages_of_a_hostile_isolate_to_its_broker_do_no_harm(make_served: ServedMaker) -> None:
    """The messages: descriptors that are not sockets, malformed packets, unread replies, a redirected connection."""
    source = """
import brokered_sockets as broker, struct, msgspec
asks = broker._broker
def send(data, fd):
    asks.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else [])
file = os.open("/tmp/x", os.O_CREAT | os.O_RDWR)
for data in (b"nonsense", b"x" * 5000, msgspec.msgpack.encode({"host": 1}), msgspec.msgpack.encode({"host": "127.0.0.1", "port": port})):
    send(data, file)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send(data, other.fileno())
    other.close()
send(b"x", -1)
held = socket.create_connection(("127.0.0.1", port))
turned = []
for act in (lambda: socket.socket.__base__.connect(held, ("10.0.0.1", 80)), lambda: held.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)):
    try:
        turned.append(act())
    except OSError as error:
        turned.append(error.errno)
return Response.json([turned, held.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)])
"""
    async with http_server() as port, make_served(egress_allow=["127.0.0.1"]) as served:
        served.add(default(source))
        served.add(default("return Response('fine')"), name="neighbour")
        turned, size = json.loads(await served.get(f"/{port}"))
        assert turned[0] in (1, 13)  # the system call filter refuses it
        assert size == 2 * SOCKET_BUFFER_BYTES
        assert await served.get("/1", name="neighbour") == b"fine"
        assert json.loads(await served.get(f"/{port}"))  # the hostile function itself still works


async def test_a_name_is_resolved_again_where_it_is_connected(make_served: ServedMaker) -> None:
    """Otherwise an isolate could name an allowed host and pass the address of another."""
    source = """
import brokered_sockets as broker
broker._names["10.0.0.1"] = "localhost"
made = socket.create_connection(("10.0.0.1", port))
return Response(made.getpeername()[0])
"""
    async with http_server() as port, make_served(egress_allow=["localhost"]) as served:
        served.add(default(source))
        assert await served.get(f"/{port}") == b"127.0.0.1"


async def test_a_silent_port_is_an_error_and_not_a_wait(make_served: ServedMaker) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    source = "try:\n    socket.create_connection(('127.0.0.1', port))\nexcept ConnectionRefusedError as error:\n    return Response(str(error.errno))"
    async with make_served(egress_allow=["127.0.0.1"]) as served:
        served.add(default(source))
        assert await served.get(f"/{port}") == b"111"

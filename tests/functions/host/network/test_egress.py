"""Addresses that functions may not reach: special ones of the IANA, those of clouds, and those of this machine."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from multidict import CIMultiDict

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import FetchEvent
from pilotlight.functions.host.network import egress as egress_module
from pilotlight.functions.host.network.egress import MAX_REDIRECTS, Egress, is_of_this_machine
from pilotlight.functions.host.subrequests import Dial

pytestmark = pytest.mark.process

NOT_PUBLIC = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.1.2.3",
    "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.9", "192.0.0.10",
    "192.0.0.170", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.1",
    "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::8.8.8.8",
    "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:8.8.8.8", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "64:ff9b:1:fffe::808:808", "100::1", "100:0:0:1::1", "2001::1",
    "2001:2::1", "2001:10::1", "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "3fff::1", "4000::1",
    "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1",
]  # fmt: skip
PUBLIC = [
    "8.8.8.8", "1.1.1.1", "168.63.129.17", "192.0.1.1", "64:ff9b::808:808", "::ffff:8.8.8.8",
    "2002:808:808::1", "2606:4700::1111", "2a00::1",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_denied_by_name_and_in_the_url(address: str) -> None:
    assert Egress().why_denied("example.com", address, 80)
    with pytest.raises(Failure, match="fetch is not allowed there"):
        Egress().check_url(f"http://{f'[{address}]' if ':' in address else address}/")


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_reached(address: str) -> None:
    assert Egress().why_denied("example.com", address, 80) == ""


@pytest.mark.parametrize("url", ["http://127.1/", "http://0x7f000001/", "http://2130706433/", "http://0177.0.0.1/"])
def test_older_spellings_of_an_address_are_judged_as_what_they_mean(url: str) -> None:
    with pytest.raises(Failure, match="fetch is not allowed there"):
        Egress().check_url(url)


@pytest.mark.parametrize(
    ("allowed", "passes"),
    [
        ("127.0.0.1", ["http://127.0.0.1/", "https://127.0.0.1/", "http://127.0.0.1:8443/"]),
        ("127.0.0.1:80", ["http://127.0.0.1/"]),
        ("127.0.0.1:443", ["https://127.0.0.1/"]),
        ("127.0.0.*:8443", ["http://127.0.0.1:8443/"]),
        ("127.0.0.2", []),
    ],
)
def test_what_the_site_file_allows_at_a_port_is_allowed_there_and_a_url_without_one_has_its_schemes(
    allowed: str, passes: list[str]
) -> None:
    egress = Egress([allowed])
    for url in ("http://127.0.0.1/", "https://127.0.0.1/", "http://127.0.0.1:8443/"):
        if url in passes:
            egress.check_url(url)
        else:
            with pytest.raises(Failure, match="fetch is not allowed there") as refused:
                egress.check_url(url)
            assert (refused.value.code, refused.value.status) == ("egress_denied", 403)


@pytest.mark.parametrize(
    "url", ["ftp://8.8.8.8/", "//8.8.8.8/", "http:///x", "http://8.8.8.8:x/", "http://8.8.8.8:70000/", "http://[::1"]
)
def test_what_is_no_url_of_the_web_is_refused_by_name(url: str) -> None:
    with pytest.raises(Failure) as refused:
        Egress().check_url(url)
    assert (refused.value.code, refused.value.status) == ("bad_url", 400)


def test_addresses_of_this_machine_are_known_from_the_kernel() -> None:
    addresses = ("127.0.0.1", "192.0.2.1", "2001:db8::1")
    assert [is_of_this_machine(address) for address in addresses] == [True, False, False]


def test_an_address_of_this_machine_is_denied_at_every_port() -> None:
    """The address is public."""
    is_own = "8.8.4.4".__eq__
    egress = Egress(own_ports=lambda: [8080], is_own=is_own)
    assert "8.8.4.4:9999 is on the site's own machine" in egress.why_denied("8.8.4.4", "8.8.4.4", 9999)
    assert "this site's own" in egress.why_denied("example.com", "8.8.4.4", 8080)
    assert "the site's own machine" in egress.why_denied("example.com", "64:ff9b::808:404", 1)
    assert egress.why_denied("example.com", "8.8.8.8", 8080) == ""
    assert Egress(["8.8.4.4:1"], is_own=is_own).why_denied("8.8.4.4", "8.8.4.4", 1) == ""


@asynccontextmanager
async def far_side(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Start a server with one answer per connection; yield its address and the received bytes."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        heard.append(head + await reader.readexactly(length))
        writer.write(answers[len(heard) - 1] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


async def test_credentials_and_a_form_do_not_follow_a_redirect_to_another_host() -> None:
    async with far_side(b"HTTP/1.1 200 OK\r\n") as (there, elsewhere):
        again, away = b"location: /again\r\n", f"location: {there}/away\r\n".encode()
        answers = (b"HTTP/1.1 307 Same\r\n" + again, b"HTTP/1.1 302 Found\r\n" + away)
        async with far_side(*answers) as (here, first), Egress(("127.0.0.1",)) as egress:
            headers = [("Authorization", "Bearer k"), ("cookie", "c=1"), ("x-own", "1")]
            answer = await egress.fetch(
                FetchEvent(id=1, method="POST", url=f"{here}/form", headers=headers, body=b"a=1"), None
            )
    assert (answer.value["status"], answer.value["redirected"]) == (200, True)
    assert all(b"bearer k" in head.lower() and b"c=1" in head and head.endswith(b"a=1") for head in first)
    assert [head.split(b" HTTP")[0] for head in (*first, *elsewhere)] == [b"POST /form", b"POST /again", b"GET /away"]
    (head,) = elsewhere
    assert b"x-own: 1" in head
    assert b"bearer" not in head.lower()
    assert b"c=1" not in head
    assert b"a=1" not in head


async def fetched(url: str, method: str = "GET", body: bytes = b"", **more: Any) -> Any:
    async with Egress(("127.0.0.1",)) as egress:
        return (await egress.fetch(FetchEvent(id=1, method=method, url=url, body=body, **more), None)).value


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "PUT", "GET"),
        (303, "HEAD", "HEAD"),
        (301, "PUT", "PUT"),
        (308, "POST", "POST"),
    ],
)
async def test_what_is_sent_to_where_a_redirect_leads_depends_on_its_status(
    status: int, method: str, then: str
) -> None:
    moved = f"HTTP/1.1 {status} Moved\r\nlocation: ../there\r\n".encode()
    async with far_side(moved, b"HTTP/1.1 200 OK\r\n") as (here, heard):
        answer = await fetched(f"{here}/a/b", method, b"form", headers=[("content-type", "x/form"), ("x-own", "1")])
    assert (answer["status"], answer["redirected"], answer["url"]) == (200, True, f"{here}/there")
    assert heard[1].split(b" HTTP")[0] == f"{then} /there".encode()
    assert heard[1].endswith(b"form") == (b"x/form" in heard[1]) == (then != "GET")
    assert b"x-own: 1" in heard[1]


async def streamed(url: str, method: str) -> Any:
    """Fetch with a body that can be read once."""

    async def stream() -> AsyncIterator[bytes]:
        yield b"form"

    async with Egress(("127.0.0.1",)) as egress:
        return (await egress.fetch(FetchEvent(id=1, method=method, url=url), cast("Any", stream()))).value


@pytest.mark.parametrize(("method", "status"), [("POST", 307), ("PUT", 301), ("PUT", 302), ("PUT", 308)])
async def test_a_body_that_came_as_a_stream_is_not_sent_a_second_time(method: str, status: int) -> None:
    moved = f"HTTP/1.1 {status} Moved\r\nlocation: /there\r\n".encode()
    async with far_side(moved, b"HTTP/1.1 200 OK\r\n") as (here, heard):
        with pytest.raises(Failure, match="a streamed body cannot be sent again"):
            await streamed(here + "/", method)
    assert len(heard) == 1


async def test_a_streamed_form_becomes_a_get_that_follows_further_redirects() -> None:
    moved = (f"HTTP/1.1 {status} Moved\r\nlocation: /{status}\r\n".encode() for status in (303, 307, 302))
    async with far_side(*moved, b"HTTP/1.1 200 OK\r\n") as (here, heard):
        assert (await streamed(here + "/", "POST"))["status"] == 200
    assert [head.split(b" HTTP")[0] for head in heard] == [b"POST /", b"GET /303", b"GET /307", b"GET /302"]


async def test_a_function_learns_the_end_of_a_redirect_and_loops_are_limited() -> None:
    moved = b"HTTP/1.1 302 Found\r\nlocation: /again\r\n"
    async with far_side(*[moved] * (MAX_REDIRECTS + 3)) as (here, heard):
        answer = await fetched(here + "/", options={"redirect": "manual"})
        assert (answer["status"], answer["redirected"]) == (302, False)
        with pytest.raises(Failure, match="was redirected"):
            await fetched(here + "/", options={"redirect": "error"})
        with pytest.raises(Failure, match=f"gave up after {MAX_REDIRECTS} redirects"):
            await fetched(here + "/")
    assert len(heard) == MAX_REDIRECTS + 3


@pytest.mark.parametrize("location", ["http://[", "http://h:x/"])
async def test_a_redirect_to_an_invalid_url_fails_by_name(location: str) -> None:
    async with far_side(f"HTTP/1.1 302 Found\r\nlocation: {location}\r\n".encode()) as (here, _):
        with pytest.raises(Failure, match="is no URL"):
            await fetched(here + "/")


async def test_a_redirect_is_judged_as_any_other_address() -> None:
    async with far_side(b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\n") as (here, heard):
        with pytest.raises(Failure, match=r"169\.254\.169\.254, which is not a public address"):
            await fetched(here + "/")
    assert len(heard) == 1


async def test_what_frames_a_request_is_the_clients_own_and_never_the_functions() -> None:
    headers = [
        ("Host", "elsewhere"),
        ("Content-Length", "7"),
        ("Transfer-Encoding", "chunked"),
        ("Proxy-Authorization", "x"),
        ("X-Own", "1"),
    ]
    async with far_side(b"HTTP/1.1 200 OK\r\n") as (here, heard):
        await fetched(here + "/", "POST", b"abc", headers=headers)
    head = heard[0].lower()
    assert b"x-own: 1" in head
    assert b"content-length: 3" in head
    assert not any(word in head for word in (b"elsewhere", b"chunked", b"proxy-authorization"))


@pytest.mark.parametrize(("host", "port"), [("8.8.8.8", 25), ("8.8.8.8", 0), ("8.8.8.8", 65536), ("127.0.0.1", 80)])
async def test_a_function_dials_no_mail_server_no_invalid_port_and_not_this_machine(host: str, port: int) -> None:
    async with Egress() as egress:
        with pytest.raises(Failure):
            await egress.dial(Dial(host, port, connects=True))


async def test_a_function_dials_what_the_site_allows_at_that_port_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        async with Egress((f"127.0.0.1:{port}",)) as egress:
            assert await egress.dial(Dial("127.0.0.1", port, connects=False)) == ["127.0.0.1"]
            connection = await egress.dial(Dial("127.0.0.1", port, connects=True))
            assert isinstance(connection, socket.socket)
            assert connection.getpeername() == ("127.0.0.1", port)
            connection.close()
            with pytest.raises(Failure, match="on the site's own machine"):
                await egress.dial(Dial("127.0.0.1", port - 1, connects=False))


def place(host: str, port: int) -> Any:
    return {"host": host, "port": port, "family": socket.AF_INET}


async def test_the_first_address_that_takes_a_connection_has_it_with_small_buffers_and_a_pulse() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing, taking = (place(*each.getsockname()) for each in (closed, listener))
        before = len(os.listdir("/proc/self/fd"))
        connection = await egress_module.connect_first([refusing, taking])
        with connection:
            assert connection.getpeername() == listener.getsockname()
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                assert connection.getsockopt(socket.SOL_SOCKET, option) <= 2 * egress_module.SOCKET_BUFFER_BYTES
        with pytest.raises(ConnectionRefusedError):
            await egress_module.connect_first([refusing, refusing])
        with pytest.raises(OSError, match="the host name has no address"):
            await egress_module.connect_first([])
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (
            [("Content-Encoding", "gzip"), ("Content-Length", "9"), ("Transfer-Encoding", "chunked"), ("X-Own", "1")],
            [["x-own", "1"]],
        ),
        (
            [("Content-Length", "9"), ("Transfer-Encoding", "chunked"), ("Set-Cookie", "a"), ("Set-Cookie", "b")],
            [["content-length", "9"], ["set-cookie", "a"], ["set-cookie", "b"]],
        ),
    ],
)
def test_an_answer_that_was_unpacked_says_nothing_of_how_it_was_packed(
    sent: list[tuple[str, str]], told: list[list[str]]
) -> None:
    response = SimpleNamespace(status=201, headers=CIMultiDict(sent), url="http://h/")
    answer = egress_module.reply_of(cast("Any", response), redirected=True)
    assert answer.value == {"status": 201, "headers": told, "url": "http://h/", "redirected": True}

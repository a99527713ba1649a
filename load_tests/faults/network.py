"""Fault rows: links that lose packets, and clients that vanish or stay silent.

They need the packet filter of a private namespace.
"""

import socket
import time
from urllib.parse import urlsplit

import orjson

from load_tests.faults.rows import PAUSE_S, Row, Strike

DARK_S = 8.0


def rows() -> list[Row]:
    return [
        Row("blackhole a site for 25 s", lambda it: _lossy(it, 25), needs_filter=True),
        Row("lose a site's own packets for 20 s", lambda it: _lossy(it, 20, to_site=False), needs_filter=True),
        Row("blackhole a site for 2 s", lambda it: _lossy(it, 2), needs_filter=True),
        Row("lose 20 % between router and all sites for 20 s", _gray, needs_filter=True, max_tokens=400),
        Row("all sites dark for 8 s", _all_dark, needs_filter=True, pause_s=DARK_S + PAUSE_S),
        Row("300 half-open clients", half_open, ends_healthy=True),
        Row("12 clients vanish", vanish, needs_filter=True),
    ]


def _lossy(it: Strike, seconds: float, to_site: bool = True) -> None:
    it.links.lose(it.network.site_urls[it.busiest()], to_site=to_site)
    time.sleep(seconds)
    it.links.heal()


def _gray(it: Strike) -> None:
    for url in it.network.site_urls.values():
        it.links.lose(url, share=0.2)
    time.sleep(20)
    it.links.heal()


def _all_dark(it: Strike) -> None:
    for url in it.network.site_urls.values():
        it.links.lose(url)
    time.sleep(DARK_S)
    it.links.heal()


def half_open(it: Strike) -> None:
    """Connect and send part of a head or of a body.

    The router closes these connections after its timeouts.
    """
    host, port = _address(it.network.url)
    started = (b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
    clients = [socket.create_connection((host, port), 5) for _ in range(300)]
    for number, client in enumerate(clients):
        client.sendall(started[number % 2])
    time.sleep(20)
    ended = 0
    for client in clients:
        client.settimeout(0.5)
        try:
            while client.recv(4096):
                pass
            ended += 1
        except ConnectionError:
            ended += 1
        except TimeoutError:
            pass
        client.close()
    it.notes["ended_by_the_router_within_20_s"] = ended


def vanish(it: Strike) -> None:
    """Read a little of a long answer, then drop all of the clients' packets.

    Their answers must not be computed to the end.
    """
    host, port = _address(it.network.url)
    body = orjson.dumps({
        "model": "ember", "stream": True, "max_tokens": 3500, "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me everything."}],
    })  # fmt: skip
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    clients = [socket.create_connection((host, port), 5) for _ in range(12)]
    for client in clients:
        client.sendall(head % len(body) + body)
    for client in clients:
        client.recv(1024)
        it.links.lose_connection(client.getsockname()[1], port)
    vanished_at = time.monotonic()
    _until_idle(it, 90)
    it.notes["free_again_after_s"] = round(time.monotonic() - vanished_at, 1)
    it.links.heal()
    for client in clients:
        client.close()


def _until_idle(it: Strike, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(it.network.site_status(site).inflight for site in it.network.site_urls):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the sites still worked after {seconds:g} s")
        time.sleep(0.1)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80

"""A slow or broken link between two sites: a TCP proxy on another loopback address."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class ThrottledProxy:
    """A proxy from ports of 127.0.0.2 to ports of 127.0.0.1. All connections share one rate, which can be changed at any time."""

    HOST = "127.0.0.2"

    def __init__(self, ports: dict[int, int]) -> None:
        """Listen. `ports` maps listening ports to target ports; listening port 0 takes a free one, stored in `port`."""
        self.bytes_per_s = float("inf")
        self.is_cut = False  # hold data back in both directions, with connections left open
        self._is_closed = False
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = 0
        for own, to in ports.items():
            listener = socket.create_server((self.HOST, own))
            self._listeners.append(listener)
            self.port = self.port or listener.getsockname()[1]
            self._start(self._accept, listener, to)

    def close(self) -> None:
        self._is_closed = True
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, to: int) -> None:
        with listener:
            while not self._is_closed:
                try:
                    client = listener.accept()[0]
                except OSError:
                    return
                self._start(self._join, client, to)

    def _join(self, client: socket.socket, to: int) -> None:
        """Forward in both directions until both ends are closed."""
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", to)) as server:
            there = threading.Thread(target=self._forward, args=(client, server), daemon=True)
            there.start()
            self._forward(server, client)
            there.join()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while not self._is_closed and (data := source.recv(16 << 10)):
                self._wait(len(data))
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait(self, num_bytes: int) -> None:
        """Wait until the link has carried `num_bytes` and is not cut."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self.bytes_per_s
            until = self._free_at
        while (self.is_cut or time.monotonic() < until) and not self._is_closed:
            time.sleep(0.002)

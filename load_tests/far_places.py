"""Network namespaces with limited links to the caller's, and cgroups that slow engine hosts down.

The namespace of the calling process is one place; each `FarPlace` is another one. Needs root, iproute2, iptables and util-linux. `tc qdisc tbf`
limits the bandwidth on both ends of a pair of virtual interfaces; a second pair without a limit carries the scenario's own requests. Many kernels
have no netem, so a relay adds the delay: it holds back bytes, but the TCP connections on both of its sides have short round trips and start as fast
as without distance.
"""

import asyncio
import os
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_BURST_S, _LEAST_BURST_BYTES = (
    0.001,
    128 << 10,
)  # tbf's bucket: a millisecond of traffic, and at least two segments of 64 KiB
_QUEUE_MS = 50
_PERIOD_US = 20_000
_CGROUPS = Path("/sys/fs/cgroup")


class FarPlace:
    """A namespace and its links to the caller's, in a `with` statement."""

    def __init__(self, number: int = 0) -> None:
        """Describe a place. Places of one caller have different numbers."""
        self.address = f"10.77.{number}.2"  # its end of the limited link
        self.unlimited_address = f"10.78.{number}.2"
        self.relay_address = f"127.0.0.{2 + number}"  # where a relay to this place listens
        self._number = number
        self._lost = 0.0  # share of packets that is dropped

    def __enter__(self) -> "FarPlace":
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # it has its namespace
        self.prefix: Sequence[str] = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--")
        pid, number = str(self._holder.pid), self._number
        for name, network in (("limited", 77), ("direct", 78)):
            _run("ip", "link", "add", f"{name}{number}", "type", "veth", "peer", "name", name, "netns", pid)
            for end, interface, prefix in ((1, f"{name}{number}", ()), (2, name, self.prefix)):
                _run(*prefix, "ip", "address", "add", f"10.{network}.{number}.{end}/24", "dev", interface)
                _run(*prefix, "ip", "link", "set", interface, "up")
        _run(*self.prefix, "ip", "link", "set", "lo", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()
        with suppress(subprocess.CalledProcessError):
            _run("ip", "link", "delete", f"limited{self._number}")
            _run("ip", "link", "delete", f"direct{self._number}")

    def limit(self, mbit_per_s: float) -> None:
        """Set the bandwidth of the limited link, in both directions."""
        burst = max(_LEAST_BURST_BYTES, int(_BURST_S * mbit_per_s * 125_000))
        shape = ("tbf", "rate", f"{int(mbit_per_s * 1000)}kbit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms")
        for interface, prefix in ((f"limited{self._number}", ()), ("limited", self.prefix)):
            _run(*prefix, "tc", "qdisc", "replace", "dev", interface, "root", *shape)

    def lose(self, share: float) -> None:
        """Drop this share of the packets that arrive over the limited link at either end; 0 ends the loss."""
        for action, lost in (("-D", self._lost), ("-A", share)):
            drawn = [] if lost >= 1.0 else ["-m", "statistic", "--mode", "random", "--probability", str(lost)]
            for interface, prefix in ((f"limited{self._number}", ()), ("limited", self.prefix)) if lost else ():
                _run(*prefix, "iptables", "-w", action, "INPUT", "-i", interface, *drawn, "-j", "DROP")
        self._lost = share


class CpuShare:
    """A cgroup whose processes get at most a share of one core's time."""

    def __init__(self, name: str, share: float) -> None:
        self._is_first_version = (_CGROUPS / "cpu").is_dir()
        self._folder = (_CGROUPS / "cpu" if self._is_first_version else _CGROUPS) / f"{name}-{os.getpid()}"
        self._share = share

    def __enter__(self) -> "CpuShare":
        self._folder.mkdir()
        quota = int(self._share * _PERIOD_US)
        if self._is_first_version:
            (self._folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (self._folder.parent / "cgroup.procs").write_text(pid)
        self._folder.rmdir()

    def add(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))


class Relay:
    """TCP relay to a place, which has the same ports at the place's relay address.

    It holds back bytes by half a round trip each way."""

    def __init__(self, place: FarPlace, ports: Sequence[int], rtt_s: float) -> None:
        self._place = place
        self._ports = ports
        self.rtt_s = rtt_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Relay":
        self._thread.start()
        for port in self._ports:
            asyncio.run_coroutine_threadsafe(self._listen(port), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self, port: int) -> None:
        await asyncio.start_server(
            lambda reader, writer: self._join(reader, writer, port), self._place.relay_address, port
        )

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        await asyncio.sleep(self.rtt_s)  # the handshake of a connection
        try:
            there, back = await asyncio.open_connection(self._place.address, port)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forward(reader, back))
            group.create_task(self._forward(there, writer))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(source, held))
            group.create_task(self._write(held, sink))

    async def _read(self, source: asyncio.StreamReader, held: "asyncio.Queue[tuple[float, bytes]]") -> None:
        data = b"."
        while data:
            with suppress(ConnectionError):
                data = b""
                data = await source.read(1 << 18)
            await held.put((self._loop.time() + self.rtt_s / 2, data))

    async def _write(self, held: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter) -> None:
        while True:
            due, data = await held.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            with suppress(ConnectionError):
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

"""`pilotlight dev` on a copy of another author's project, run as that project's pages describe."""

import asyncio
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from aiohttp import ClientSession, ClientTimeout

from load_tests.compatibility.stand_ins import StandIns
from load_tests.local_network import ROOT, free_ports

READY = "Serving http"
START_S = 120.0
ASK_S = 200.0  # the first answer may have to wait until packages are installed
PILOTLIGHT = (sys.executable, "-m", "pilotlight.runtime.cli.commands")
UNCOPIED = shutil.ignore_patterns("node_modules", ".venv", ".pilotlight", ".git")


class DevServer:
    """A running `pilotlight dev`; use as `async with`.

    `get` and similar methods send requests, and `output` is what it has printed.
    """

    def __init__(self, folder: Path, options: list[str], stand_ins: StandIns | None = None, tree: Path = ROOT) -> None:
        """Prepare a server. `tree`: the checkout that is run."""
        self.folder = folder
        self._tree = tree
        self.output: list[str] = []
        self.port = free_ports(1)[0]
        self._options = options
        self._stand_ins = stand_ins
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.session = ClientSession(timeout=ClientTimeout(total=ASK_S), base_url=f"http://127.0.0.1:{self.port}/")

    async def __aenter__(self) -> "DevServer":
        command = [*PILOTLIGHT, "dev", str(self.folder), "--port", str(self.port), *self._options]
        environment = {**os.environ, "PYTHONPATH": str(self._tree), "COLUMNS": "400"}
        if self._stand_ins is not None:
            command = self._stand_ins.inside([*command, *self._stand_ins.allowed])
            environment = {**self._stand_ins.environment, "PYTHONPATH": str(ROOT), "COLUMNS": "400"}
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=self.folder
        )
        self._reading = asyncio.create_task(self._read())
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._ready.wait()
        if not any(READY in line for line in self.output):
            await self.__aexit__()
            raise AssertionError("it does not start: " + " / ".join(self.output[-5:]))
        await self._listening()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(15):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def printed(self, words: str, timeout_s: float = 30.0) -> bool:
        """Wait for a line of output with these words; return False if there is none within the timeout."""
        for _ in range(int(timeout_s / 0.1)):
            if any(words in line for line in self.output):
                return True
            await asyncio.sleep(0.1)
        return False

    async def text(self, path: str, status: int = 200) -> str:
        async with self.session.get(path) as response:
            text = await response.text(errors="replace")
            assert response.status == status, f"GET {path}: {response.status} {text[:600]}"
            return text

    async def _listening(self) -> None:
        for _ in range(int(START_S / 0.1)):
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            await asyncio.sleep(0.1)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.output.append(line.decode(errors="replace").rstrip())
            if READY in self.output[-1]:
                self._ready.set()
        self._ready.set()


async def pilotlight(folder: Path, *arguments: str) -> str:
    """Run a command in a folder. Raises AssertionError with its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        *PILOTLIGHT, *arguments, cwd=folder, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, f"pilotlight {' '.join(arguments)}: {output.decode(errors='replace')[:400]}"
    return output.decode(errors="replace")

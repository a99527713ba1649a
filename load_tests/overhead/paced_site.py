"""A real site whose engine computes nothing: `python -m load_tests.overhead.paced_site SITE_FILE`. The rest of an answer's time is the site's own.

A sequence has its first token at once and another one each PACE_S, so an engine by itself would have n tokens after (n - 1) PACE_S. Each token is a
frame of its own, where an engine host would send one for all sequences of a step. Knows the engine's protocol; its socket is left out.
"""

import asyncio
import sys
from pathlib import Path

from engine.client import HostClient
from engine.protocol import (
    VERSION,
    Abort,
    Command,
    FinishReason,
    Hello,
    HostReady,
    LoadModel,
    ModelInfo,
    ModelLoad,
    ModelReady,
    StepOutput,
    Submit,
    TokenOutput,
)
from load_tests.overhead.trivial_site import PACE_S
from runtime.app import build_app
from runtime.serve import serve_app
from sites.site import load_site
from wire.http.listen import bind, loop_factory, raise_file_limit

HEARTBEAT_S = 0.2
BLOCKS = 1 << 20
CONTEXT, VOCABULARY, END = 2048, 512, 0


class PacedEngineClient(HostClient):
    def __init__(self) -> None:
        super().__init__(Hello(VERSION))
        self._at_work: set[str] = set()
        self._loaded: dict[str, ModelLoad] = {}
        self._steps = 0
        self._loop = asyncio.get_running_loop()
        self._beat()

    async def close(self) -> None:
        self.fail("the client was closed")

    def _start(self) -> None:
        self._assert_alive()

    def _send(self, command: Command) -> None:
        self._loop.call_soon(self._obey, command)

    def _obey(self, command: Command) -> None:
        match command:
            case Hello():
                self._handle(HostReady(VERSION))
            case LoadModel(spec):
                self._loaded[spec.name] = ModelLoad(free_blocks=BLOCKS, total_blocks=BLOCKS)
                self._handle(
                    ModelReady(ModelInfo(spec.name, CONTEXT, VOCABULARY, (END,), "float32", 16, BLOCKS, 1, 0.1))
                )
            case Submit():
                self._at_work.add(command.sequence_id)
                self._next(command, 0, self._loop.time())
            case Abort(sequence_id):
                self._at_work.discard(sequence_id)

    def _next(self, submit: Submit, index: int, began: float) -> None:
        if submit.sequence_id not in self._at_work:
            return
        prompt, is_last = submit.prompt_token_ids, index + 1 == submit.sampling.max_tokens
        reason: FinishReason | None = "length" if is_last else None
        cached = 0 if index == 0 else None
        token = prompt[index % len(prompt)]
        self._step(
            TokenOutput(submit.sequence_id, (token,), finish_reason=reason, num_cached_tokens=cached, device_us=1)
        )
        if is_last:
            self._at_work.discard(submit.sequence_id)
        else:
            self._loop.call_at(began + (index + 1) * PACE_S, self._next, submit, index + 1, began)

    def _beat(self) -> None:
        if self.death is None:
            self._step()
            self._loop.call_later(HEARTBEAT_S, self._beat)

    def _step(self, *outputs: TokenOutput) -> None:
        self._steps += 1
        self._handle(StepOutput(self._steps, outputs, self._loaded))


class PacedHost:
    """Such an engine as a host, which is no process."""

    pid = url = peer_address = None
    has_crashed = False

    def __init__(self) -> None:
        self.client = PacedEngineClient()
        self._has_ended = asyncio.Event()

    async def exited(self) -> str:
        await self._has_ended.wait()
        return "it was stopped"

    async def stop(self, grace_s: float) -> None:
        await self.client.close()
        self._has_ended.set()


class PacedLauncher:
    async def launch(self, *, standby: bool = False, afresh: bool = False) -> PacedHost:
        return PacedHost()

    def close(self) -> None:
        pass


def main(file: Path) -> None:
    raise_file_limit()
    site = load_site(file)
    listener = bind(site.listen.host, site.listen.port)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve_app(build_app(site, launchers=[PacedLauncher()]), listener))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

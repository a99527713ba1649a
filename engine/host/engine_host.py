"""The engine host: one process (or thread), several models, one stream of frames.

The loop does its work in this order: commands, finished loads, one step per model, one frame. This module is independent of tensors and HTTP. It does
not import torch: the loader's thread does that while the host is already reachable.

python -m pilotlight.engine.host.engine_host --address ipc:///run/pilotlight/ams1.sock --config '{"device": "cpu"}'
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.errors import RankLostError
from pilotlight.engine.api.protocol import (
    Abort,
    Command,
    Hello,
    HostConfig,
    HostEnding,
    LoadModel,
    PrewarmModel,
    Shutdown,
    Submit,
    UnloadModel,
)
from pilotlight.engine.api.step_journal import HeldSequences, StepJournal
from pilotlight.engine.api.validation import host_problem
from pilotlight.engine.core.open_sequences import error_output
from pilotlight.engine.host import torch_parts
from pilotlight.engine.host.hosted_models import HostedModels
from pilotlight.engine.host.model_loader import ModelLoader
from pilotlight.engine.host.process import configure_process
from pilotlight.engine.host.step_frames import StepFrames
from pilotlight.engine.host.transport import FrontEndGone, HostTransport
from pilotlight.engine.weights import digests
from pilotlight.kernels.cpu.build import BuildError, LibraryBuild, discard_libraries
from pilotlight.support.logs import inherit_logging
from pilotlight.support.parent_death import notify_at_parents_death

if TYPE_CHECKING:
    from pilotlight.engine.api.keys import Keys
    from pilotlight.engine.loading.loaded_model import LoadedModel

log = logging.getLogger(__name__)

# Interval of checks for a finished load, because the loader's thread cannot interrupt the wait for commands. It is short beside a wake from host
# memory, which takes 20 ms.
_LOADING_POLL_S = 0.001
# Interval of checks for blocks from a tier while all sequences wait.
_TIER_POLL_S = 0.001
# Consecutive failed steps, of any models, after which the device counts as broken. At most four fail in a row if two sequences of one batch cannot be
# computed: the whole, each half, and a quarter.
MOST_FAILED_STEPS = 5


class EngineHost:
    def __init__(
        self,
        transport: HostTransport,
        loader: ModelLoader,
        is_orphaned: Callable[[], bool] = lambda: False,
        journal: StepJournal | None = None,
    ) -> None:
        """Prepare the host. `journal`: shows the site which sequences were being computed when the host died."""
        self._transport = transport
        self._loader = loader
        self._is_orphaned = is_orphaned
        self._journal = journal
        self._frames = StepFrames(transport)
        self._models = HostedModels(loader.load, transport, self._frames)
        self._owes_ready = False
        self._waits_for_blocks = False
        self._is_stopping = False
        self._num_heard = 0  # number of messages from other hosts
        self._failed_steps = (
            0  # failures since results were last collected: if steps overlap, a successful launch proves nothing
        )
        self._broken: str | None = None  # why nothing may use the device any more
        self._failed_under: tuple[str, ...] = ()  # the sequences whose step broke the device

    def stop(self) -> None:
        """Stop after the step in progress. May be called from a signal handler."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve until `stop` is called; then announce the end at once, so that open sequences move elsewhere."""
        self._loader.start()
        while not self._is_stopping and not self._is_orphaned():
            for command in self._transport.receive(self._receive_timeout_s()):
                self._handle_command(command)
            self._send_ready()
            self._models.collect(self._loader.take_results())
            working = [model for model in self._models.served.values() if model.engine.has_work]
            stepped = [model for model in working if self._broken is None and self._step(model)]
            if self._broken is not None:
                break
            if stepped or self._has_outputs() or self._frames.until_heartbeat_s <= 0:
                self._send_frame(stepped)
            for model in self._models.served.values():
                model.engine.on_idle()
            self._waits_for_blocks = bool(working) and not stepped
            if self._waits_for_blocks:
                self._note_peers(working)
        self._send_frame([])  # sends the tokens of the last steps
        reason = self._broken or self._loader.why_ending or "the engine host was shut down"
        self._transport.send(HostEnding(reason, self._failed_under))
        if self._broken is None:
            self._models.close()
        self._loader.close()
        self._transport.close()

    def _receive_timeout_s(self) -> float:
        if self._waits_for_blocks:
            return _TIER_POLL_S
        if self._frames.has_outputs or any(model.engine.has_work for model in self._models.served.values()):
            return 0.0
        if self._models.loading or self._owes_ready:
            return _LOADING_POLL_S
        return max(0.0, self._frames.until_heartbeat_s)

    def _handle_command(self, command: Command | FrontEndGone) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort(sequence_id):
                for model in self._models.served.values():
                    model.engine.sequences.abort(sequence_id)
            case LoadModel(spec):
                self._models.load(spec)
            case PrewarmModel(spec):
                self._loader.prewarm(spec)
            case UnloadModel(name):
                self._models.unload(name)
            case Hello():
                self._owes_ready = True
            case FrontEndGone():
                for model in self._models.served.values():
                    model.engine.sequences.abort_all()
            case Shutdown():
                self.stop()

    def _submit(self, submit: Submit) -> None:
        if any(submit.sequence_id in model.engine.sequences for model in self._models.served.values()):
            # The client refuses to send a second sequence with an open id. An error output with this id would end the first sequence.
            log.error("sequence %s is open already; the second of this id is dropped", submit.sequence_id)
            return
        model = self._models.served.get(submit.model)
        if model is not None:
            model.engine.submit(submit)
            return
        self._frames.add(error_output(submit.sequence_id, "model_not_found", self._models.why_missing(submit.model)))

    def _send_ready(self) -> None:
        if self._owes_ready and self._loader.ready is not None:
            self._owes_ready = False
            self._transport.send(self._loader.ready)

    def _step(self, model: "LoadedModel") -> bool:
        """Run a step; return False if it computed nothing or failed, which does not count as progress."""
        engine, name = model.engine, model.spec.name
        num_steps = engine.stats.num_steps
        try:
            has_computed = engine.step(partial(self._note_held, name))
            if engine.stats.num_steps > num_steps:
                self._failed_steps = 0
            return has_computed
        except Exception as error:  # an error must not end sequences of other models, nor later ones of this model
            log.exception("a step of %s failed", name)
            message = f"a step of {name} failed with {type(error).__name__}: {error}"
            self._failed_steps += 1
            if _is_sticky(error) or self._failed_steps >= MOST_FAILED_STEPS:
                # Open sequences continue on the next host or another site, which an error output would prevent.
                self._broken = f"the device counts as broken: {message}"
                if not (isinstance(error, RankLostError) and error.was_killed):
                    self._failed_under = tuple(engine.held.computed)
                self.stop()
            else:
                engine.recover(message)
            return False
        finally:
            self._note_held(name, engine.held)

    def _note_held(self, model: str, held: HeldSequences) -> None:
        if self._journal is not None:
            self._journal.note(model, held)

    def _note_peers(self, waiting: "Sequence[LoadedModel]") -> None:
        """Count messages from hosts that compute for this one as progress."""
        heard = max(model.engine.tiers.num_heard for model in waiting)
        if heard > self._num_heard:
            self._num_heard = heard
            self._frames.note_progress()

    def _has_outputs(self) -> bool:
        return self._frames.has_outputs or any(
            model.engine.sequences.has_outputs for model in self._models.served.values()
        )

    def _send_frame(self, stepped: "Sequence[LoadedModel]") -> None:
        self._frames.send(self._models.served.values(), stepped)


def _is_sticky(error: Exception) -> bool:
    """True if the device, or a rank of its group, is lost.

    After an error of CUDA every later call of the process fails as well; out of memory is no such error.
    """
    return isinstance(error, RankLostError) or type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def main(words: Sequence[str]) -> None:
    configure_process()
    import msgspec

    from pilotlight.engine.host.socket_transport import SocketTransport

    parser = argparse.ArgumentParser(
        prog="python -m pilotlight.engine.host.engine_host", description="Serve models over one ZeroMQ socket."
    )
    parser.add_argument("--address", required=True, help="where to listen: ipc://PATH or tcp://HOST:PORT")
    parser.add_argument(
        "--keys",
        type=Path,
        help="a key file of pilotlight.engine.api.keys: only the front end with its counterpart is accepted, and it holds a lease",
    )
    parser.add_argument("--config", default="{}", help="a HostConfig as JSON")
    parser.add_argument("--journal", type=Path, help="a file in which to record the sequences of running steps")
    parser.add_argument(
        "--parent",
        type=int,
        help="the parent process: exit when it ends, even if it ended before this process could check",
    )
    parser.add_argument("--standby", action="store_true", help="import everything and wait to replace a host that dies")
    parser.add_argument(
        "--afresh",
        action="store_true",
        help="remove the files that earlier hosts built, because one of them crashed on them",
    )
    arguments = parser.parse_args(words)
    inherit_logging("engine")
    try:
        config = msgspec.json.decode(arguments.config, type=HostConfig)
    except msgspec.DecodeError as error:
        sys.exit(f"pilotlight.engine.host.engine_host: --config is not a valid HostConfig: {error}")
    if problem := host_problem(config):
        sys.exit(f"pilotlight.engine.host.engine_host: {problem}")
    try:
        LibraryBuild().forced_kind()
    except BuildError as error:
        sys.exit(f"pilotlight.engine.host.engine_host: {error}")
    if arguments.afresh:
        with suppress(BuildError, OSError):  # without a library, torch computes instead
            discard_libraries()
    keys = _keys(arguments.keys)
    if problem := address_problem(arguments.address, has_keys=keys is not None):
        sys.exit(f"pilotlight.engine.host.engine_host: {problem}")
    if problem := peer_address_problem(config):
        sys.exit(f"pilotlight.engine.host.engine_host: {problem}")
    if config.threads is not None:
        # torch reads this variable when it is imported
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    if config.device == "cpu" and not config.group:
        torch_parts.leave_out()
    # With keys, the front end is on another machine, and its lease shows whether it is alive.
    parent = arguments.parent if arguments.parent is not None or keys is not None else os.getppid()
    transport = SocketTransport(arguments.address, keys)
    loader = ModelLoader(config, arguments.standby, digests.folder())
    host = EngineHost(
        transport,
        loader,
        lambda: parent is not None and os.getppid() != parent,
        StepJournal(arguments.journal) if arguments.journal is not None else None,
    )
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    # A terminal's Ctrl-C reaches the whole process group, and the others are often sent by a program's name; the parent decides when its hosts end.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if parent is not None:
        _die_with_parent(parent, host.stop)
    host.run()
    # All is closed. A thread that is inside torch, such as one that still imports it or reads weights, would abort the process if the interpreter
    # ended now.
    logging.shutdown()
    os._exit(0)


def _keys(path: Path | None) -> "Keys | None":
    if path is None:
        return None
    from pilotlight.engine.api.keys import (
        KeysError,
        read_keys,
    )  # imported here: a host on the front end's machine has no keys

    try:
        return read_keys(path)
    except KeysError as error:
        sys.exit(f"pilotlight.engine.host.engine_host: {error}")


def address_problem(address: str, has_keys: bool = False) -> str | None:
    """Return why a host must not listen at an address (any peer could command it), or None."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if has_keys or not address.startswith("tcp://") or host in ("127.0.0.1", "::1"):
        return None
    return f"--address {address} is reachable from other machines, which could then command this host: add --keys, or use ipc://PATH or tcp://127.0.0.1:PORT"


def peer_address_problem(config: HostConfig) -> str | None:
    """Return why a host must not serve its blocks at its configured address, or None."""
    address = config.peer_address
    if address is None or not address_problem(address, config.peer_keys is not None):
        return None
    return f"peer_address {address} is reachable from other machines, which could then read the cache: set peer_keys as well"


def _die_with_parent(parent: int, stop: Callable[[], None]) -> None:
    """Ask Linux for a signal when the parent dies.

    The signal also comes if only the thread that started this process ends, so the handler checks the parent's id. The host's loop checks it, too,
    because other systems have no such signal, and a signal may be lost.
    """
    signal.signal(signal.SIGUSR1, lambda *_: stop() if os.getppid() != parent else None)
    notify_at_parents_death(signal.SIGUSR1)
    if os.getppid() != parent:  # the parent died before the call
        stop()


if __name__ == "__main__":
    main(sys.argv[1:])

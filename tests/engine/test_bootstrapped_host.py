"""A host that serves its model by a bootstrap program while torch is imported and the model loaded: nobody notices the change."""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import (
    VERSION,
    Abort,
    Command,
    Event,
    Hello,
    HostEnding,
    HostReady,
    LoadModel,
    ModelFailed,
    ModelReady,
    ModelSpec,
    ModelUnloaded,
    Shutdown,
    StepOutput,
    UnloadModel,
)
from pilotlight.engine.bootstrap.bootstrap_loader import BootstrapLoader
from pilotlight.engine.host.engine_host import EngineHost
from pilotlight.engine.host.model_loader import ModelLoader
from pilotlight.engine.host.served_model import ServedModel
from pilotlight.engine.host.transport import FrontEndGone, QueueTransport
from tests.checkpoints import write_llama
from tests.engine.bootstraps import CONFIG, Leave, checkpoint, folder, found, leave, the_c_library_computes
from tests.engine.driver import Heard, one, random_prompt, submit

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no file is mapped in place"),
]

__all__ = ["checkpoint", "folder", "leave", "the_c_library_computes"]


class Gate:
    """Loads wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.failure: str | None = None
        load = ModelLoader._load

        def gated(loader: ModelLoader, spec: ModelSpec) -> Any:
            assert self.opened.wait(60)
            if self.failure is not None:
                raise RuntimeError(self.failure)
            return load(loader, spec)

        monkeypatch.setattr(ModelLoader, "_load", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class Front:
    """A host in a thread, and everything it has said."""

    def __init__(self, *, bootstraps: bool = True) -> None:
        self.events: list[Event] = []
        self.transport = QueueTransport(self.events.append)
        self.loader = ModelLoader(CONFIG)
        self.host = EngineHost(self.transport, BootstrapLoader(CONFIG, self.loader) if bootstraps else self.loader)
        self.thread = threading.Thread(target=self.host.run)
        self.thread.start()

    def put(self, *commands: Command) -> None:
        for command in commands:
            self.transport.put(command)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.events[-3:]
            time.sleep(0.002)

    def all(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def heard(self) -> dict[str, Heard]:
        told: dict[str, Heard] = {}
        for event in self.all(StepOutput):
            for output in event.outputs:
                told.setdefault(output.sequence_id, Heard()).hear(output)
        return told

    def ends(self, *names: str) -> bool:
        heard = self.heard()
        return all(name in heard and heard[name].finish_reason is not None for name in names)


@pytest.fixture
def front(checkpoint: Path, leave: Leave) -> Iterator[Front]:
    leave(checkpoint)
    front = Front()
    yield front
    front.put(Shutdown())
    front.thread.join(30)
    assert not front.thread.is_alive()


def served(front: Front) -> ServedModel:
    (model,) = front.host._models.served.values()
    return model


def spec_of(checkpoint: Path, **more: Any) -> ModelSpec:
    return ModelSpec("tiny", str(checkpoint), **({"is_awaited": True} | more))


def test_the_first_answer_does_not_wait_for_the_load(front: Front, gate: Gate, checkpoint: Path, leave: Leave) -> None:
    """And what has been begun ends as if nothing had changed, with everything that waited."""
    long = submit("long", random_prompt(30, seed=1), max_tokens=200, temperature=0.7, seed=9)
    held = submit("held", random_prompt(9, seed=2), num_logprobs=3)
    front.put(Hello(VERSION), LoadModel(spec_of(checkpoint)), long, held)
    front.until(lambda: "long" in front.heard())
    assert front.all(HostReady)
    assert front.all(ModelReady)[0].info.context_length == 256
    assert "held" not in front.heard()
    gate.opened.set()
    front.until(lambda: front.ends("long", "held"))
    gate.opened.set()
    alone = leave(checkpoint)
    heard = front.heard()
    assert heard["long"].token_ids == one(alone, long).token_ids
    assert heard["held"].token_ids == one(alone, held).token_ids
    assert heard["held"].num_cached_tokens is not None
    assert len(front.all(ModelReady)) == 2
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.long
def test_the_load_begins_with_the_first_answer_and_not_before(
    front: Front, gate: Gate, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotlight.engine.bootstrap.bootstrap_loader._FIRST_ANSWER_S", 60.0)
    front.put(LoadModel(spec_of(checkpoint)))
    front.until(lambda: bool(front.all(ModelReady)))
    time.sleep(0.6)
    assert not front.loader.has_begun
    front.put(submit("a", [5, 6, 7]))
    front.until(lambda: front.ends("a"))
    front.until(lambda: front.loader.has_begun)
    gate.opened.set()


@pytest.mark.long
@pytest.mark.parametrize("asked", [True, False])
def test_the_load_begins_where_nobody_waits_for_an_answer(
    asked: bool, front: Front, gate: Gate, checkpoint: Path
) -> None:
    gate.opened.set()
    if asked:
        front.put(LoadModel(spec_of(checkpoint, is_awaited=False)))
        front.until(lambda: len(front.all(ModelReady)) == 2)
    else:
        front.until(lambda: front.loader.has_begun)


def test_a_model_that_was_opened_and_cannot_be_loaded_ends_the_host_and_loses_its_program(
    front: Front, gate: Gate, checkpoint: Path
) -> None:
    """The next host then says why: whoever watches continues the sequences there."""
    front.put(LoadModel(spec_of(checkpoint)), submit("a", [5, 6], num_logprobs=1))
    front.until(lambda: bool(front.all(ModelReady)))
    gate.failure = "its disk is gone"
    gate.opened.set()
    front.thread.join(30)
    assert isinstance(front.events[-1], HostEnding)
    assert not front.all(ModelFailed)
    assert not front.ends("a")
    assert found(checkpoint) is None
    again = Front(bootstraps=False)
    again.put(LoadModel(spec_of(checkpoint)))
    again.until(lambda: bool(again.all(ModelFailed)))
    assert "its disk is gone" in again.all(ModelFailed)[0].message
    again.put(Shutdown())
    again.thread.join(30)


def test_a_model_may_be_unloaded_while_it_is_only_opened(front: Front, gate: Gate, checkpoint: Path) -> None:
    front.put(LoadModel(spec_of(checkpoint)), submit("a", [5, 6], max_tokens=200), submit("b", [5, 6], num_logprobs=1))
    front.until(lambda: "a" in front.heard())
    front.put(UnloadModel("tiny"))
    front.until(lambda: bool(front.all(ModelUnloaded)) and front.ends("a", "b"))
    assert "was unloaded" in str(front.heard()["b"].error)
    gate.opened.set()
    front.put(submit("c", [5, 6]))
    front.until(lambda: front.ends("c"))
    assert "not loaded" in str(front.heard()["c"].error)
    front.put(LoadModel(spec_of(checkpoint)), submit("d", [5, 6]))
    front.until(lambda: len(front.all(ModelReady)) == 2)


def test_another_model_is_loaded_as_ever(front: Front, gate: Gate, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_llama(other)
    gate.opened.set()
    front.put(LoadModel(spec_of(other)), submit("early", [5, 6]))
    front.until(lambda: bool(front.all(ModelReady)) and front.ends("early"))
    assert "still loading" in str(front.heard()["early"].error)
    front.put(submit("a", [5, 6]))
    front.until(lambda: front.ends("a"))
    assert len(front.heard()["a"].token_ids) == 8


def test_a_second_name_of_the_same_files_waits_for_its_load(front: Front, gate: Gate, checkpoint: Path) -> None:
    front.put(LoadModel(spec_of(checkpoint)), LoadModel(ModelSpec("other", str(checkpoint))), submit("a", [5, 6]))
    front.until(lambda: front.ends("a"))
    assert [event.info.name for event in front.all(ModelReady)] == ["tiny"]
    gate.opened.set()
    front.until(lambda: len(front.all(ModelReady)) == 3)


def test_nothing_of_the_program_is_left_once_the_model_is_there(checkpoint: Path, leave: Leave, gate: Gate) -> None:
    """Its maps would count as the host's memory for ever."""
    leave(checkpoint)
    front = Front()
    front.put(LoadModel(spec_of(checkpoint)), submit("a", [5, 6]))
    front.until(lambda: front.ends("a"))
    runner = weakref.ref(served(front).engine.runner)
    gate.opened.set()
    front.until(lambda: len(front.all(ModelReady)) == 2)
    front.until(lambda: runner() is None)
    front.put(Shutdown())
    front.thread.join(30)


def test_whoever_leaves_meanwhile_is_not_answered(front: Front, gate: Gate, checkpoint: Path) -> None:
    front.put(
        LoadModel(spec_of(checkpoint)),
        *(submit("begun", [5, 6], max_tokens=200), submit("held", [5, 6], num_logprobs=1), submit("kept", [7, 8])),
    )
    front.until(lambda: front.ends("kept"))
    front.put(Abort("begun"), Abort("held"))
    front.until(lambda: front.ends("begun", "held"))
    gate.opened.set()
    front.until(lambda: len(front.all(ModelReady)) == 2)
    front.put(submit("later", [7, 8]))
    front.until(lambda: front.ends("later"))
    assert front.heard()["later"].token_ids == front.heard()["kept"].token_ids
    assert front.heard()["held"].finish_reason == "abort"


def test_a_new_front_end_finds_nothing_of_the_old_ones(front: Front, gate: Gate, checkpoint: Path) -> None:
    front.put(
        LoadModel(spec_of(checkpoint)), submit("begun", [5, 6], max_tokens=200), submit("held", [5], num_logprobs=2)
    )
    front.until(lambda: "begun" in front.heard())
    front.put(FrontEndGone())  # type: ignore[arg-type]
    front.until(lambda: front.ends("begun"))
    gate.opened.set()
    front.until(lambda: len(front.all(ModelReady)) == 2)
    assert not served(front).engine.has_work
    assert front.heard()["held"].token_ids == []


def test_a_host_that_ends_before_it_has_imported_anything_ends_at_once(front: Front, checkpoint: Path) -> None:
    front.put(LoadModel(spec_of(checkpoint)), Shutdown())
    front.thread.join(30)
    assert isinstance(front.events[-1], HostEnding)

"""Trains Ember from scratch on its own corpus: under three hours on two CPU cores, minutes on a GPU.

    python -m training.ember.train --out runs/ember --minutes 150
    python -m training.ember.train --out runs/ember --minutes 30 --resume
    python -m training.ember.train --out runs/ember --minutes 90 --start-from engine/embedded/ember

Muon optimises the matrices, AdamW the embedding and the norms. Computation is in bf16, with fp32 master weights. The learning rate warms up, stays
constant, and falls to zero over the last `--decay-minutes`; a run that is stopped before can be resumed for longer.
"""

import argparse
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor

from training.ember.chat import Chat
from training.ember.corpus.mixture import MIXTURE, conversations
from training.ember.evaluate import TARGETS, engine_generator, evaluate
from training.ember.muon import Muon
from training.ember.network import Network, Shape, load, save

# Learning rates. Above 3e-3, steps of 8,000 tokens are too noisy and copying stays inexact: at 5e-3 the loss is twice as large.
MUON_RATE, ADAM_RATE = 3e-3, 1.5e-3
WARM_UP_STEPS = 100
TOKENS_PER_STEP = 8_192
TOKENS_PER_FORWARD = 4_608  # most tokens of a forward pass, padding included; they need about 0.4 GB of activations
TASKS = tuple(MIXTURE)

Lesson = tuple[list[int], list[bool], int]  # (token ids, whether each is learned, index of the task in TASKS)


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [batch, length], padded on the right
    at: Tensor  # [learned tokens]: the flat position in `ids` of the token before each learned one
    targets: Tensor  # [learned tokens]: their ids
    tasks: Tensor  # [learned tokens]: the index of each one's task in TASKS


class Lessons:
    """An endless stream of steps, each a fair sample of the mixture, in batches of similar lengths."""

    def __init__(self, chat: Chat, seed: int, tokens_per_step: int = TOKENS_PER_STEP) -> None:
        self._chat = chat
        self._conversations = conversations(seed)
        self._tokens_per_step = tokens_per_step

    def step(self) -> list[Batch]:
        lessons, tokens = [], 0
        while tokens < self._tokens_per_step:
            one = next(self._conversations)
            ids, learned = self._chat.lesson(one.messages, one.tools)
            if len(ids) <= 4096:
                lessons.append((ids, learned, TASKS.index("long" if len(ids) > 600 else one.task)))
                tokens += len(ids)
        lessons.sort(key=lambda lesson: len(lesson[0]))
        return [self._pack(group) for group in self._groups(lessons)]

    @staticmethod
    def _groups(lessons: list[Lesson]) -> Iterator[list[Lesson]]:
        group: list[Lesson] = []
        for lesson in lessons:
            padded = (len(group) + 1) * len(lesson[0])
            # A forward pass below 1,000 tokens does not use all cores. Above that, lengths in a group are similar: 15 % is padding instead of 31 %.
            if group and (padded > TOKENS_PER_FORWARD or (padded > 1000 and len(lesson[0]) > 1.25 * len(group[0][0]))):
                yield group
                group = []
            group.append(lesson)
        yield group

    def _pack(self, group: list[Lesson]) -> Batch:
        length = -(-max(len(ids) for ids, _, _ in group) // 8) * 8
        table = torch.full((len(group), length), self._chat.pad)
        at, targets, tasks = [], [], []
        for row, (ids, learned, task) in enumerate(group):
            table[row, : len(ids)] = torch.tensor(ids)
            for position, counts in enumerate(learned):
                if counts:
                    at.append(row * length + position - 1)
                    targets.append(ids[position])
                    tasks.append(task)
        return Batch(table, torch.tensor(at), torch.tensor(targets), torch.tensor(tasks))


class Trainer:
    def __init__(self, folder: Path, device: str, compile_network: bool) -> None:
        torch.manual_seed(1)
        self.folder, self.device = folder, device
        self.chat = Chat()
        self.network = Network(Shape(vocabulary=self.chat.tokenizer.get_vocab_size())).to(device, torch.bfloat16)
        self.masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in self.network.named_parameters()}
        matrices = [p for name, p in self.masters.items() if p.dim() == 2 and name != "embed_tokens.weight"]
        others = [p for name, p in self.masters.items() if p.dim() != 2 or name == "embed_tokens.weight"]
        self.optimizers = (
            Muon(matrices, lr=MUON_RATE, weight_decay=0.02),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self.forward = torch.compile(self.network, dynamic=True) if compile_network else self.network
        self.steps = 0

    def step(self, batches: list[Batch], scale: float) -> dict[int, list[float]]:
        """Run one optimizer step; return the sum and the number of losses by task."""
        learned = sum(len(batch.at) for batch in batches)
        losses: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for batch in batches:
            hidden = self.forward(batch.ids.to(self.device)).flatten(0, 1)[batch.at.to(self.device)]
            each = F.cross_entropy(self.network.logits(hidden).float(), batch.targets.to(self.device), reduction="none")
            (each.sum() / learned).backward()  # type: ignore[no-untyped-call]
            each = each.detach().cpu()
            for task in batch.tasks.unique().tolist():  # type: ignore[no-untyped-call]
                chosen = each[batch.tasks == task]
                losses[task][0] += float(chosen.sum())
                losses[task][1] += len(chosen)
        self._update(scale)
        self.steps += 1
        return losses

    def _update(self, scale: float) -> None:
        for name, parameter in self.network.named_parameters():
            assert parameter.grad is not None
            self.masters[name].grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        for optimizer, rate in zip(self.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(self.masters[name])

    def save(self) -> None:
        save(self.network, self.folder, self.chat.end, self.chat.pad)
        state = {
            "masters": dict(self.masters),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "steps": self.steps,
        }
        torch.save(state, self.folder / "checkpoint.tmp")
        (self.folder / "checkpoint.tmp").replace(self.folder / "checkpoint.pt")

    def start_from(self, folder: Path) -> None:
        """Load the weights of a finished run, without its optimizer state, to train shipped weights further."""
        with torch.no_grad():
            for name, parameter in load(folder).named_parameters():
                self.masters[name].copy_(parameter)
            for name, parameter in self.network.named_parameters():
                parameter.copy_(self.masters[name])

    def resume(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", map_location=self.device, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                self.masters[name].copy_(state["masters"][name])
                parameter.copy_(self.masters[name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.steps = state["steps"]


def rate_scale(step: int, seconds_left: float, decay_seconds: float) -> float:
    return min(1.0, (step + 1) / WARM_UP_STEPS, max(0.0, seconds_left / decay_seconds) if decay_seconds else 1.0)


class Report:
    """The progress of a run: a bar on a terminal, else a line every twenty seconds."""

    def __init__(self, minutes: float) -> None:
        self._began = self._said = time.monotonic()
        self._totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._tokens = 0
        self._bar = Progress(disable=not sys.stdout.isatty())
        self._task = self._bar.add_task("training", total=minutes)
        self._bar.start()

    def add(self, losses: dict[int, list[float]], tokens: int, steps: int, scale: float) -> None:
        for task, (loss, count) in losses.items():
            self._totals[task][0] += loss
            self._totals[task][1] += count
        self._tokens += tokens
        now = time.monotonic()
        minutes, since = (now - self._began) / 60, now - self._said
        self._bar.update(self._task, completed=minutes)
        if since > 20:
            shown = "  ".join(
                f"{TASKS[task]} {loss / count:.3f}" for task, (loss, count) in sorted(self._totals.items())
            )
            self.say(f"{minutes:6.1f} min  step {steps}  rate {scale:.2f}  {self._tokens / since:,.0f} tok/s  {shown}")
            self._totals.clear()
            self._tokens, self._said = 0, now

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def run(trainer: Trainer, minutes: float, decay_minutes: float, evaluate_minutes: float, seed: int) -> None:
    lessons = Lessons(trainer.chat, seed * 1_000_003 + trainer.steps)
    report = Report(minutes)
    stopped = _stop_on_signals()
    saved = evaluated = time.monotonic()
    deadline = saved + minutes * 60
    while (now := time.monotonic()) < deadline and not stopped:
        batches = lessons.step()
        scale = rate_scale(trainer.steps, deadline - now, decay_minutes * 60)
        losses = trainer.step(batches, scale)
        report.add(losses, sum(batch.ids.numel() for batch in batches), trainer.steps, scale)
        if now - saved > 180:
            trainer.save()
            saved = now
        if evaluate_minutes and now - evaluated > evaluate_minutes * 60:
            report.say(f"held out, 40 each: {_accuracies(trainer)}")
            evaluated = now
    trainer.save()
    report.close()


def _accuracies(trainer: Trainer) -> str:
    save(trainer.network, trainer.folder, trainer.chat.end, trainer.chat.pad)
    generate = engine_generator(trainer.folder, trainer.chat)
    scores = [evaluate(generate, trainer.chat, task, 40) for task in TARGETS]
    return "  ".join(f"{score.task} {score.share:.0%}" for score in scores)


def _stop_on_signals() -> list[int]:
    """Return a list that SIGINT and SIGTERM extend, so that a run ends after a whole step and is saved."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _frame: received.append(signum))
    return received


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Ember.")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and checkpoint")
    parser.add_argument("--minutes", type=float, default=150.0)
    parser.add_argument(
        "--decay-minutes",
        type=float,
        default=None,
        help="minutes at the end in which the learning rate falls to 0 (default: two thirds of --minutes)",
    )
    parser.add_argument("--evaluate-minutes", type=float, default=15.0, help="minutes between evaluations (0: never)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument(
        "--start-from", type=Path, help="start with the weights of this folder, such as the shipped ones"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="compile the network (about a third faster on a CPU)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments.out, arguments.device, arguments.compile)
    if arguments.start_from is not None:
        trainer.start_from(arguments.start_from)
    if arguments.resume:
        trainer.resume()
    decay = arguments.minutes * 2 / 3 if arguments.decay_minutes is None else arguments.decay_minutes
    run(trainer, arguments.minutes, decay, arguments.evaluate_minutes, arguments.seed)


if __name__ == "__main__":
    main()

"""Train Ember's adapter for long answers: python -m load_tests.long_answers.train --minutes 30

The adapter has low-rank changes of all matrices of a layer (LoRA, Hu et al. 2021), stored as PEFT does, 0.9 MB in bf16. `merged`
writes Ember with the changes in its weights, to measure drafts without the cost of an adapter.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from load_tests.long_answers.corpus import ASKS
from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS
from training.ember.chat import HERE, Chat
from training.ember.corpus.conversation import Split
from training.ember.network import Network, load, save

ADAPTER = Path(__file__).parent / "adapter"
RANK, ALPHA = 16, 32
RATE = 2e-3
TOKENS_PER_STEP = 4_096
WARM_UP_STEPS = 20


class LowRank(nn.Module):
    """The product B A for each matrix of a network's layers; B starts with zeros."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.names = [name for name, p in network.named_parameters() if p.dim() == 2 and name.startswith("layers.")]
        shapes = {name: network.get_parameter(name).shape for name in self.names}
        self.a = nn.ParameterList([torch.randn(RANK, shapes[name][1]) * shapes[name][1] ** -0.5 for name in self.names])
        self.b = nn.ParameterList([torch.zeros(shapes[name][0], RANK) for name in self.names])

    def changed(self, network: Network) -> dict[str, Tensor]:
        """Return the network's parameters with the changes in them."""
        changes = {
            name: network.get_parameter(name) + ALPHA / RANK * (b @ a)
            for name, a, b in zip(self.names, self.a, self.b, strict=True)
        }
        return dict(network.named_parameters()) | changes

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, a, b in zip(self.names, self.a, self.b, strict=True):
            module = f"base_model.model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = a.detach().to(torch.bfloat16)
            tensors[f"{module}.lora_B.weight"] = b.detach().to(torch.bfloat16)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        targets = sorted({name.split(".")[-2] for name in self.names})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": targets,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def merged(folder: Path) -> Path:
    """Write Ember with the trained adapter in its weights; return the folder."""
    network, chat = load(HERE), Chat()
    tensors = load_file(ADAPTER / WEIGHTS)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            module = f"base_model.model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in tensors:
                a, b = (tensors[f"{module}.lora_{half}.weight"].float() for half in "AB")
                parameter.add_(ALPHA / RANK * (b @ a))
    save(network, folder, chat.end, chat.pad)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((HERE / name).read_bytes())
    return folder


def train(changes: LowRank, network: Network, minutes: float, seed: int) -> None:
    chat, rng = Chat(), random.Random(seed)
    optimizer = torch.optim.AdamW(changes.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began = said = time.monotonic()
    steps, num_said, losses = 0, 0, 0.0
    while (now := time.monotonic()) < began + 60 * minutes:
        scale = min((steps + 1) / WARM_UP_STEPS, (began + 60 * minutes - now) / (40 * minutes), 1.0)
        lessons, num_tokens = [], 0
        while num_tokens < TOKENS_PER_STEP:
            asked = rng.choice(list(ASKS.values()))(rng, Split.TRAIN)
            lessons.append(chat.lesson(asked.messages, asked.tools))
            num_tokens += len(lessons[-1][0])
        learned = sum(sum(each) for _, each in lessons)
        for ids, is_learned in lessons:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = torch.func.functional_call(network, changes.changed(network), (torch.tensor([ids[:-1]]),))
                at = torch.tensor(is_learned[1:])
                logits = network.logits(hidden[0, at])
            loss = F.cross_entropy(logits.float(), torch.tensor(ids[1:])[at], reduction="sum") / learned
            loss.backward()  # type: ignore[no-untyped-call]
            losses += loss.item()
        torch.nn.utils.clip_grad_norm_(changes.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * scale
        optimizer.step()
        optimizer.zero_grad()
        steps, num_said = steps + 1, num_said + 1
        if now - said > 20:
            print(
                f"{(now - began) / 60:5.1f} min  step {steps}  rate {scale:.2f}  loss {losses / num_said:.4f}",
                flush=True,
            )
            said, num_said, losses = now, 0, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Ember's adapter for long answers.")
    parser.add_argument("--out", type=Path, default=ADAPTER, help="folder for the adapter")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    network = load(HERE).requires_grad_(False)
    changes = LowRank(network)
    train(changes, network, options.minutes, options.seed)
    changes.save(options.out)


if __name__ == "__main__":
    main()

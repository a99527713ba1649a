"""Trains draft models for Ember on its own output distribution.

    python -m training.ember.distill mini --minutes 20
    python -m training.ember.distill eagle3 --minutes 10

The draft models are a smaller model with the same vocabulary, and an EAGLE-3 head over three of Ember's layers. A drafter need not be right, but it
must predict what Ember chooses: the model learns Ember's whole distribution after each token of an answer, the head the distribution over the common
tokens. The head's tensors are named as in the checkpoints that SafeAILab/EAGLE publishes (arXiv:2503.01840).
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from training.ember.chat import HERE, Chat
from training.ember.muon import Muon
from training.ember.network import FeedForward, Network, Shape, attend, load, rope_tables, rotate, save
from training.ember.train import Lessons

MINI = Shape(width=128, layers=2, heads=2, kv_heads=1, feed_forward=352)  # 0.63 million parameters
# The EAGLE-3 head has Ember's width, 256, and with its vocabulary 0.49 million parameters.
HEAD = Shape(heads=2, kv_heads=1, feed_forward=64)
HEAD_DIM = 64
TAPS = (0, 2, 4)  # layers after which Ember's hidden states are taken
DRAFT_VOCABULARY = 320  # number of tokens that the head can guess, the most common ones of answers
UNROLLED = 2  # consecutive guesses that are trained; the second one uses the head's own hidden states
TOKENS_PER_STEP = 2_048
MUON_RATE, ADAM_RATE = 8e-3, 4e-3
WARM_UP_STEPS = 20


class Teacher:
    """Ember, which gives the probability of every token at the learned positions."""

    def __init__(self) -> None:
        self.network = load(HERE)

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden states [batch, length, width], and those of all taps, concatenated."""
        network, length = self.network, ids.shape[1]
        x = network.embed_tokens(ids)
        taps = []
        for i, layer in enumerate(network.layers):
            x = layer(x, network.cos[:length], network.sin[:length])
            if i in TAPS:
                taps.append(x)
        return network.norm(x), torch.cat(taps, -1)


class Student(Protocol):
    @property
    def module(self) -> nn.Module: ...

    def loss(self, ids: Tensor, at: Tensor, teacher: Teacher) -> Tensor:
        """Return the mean loss at the flat positions `at` of ids [batch, length]."""

    def save(self, folder: Path) -> None: ...


class Mini:
    """The smaller model. It starts with a projection of Ember's embedding to its width."""

    def __init__(self, teacher: Teacher, chat: Chat) -> None:
        self._chat = chat
        self.module = Network(MINI)
        embedding = teacher.network.embed_tokens.weight.detach()
        _, _, directions = torch.linalg.svd(embedding, full_matrices=False)
        with torch.no_grad():
            self.module.embed_tokens.weight.copy_(embedding @ directions[: MINI.width].T)

    def loss(self, ids: Tensor, at: Tensor, teacher: Teacher) -> Tensor:
        hidden, _ = teacher.hidden(ids)
        with torch.no_grad():
            wanted = F.log_softmax(teacher.network.logits(hidden.flatten(0, 1)[at]), -1)
        found = F.log_softmax(self.module.logits(self.module(ids).flatten(0, 1)[at]), -1)
        return F.kl_div(found, wanted, reduction="batchmean", log_target=True)

    def save(self, folder: Path) -> None:
        save(self.module, folder, self._chat.end, self._chat.pad)


class HeadAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * width, HEAD.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * width, HEAD.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * width, HEAD.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEAD.heads * HEAD_DIM, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, group = rotate(q, cos, sin), rotate(k, cos, sin), HEAD.heads // HEAD.kv_heads
        mixed = attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class HeadLayer(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.self_attn = HeadAttention(width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = FeedForward(HEAD)

    def forward(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), -1)
        x = features + self.self_attn(both, cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainedHead(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.fc = nn.Linear(len(TAPS) * width, width, bias=False)
        self.midlayer = HeadLayer(width, eps)
        self.norm = nn.RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, DRAFT_VOCABULARY, bias=False)


class Eagle3:
    """The head: one layer over each token and the previous token's hidden state, of Ember or the head."""

    def __init__(self, teacher: Teacher, chat: Chat) -> None:
        shape = teacher.network.shape
        self.module = TrainedHead(shape.width, shape.norm_eps)
        self.kept = commonest(chat)  # [DRAFT_VOCABULARY] token ids, ascending
        self._shape = shape
        self._cos, self._sin = rope_tables(shape)
        with torch.no_grad():
            self.module.lm_head.weight.copy_(teacher.network.embed_tokens.weight[self.kept])
            self.module.fc.weight.zero_()
            self.module.fc.weight[:, -shape.width :] = torch.eye(shape.width)

    def loss(self, ids: Tensor, at: Tensor, teacher: Teacher) -> Tensor:
        head, length = self.module, ids.shape[1]
        hidden, taps = teacher.hidden(ids)
        with torch.no_grad():
            embedded = teacher.network.embed_tokens(ids)
            logits = teacher.network.logits(hidden.flatten(0, 1)[at])
            wanted = F.log_softmax(logits[:, self.kept], -1)
            is_kept = torch.isin(logits.argmax(-1), self.kept)
        features, total = head.fc(taps), torch.zeros(())
        for _ in range(UNROLLED):
            before = F.pad(features, (0, 0, 1, 0))[
                :, :length
            ]  # features of the previous token; zeros for the first token
            features = head.midlayer(embedded, before, self._cos[:length], self._sin[:length])
            found = F.log_softmax(head.lm_head(head.norm(features.flatten(0, 1)[at])), -1)
            each = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
            total = total + (each * is_kept).sum() / is_kept.sum().clamp(min=1)
        return total / UNROLLED

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in self.module.named_parameters()
        }
        t2d = torch.zeros(self._shape.vocabulary, dtype=torch.bool)
        t2d[self.kept] = True
        tensors |= {"d2t": self.kept - torch.arange(DRAFT_VOCABULARY), "t2d": t2d}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": self._shape.vocabulary,
            "draft_vocab_size": DRAFT_VOCABULARY,
            "hidden_size": self._shape.width,
            "intermediate_size": HEAD.feed_forward,
            "num_hidden_layers": 1,
            "num_attention_heads": HEAD.heads,
            "num_key_value_heads": HEAD.kv_heads,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": self._shape.max_positions,
            "rms_norm_eps": self._shape.norm_eps,
            "rope_theta": self._shape.rope_theta,
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS]},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def commonest(chat: Chat) -> Tensor:
    """Return the most common tokens of answers, filled up with the first other tokens of the vocabulary."""
    counts: Counter[int] = Counter()
    lessons = Lessons(chat, 99)
    for _ in range(6):
        for batch in lessons.step():
            counts.update(batch.targets.tolist())
    found = [token for token, _ in counts.most_common(DRAFT_VOCABULARY)]
    found += [token for token in range(chat.tokenizer.get_vocab_size()) if token not in counts][
        : DRAFT_VOCABULARY - len(found)
    ]
    return torch.tensor(sorted(found))


def train(student: Student, teacher: Teacher, lessons: Lessons, minutes: float) -> None:
    parameters = dict(student.module.named_parameters())
    matrices = {name for name, p in parameters.items() if p.dim() == 2 and not name.startswith(("embed", "lm_head"))}
    optimizers = (
        Muon([parameters[name] for name in sorted(matrices)], lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW([p for name, p in parameters.items() if name not in matrices], lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )  # fmt: skip
    began = said = time.monotonic()
    steps, num_said, losses = 0, 0, []
    while (now := time.monotonic()) < began + 60 * minutes:
        scale = min((steps + 1) / WARM_UP_STEPS, (began + 60 * minutes - now) / (40 * minutes), 1.0)
        batches = lessons.step()
        learned = sum(len(batch.at) for batch in batches)
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = student.loss(batch.ids, batch.at, teacher) * len(batch.at) / learned
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer, rate in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
        steps, num_said = steps + 1, num_said + 1
        if now - said > 20:
            print(
                f"{(now - began) / 60:5.1f} min  step {steps}  rate {scale:.2f}  loss {sum(losses) / num_said:.3f}",
                flush=True,
            )
            said, num_said, losses = now, 0, []


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a draft model for Ember.")
    parser.add_argument("what", choices=("mini", "eagle3"))
    parser.add_argument("--out", type=Path, help="folder for the weights (default: the shipped ones)")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    chat, teacher = Chat(), Teacher()
    student: Student = Mini(teacher, chat) if options.what == "mini" else Eagle3(teacher, chat)
    train(student, teacher, Lessons(chat, options.seed * 1_000_003, TOKENS_PER_STEP), options.minutes)
    student.save(options.out or HERE / options.what)


if __name__ == "__main__":
    main()

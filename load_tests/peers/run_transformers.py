"""Run transformers' `generate` for the benchmark's commands."""

import sys
import time
from typing import Any

import torch
from lines import rate, serve
from transformers import AutoModelForCausalLM


def main(checkpoint: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    times: list[float] = []

    def note(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        times.append(time.perf_counter())
        return scores

    def generate(prompts: list[list[int]], tokens: int) -> None:
        times.clear()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0,
                logits_processor=[note],
            )  # fmt: skip

    def prefill(prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        generate(prompts, 1)
        return time.perf_counter() - started

    def decode(prompts: list[list[int]], tokens: int) -> float:
        generate(prompts, tokens)
        return rate(len(prompts), times)

    serve(prefill, decode)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

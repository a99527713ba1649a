"""Run this engine for the benchmark's commands: a host's scheduler, cache and sampler in one process."""

import sys
import time
from pathlib import Path

from load_tests.peers.lines import CONTEXT_TOKENS, rate, serve
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams, Submit
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.kernels.cpu import library

MODEL = "model"
KV_TOKENS = 64 * 640 + CONTEXT_TOKENS


def main(checkpoint: Path, threads: int) -> None:
    library.start(wait=True)
    config = HostConfig(device="cpu", threads=threads, kv_bytes=4 << 30)
    engine = load_model(ModelSpec(MODEL, str(checkpoint), "auto", KV_TOKENS), config, make_kv_memory(config)).engine
    count = 0

    def submit(prompts: list[list[int]], tokens: int) -> None:
        nonlocal count
        for prompt in prompts:
            count += 1
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            engine.submit(Submit(str(count), MODEL, tuple(prompt), sampling))

    def prefill(prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        submit(prompts, 1)
        while engine.has_work:
            engine.step()
        taken = time.perf_counter() - started
        engine.sequences.take_outputs()
        return taken

    def decode(prompts: list[list[int]], tokens: int) -> float:
        """Decode all prompts; return tokens per second.

        The prompts are cached before, because the steps of a slow machine compute few tokens of them beside a decode. A sequence that starts before
        the others gets more tokens, so that none ends before the measured window does.
        """
        prefill(prompts)
        submit(prompts, tokens + 4 * len(prompts))
        started, times = set(), []
        while engine.has_work and len(times) < tokens:
            engine.step()
            outputs = engine.sequences.take_outputs()
            started |= {output.sequence_id for output in outputs}
            if any(output.finish_reason for output in outputs):
                raise RuntimeError("a sequence ended before all had decoded together")
            if len(started) == len(prompts):
                times.append(time.perf_counter())
        engine.sequences.abort_all()
        engine.sequences.take_outputs()
        return rate(len(prompts), times)

    serve(prefill, decode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

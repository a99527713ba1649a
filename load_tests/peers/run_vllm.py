"""Run vLLM's CPU build for the benchmark's commands, in one process so that its steps can be timed."""

import os
import sys
import time

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from lines import CONTEXT_TOKENS, rate, serve


def main(checkpoint: str, threads: int) -> None:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))  # otherwise it uses one core of two
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint, dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=CONTEXT_TOKENS, max_num_seqs=64,
    )  # fmt: skip
    engine, count = llm.llm_engine, 0

    def submit(prompts: list[list[int]], tokens: int) -> None:
        nonlocal count
        for prompt in prompts:
            count += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.add_request(str(count), {"prompt_token_ids": prompt}, sampling)

    def prefill(prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        submit(prompts, 1)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - started

    def decode(prompts: list[list[int]], tokens: int) -> float:
        submit(prompts, tokens + len(prompts))
        started: set[str] = set()
        times: list[float] = []
        while engine.has_unfinished_requests() and len(times) < tokens:
            outputs = engine.step()
            started |= {output.request_id for output in outputs}
            if any(output.finished for output in outputs):
                raise RuntimeError("a sequence ended before all had decoded together")
            if len(started) == len(prompts):
                times.append(time.perf_counter())
        engine.abort_request([str(count - i) for i in range(len(prompts))])
        while engine.has_unfinished_requests():
            engine.step()
        return rate(len(prompts), times)

    serve(prefill, decode)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

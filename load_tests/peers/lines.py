"""One command per line in, one answer per line out: the protocol between benchmark and engines.

Standard library only: runners are started by path in environments without our packages. Libraries' output goes to stderr.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, TextIO

CONTEXT_TOKENS = 8192  # the longest prompts that every engine is set up for


def serve(prefill: Callable[[list[list[int]]], float], decode: Callable[[list[list[int]], int], float]) -> None:
    """Answer commands until stdin ends.

    `prefill` returns the seconds until the first token of the only prompt. `decode` generates the given number of tokens per prompt, and returns
    output tokens per second of all sequences from the time when each has its first token.
    """
    _say({"ready": True})
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        prompts = make_prompts(command["seed"], command["batch"], command["prompt_tokens"], command["vocab"])
        is_prefill = command["measure"] == "prefill"
        speed = command["prompt_tokens"] / prefill(prompts) if is_prefill else decode(prompts, command["output_tokens"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        _say({"tokens_per_s": speed, "peak_rss_bytes": peak})


def make_prompts(seed: int, batch: int, tokens: int, vocab: int) -> list[list[int]]:
    """Return random prompts, new for every command, so that no prefix cache helps.

    They are the same for every engine.
    """
    state, prompts = seed * 2654435761 + 1, []
    for _ in range(batch):
        prompt = []
        for _ in range(tokens):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            prompt.append(10 + (state >> 33) % (vocab - 10))
        prompts.append(prompt)
    return prompts


def rate(batch: int, times: list[float]) -> float:
    """Return output tokens per second.

    `times`: when the first tokens and those of each later step were available.
    """
    return batch * (len(times) - 1) / (times[-1] - times[0])


def _take_stdout() -> TextIO:
    """Redirect stdout before a library can print to it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(message: dict[str, Any]) -> None:
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()


_answers = _take_stdout()

"""The embedded model rounded to four bits, with and without calibration: how likely are right answers to it then?

    python -m load_tests.scenarios.calibration       two minutes

Negative log-likelihood of an answer's tokens, over held-out conversations; calibrated with others, of its training's kinds.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.embedded.ember.chat import HERE, Chat, render
from engine.embedded.ember.corpus.conversation import Split
from engine.embedded.ember.corpus.mixture import conversation, conversations
from engine.kv_memory import make_kv_memory
from engine.loading import load_model
from engine.packing import Report
from engine.protocol import HostConfig, ModelSpec, SamplingParams, Submit
from engine.quantizing import Rounding, quantize_directory
from load_tests.records import write_record

_TASKS, _EACH, _MOST_TOKENS = ("facts", "recall", "tools", "json", "arithmetic", "talk", "story", "repeat"), 40, 900
_TEXT_CHARACTERS = 200_000

Lesson = tuple[list[int], list[bool]]  # tokens, and which of them are an answer's


class _SilentReport(Report):
    def say(self, **values: object) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    asked, text = list(_lessons()), _text()
    rows = [{"form": "bf16", "nats_per_token": _nats(HERE, asked)}]
    with TemporaryDirectory() as folder:
        for group in (32, 128):
            for form, given in (("nearest", None), ("calibrated", text)):
                out = quantize_directory(
                    HERE, Path(folder) / f"{form}{group}", Rounding(4, group), _SilentReport(), given
                )
                rows.append({"form": f"int4 by {group}, {form}", "nats_per_token": _nats(out, asked)})
    for row in rows:
        print(f"{row['form']:<24} {row['nats_per_token']:.5f}")
    print(f"Record: {write_record('calibration', {'model': HERE.name, 'conversations': len(asked), 'forms': rows})}")
    return 0


def _lessons() -> Iterator[Lesson]:
    rng, chat = random.Random(5), Chat()
    for task in _TASKS:
        for _ in range(_EACH):
            asked = conversation(rng, task, Split.HELD_OUT)
            tokens, is_answer = chat.lesson(asked.messages, asked.tools)
            if len(tokens) < _MOST_TOKENS:
                yield tokens, is_answer


def _text() -> str:
    text = ""
    for one in conversations(seed=77):
        text += render(one.messages, one.tools)
        if len(text) > _TEXT_CHARACTERS:
            break
    return text


def _nats(directory: Path, lessons: list[Lesson]) -> float:
    """Return the mean negative log-likelihood of the answers' tokens."""
    host = HostConfig(kv_bytes=256 << 20)
    engine = load_model(ModelSpec("m", str(directory), kv_tokens=16_384), host, make_kv_memory(host)).engine
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True)
    for i, (tokens, _) in enumerate(lessons):
        engine.submit(Submit(str(i), "m", tuple(tokens), sampling))
    found: list[float] = []
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            if output.prompt_logprobs is not None:
                is_answer = lessons[int(output.sequence_id)][1][1:]
                found += [-one.logprob for one, counts in zip(output.prompt_logprobs, is_answer, strict=True) if counts]
        engine.on_idle()
    engine.close()
    return sum(found) / len(found)


if __name__ == "__main__":
    sys.exit(main())

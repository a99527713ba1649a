"""Agreement of this engine with llama.cpp on the same GGUF file.

Perplexity of a text, and greedy tokens of 64 prompts:

    python -m load_tests.scenarios.gguf_agreement FILE.gguf ... --peers .peers       some minutes a file (make peers)

Perplexity is computed as by llama-perplexity: over the second half of each chunk of a text, without context from other chunks. The text is the
project's own pages, as the same tokens for both engines. Prompts and greedy answers are exchanged with llama.cpp's server as token ids, so that
tokenizers have no effect. Where two answers diverge, each engine's margin is the difference of logprobs, in nats, between its own token and the
other's.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console

from load_tests.peers.llama_server import LlamaServer, find_program
from load_tests.records import spread, write_record
from load_tests.scenarios.engines import ROOT
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams, Submit, TokenOutput
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.kernels.cpu import library

PAGES = ("README.md", "ARCHITECTURE.md", "engine/README.md", "kernels/README.md")
CHUNK = 2048  # tokens of a chunk
ALTERNATIVES = 10  # likeliest tokens per place, with logprobs
QUESTIONS = (
    "What is {}?",
    "Explain {} to a child.",
    "Name three facts about {}.",
    "Write a short poem about {}.",
    "Why is {} important?",
    "Write one sentence about the history of {}.",
    "What do people often get wrong about {}?",
    "Write a Python function that has to do with {}.",
)
SUBJECTS = ("the sea", "prime numbers", "photosynthesis", "a binary tree", "Paris", "bread", "the moon", "gravity")


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[dict[int, float]]  # logprobs of the likeliest tokens at each place


class Parting(NamedTuple):
    """The first place at which two answers differ."""

    place: int
    ours_nats: float  # our logprob of our token minus that of llama.cpp's token
    theirs_nats: float  # llama.cpp's logprob of its token minus that of our token


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="the folder that make peers has filled")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--chunks", type=int, default=2, help=f"of {CHUNK:,} tokens of text; 0: no perplexity")
    parser.add_argument("--prompts", type=int, default=64, help="number of greedy answers, at most 64")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="auto", help="type of our activations, cache and plain weights")
    parser.add_argument("--peer-flags", default="", help="of llama.cpp's programs")
    options = parser.parse_args()
    perplexity, server = (find_program(options.peers, name) for name in ("llama-perplexity", "llama-server"))
    if perplexity is None or server is None:
        print("llama.cpp is not set up; run: make peers", file=sys.stderr)
        return 3
    library.start(wait=True)
    console, results = Console(width=150), list[dict[str, Any]]()
    for file in options.files:
        with TemporaryDirectory() as folder:
            comparison = Comparison.of(file, Path(folder), options)
            result: dict[str, Any] = {"file": file.name}
            if options.chunks:
                found = result["perplexity"] = comparison.perplexities(perplexity)
                off = found["pilotlight"] / found["llama.cpp"] - 1
                console.print(f"{file.name}: perplexity {found}, ours {off:+.3%}", highlight=False)
            if options.prompts:
                result["greedy"] = comparison.greedy(server)
                console.print(f"{file.name}: greedy answers {result['greedy']}", highlight=False)
            results.append(result)
    chosen = {name: getattr(options, name) for name in ("threads", "chunks", "dtype", "peer_flags")}
    console.print(f"Record: {write_record('gguf-agreement', {**chosen, 'files': results})}", soft_wrap=True)
    return 0


class Comparison(NamedTuple):
    """A GGUF file that both engines load."""

    file: Path
    directory: Path  # the file's checkpoint directory for our engine
    engine: Engine
    tokenizer: Tokenizer
    folder: Path  # for logs and texts
    options: argparse.Namespace

    @classmethod
    def of(cls, file: Path, folder: Path, options: argparse.Namespace) -> "Comparison":
        directory = directory_of(file, folder / "store")
        config = HostConfig(device="cpu", threads=options.threads, kv_bytes=1 << 30)
        spec = ModelSpec("m", str(directory), options.dtype, 2 * CHUNK)
        engine = load_model(spec, config, make_kv_memory(config)).engine
        return cls(file, directory, engine, Tokenizer.from_directory(directory), folder, options)

    def perplexities(self, program: Path) -> dict[str, float]:
        """Return the perplexity that each engine computes of the pages."""
        text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
        written, options = self.folder / "text", self.options
        written.write_text(text, encoding="utf-8")
        token_ids = self.tokenizer.encode(text)
        chunks = [token_ids[at : at + CHUNK] for at in range(0, options.chunks * CHUNK, CHUNK)]
        if len(token_ids) < 2 * CHUNK or len(chunks[-1]) < CHUNK:
            raise SystemExit(f"the text has {len(token_ids):,} tokens, too few for {options.chunks} chunks")
        losses = [loss for chunk in chunks for loss in self._losses(chunk)]
        command = [str(program), "-m", str(self.file), "-f", str(written), "-c", str(CHUNK), "-t", str(options.threads)]
        command += ["--chunks", str(options.chunks), *options.peer_flags.split()]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.search(r"Final estimate: PPL = ([\d.]+)", ended.stdout + ended.stderr)
        if found is None:
            raise RuntimeError(f"llama-perplexity ended with status {ended.returncode}: {ended.stderr[-2000:]}")
        return {"pilotlight": math.exp(sum(losses) / len(losses)), "llama.cpp": float(found[1]), "tokens": len(losses)}

    def _losses(self, chunk: Sequence[int]) -> list[float]:
        """Return the negative logprobs of the tokens after the middle one."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=True)
        found = [each for output in _run(self.engine, chunk, sampling) for each in output.prompt_logprobs or ()]
        assert len(found) == len(chunk) - 1
        return [-each.logprob for each in found[len(chunk) // 2 :]]

    def greedy(self, program: Path) -> dict[str, Any]:
        """Compare greedy answers."""
        options, tokens = self.options, self.options.output_tokens
        prompts = list(self._prompts())[: options.prompts]
        ours = [self._answer(prompt) for prompt in prompts]
        flags = ["-c", str(CHUNK), "-np", "1", *options.peer_flags.split()]
        with LlamaServer(program, self.file, options.threads, self.folder / "llama.log", flags) as server:
            theirs = [_their_answer(server, prompt, tokens) for prompt in prompts]
        partings = [found for pair in zip(ours, theirs, strict=True) if (found := parting(*pair)) is not None]
        margins = {
            "pilotlight": [each.ours_nats for each in partings],
            "llama.cpp": [each.theirs_nats for each in partings],
            "smaller of both": [min(each.ours_nats, each.theirs_nats) for each in partings],
        }
        return {
            "prompts": len(prompts),
            "tokens_each": tokens,
            "equal_answers": len(prompts) - len(partings),
            "tokens_until_parting": tokens * len(prompts) - sum(tokens - each.place for each in partings),
            "margins_nats": {name: spread(values, 4) for name, values in margins.items() if values},
        }

    def _prompts(self) -> Iterator[tuple[int, ...]]:
        template = ChatTemplate.from_directory(self.directory)
        for question in QUESTIONS:
            for subject in SUBJECTS:
                rendered = template.render([{"role": "user", "content": question.format(subject)}])
                yield self.tokenizer.encode_rendered(rendered)

    def _answer(self, prompt: Sequence[int]) -> Answer:
        tokens = self.options.output_tokens
        # All tokens are the least, because llama.cpp's ignore_eos bans the end of an answer.
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0, num_logprobs=ALTERNATIVES)
        outputs = list(_run(self.engine, prompt, sampling))
        found = [each for output in outputs for each in output.logprobs or ()]
        return Answer([token for output in outputs for token in output.token_ids], [dict(each.top) for each in found])


def _run(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[TokenOutput]:
    engine.submit(Submit("1", "m", tuple(prompt), sampling))
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            if output.error_message is not None:
                raise RuntimeError(output.error_message)
            yield output


def _their_answer(server: LlamaServer, prompt: Sequence[int], tokens: int) -> Answer:
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    status, answer = server.post("/completion", {**body, "n_probs": ALTERNATIVES, "cache_prompt": False})
    if status != 200:
        raise RuntimeError(f"llama-server answers {status}: {json.dumps(answer)[:500]}")
    places = answer["completion_probabilities"]
    return Answer(
        [int(place["id"]) for place in places],
        [{int(each["id"]): float(each["logprob"]) for each in place["top_logprobs"]} for place in places],
    )


def parting(ours: Answer, theirs: Answer) -> Parting | None:
    """Return the first place at which two greedy answers differ; None if there is none.

    A token that is not among an engine's likeliest gets the logprob of the last of them, so its margin is a lower bound.
    """
    for place, (mine, other) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        if mine != other:
            ours_at, theirs_at = ours.logprobs[place], theirs.logprobs[place]
            return Parting(
                place,
                ours_at[mine] - ours_at.get(other, min(ours_at.values())),
                theirs_at[other] - theirs_at.get(mine, min(theirs_at.values())),
            )
    return None


if __name__ == "__main__":
    sys.exit(main())

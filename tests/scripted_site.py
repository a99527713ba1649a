"""A site whose engine host is a fake that generates the answers of a script:

`python -m tests.scripted_site SITE_FILE SCRIPT LOG`.

Templates, parsers, grammars, dialects and the server are the product's. The script is a JSON object. `answers` has an answer for each turn of the
assistant; the last one also serves all further turns. `aside` is the answer to requests without tools, which agents send to get a title;
`needs_tools: false` gives these an entry of `answers` too. `token_s` is the time per token in seconds. An answer must follow its request's grammar.
The prompt cache evicts nothing. Each answer and each token is a line of the log.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from load_tests.random_checkpoint import EMBER, ember_vocab
from pilotlight.engine.api.protocol import ModelInfo, ModelSpec, Submit, TokenOutput
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.grammar.matcher import ConstraintError
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.runtime.app import build_app
from pilotlight.runtime.serve import serve_app
from pilotlight.sites.site import load_site
from pilotlight.support.logs import start_logging
from pilotlight.wire.http.listen import bind, url_of
from tests.fakes import FakeEngineClient, FakeLauncher, Step

CONTEXT = 262_144
BLOCK = 16
TURN = "<|im_start|>assistant\n"
TOOLS = "# Tools\n<tools>"


class ScriptedEngine(FakeEngineClient):
    def __init__(self, script: Path, log: Path, site: str) -> None:
        super().__init__()
        self._script, self._log, self._site = script, log, site
        self._tokenizer = Tokenizer.from_directory(EMBER)
        (self._eos,) = self._tokenizer.encode("<|im_end|>", add_special_tokens=False)
        self._compiler = GrammarCompiler(EMBER, ember_vocab(), (self._eos,))
        self._seen: dict[bytes, list[tuple[int, ...]]] = {}  # prompts with their answers, by salt
        self.context_length, self.vocab_size = CONTEXT, ember_vocab()
        self.answer = self._answer

    async def load_model(self, spec: ModelSpec, on_progress: Any = None) -> ModelInfo:
        self._beats = asyncio.create_task(self._beat())
        info = await super().load_model(spec, on_progress)
        return replace(info, eos_token_ids=(self._eos,), total_blocks=CONTEXT // BLOCK)

    async def _beat(self) -> None:
        """Send a heartbeat every second, as a real host does when it has no work."""
        while self.death is None:
            self.heartbeat()
            await asyncio.sleep(1.0)

    def _answer(self, submit: Submit) -> Iterator[Step]:
        script: dict[str, Any] = json.loads(self._script.read_text())
        num_prompt = len(submit.prompt_token_ids) - submit.num_delivered_tokens
        prompt, delivered = submit.prompt_token_ids[:num_prompt], submit.prompt_token_ids[num_prompt:]
        text = "".join(map(self._tokenizer.token_text, prompt))
        turn = min(text.count(TURN), len(script["answers"])) - 1
        is_aside = script.get("needs_tools", True) and TOOLS not in text
        said = script["aside"] if is_aside else script["answers"][turn]
        tokens = (*self._tokenizer.encode(said, add_special_tokens=False), self._eos)
        cached = self._cached(submit)
        self._seen.setdefault(submit.salt, []).append((*prompt, *tokens))
        wrong = self._misfit(submit, tokens)
        self._note(
            turn=turn,
            aside=is_aside,
            prompt=num_prompt,
            cached=cached,
            delivered=len(delivered),
            wrong=wrong,
            tail=text[-400:],
        )
        if wrong or tokens[: len(delivered)] != delivered:
            raise RuntimeError(wrong or "the delivered tokens are not a prefix of the script's answer")
        for position, token in enumerate(tokens[len(delivered) :], len(delivered)):
            yield float(script.get("token_s", 0.0))
            self._note(token=position, of=len(tokens), turn=turn, aside=is_aside)
            is_last = position == len(tokens) - 1
            yield TokenOutput("", (token,), "stop" if is_last else None, cached if position == len(delivered) else None)

    def _cached(self, submit: Submit) -> int:
        """Return the length in tokens of the longest prefix, in whole blocks, that the prompt shares with an earlier prompt and its answer."""
        prompt = submit.prompt_token_ids
        longest = 0
        for seen in self._seen.get(submit.salt, ()):
            common = next(
                (i for i, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b), min(len(prompt), len(seen))
            )
            longest = max(longest, common)
        return min(longest, len(prompt) - 1) // BLOCK * BLOCK

    def _misfit(self, submit: Submit, tokens: tuple[int, ...]) -> str:
        """Return why an answer does not follow the request's grammar; empty if it does."""
        if submit.constraint is None:
            return ""
        matcher = self._compiler.matcher(self._compiler.compile(submit.constraint))
        try:
            for token in tokens:
                if not matcher.is_complete:
                    matcher.accept(token)
        except ConstraintError as error:
            return f"the script does not follow the grammar: {error}"
        return ""

    def _note(self, **fields: Any) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps({"site": self._site, "at": time.time(), **fields}) + "\n")


async def serve(site_file: Path, script: Path, log: Path) -> None:
    site = load_site(site_file)
    start_logging(site.name)
    launcher = FakeLauncher()
    launcher.client_class = lambda: ScriptedEngine(script, log, site.name)
    listener = bind(site.listen.host, site.listen.port)
    app = build_app(site, launchers=[launcher], url=url_of(listener))
    await serve_app(app, listener)


if __name__ == "__main__":
    asyncio.run(serve(*map(Path, sys.argv[1:4])))

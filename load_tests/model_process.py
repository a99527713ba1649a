"""A process with one model, which takes commands on stdin and answers each with a line of JSON.

Benchmarks start, wake and kill it where there is no site. Imports nothing that a bare GPU machine lacks.

    python -m load_tests.model_process DIRECTORY CONFIG      CONFIG: fields of a HostConfig, `weights_file`, `is_standby`

    load                from nothing here to the first token      unload
    prewarm             as a standby does for a model that another process serves
    registered          until the device reaches the sleeping weights by itself
    generate N LENGTH TOKENS [FIRST]     so many sequences at once, of random prompts, other ones for each FIRST
    store               until the finished blocks are in the host tier
"""

import json
import random
import sys
import time
from typing import Any

STARTED = time.perf_counter()
_FIRST_PROMPT = 16
_REGISTERING_S = 30.0


class ModelProcess:
    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        from pilotlight.engine.api.protocol import HostConfig, ModelSpec
        from pilotlight.engine.host.model_loader import import_libraries
        from pilotlight.engine.host.preparation import prepare

        weights_file, is_standby = options.pop("weights_file", None), options.pop("is_standby", False)
        self._config = HostConfig(**options)
        ready = prepare(self._config, is_standby, import_libraries)
        self._spec = ModelSpec("bench", directory, weights_file=weights_file, is_awaited=True)
        self._memory: Any = None
        self._tiers: Any = None
        self._loaded: Any = None
        self.phases = dict(ready.phases)

    def prewarm(self) -> dict[str, Any]:
        from pilotlight.engine.host.prewarming import prewarm

        began = time.perf_counter()
        prewarm(self._spec, self._config)
        return {"taken_s": time.perf_counter() - began}

    def registered(self) -> dict[str, Any]:
        from pilotlight.engine.weights.bundles.bundle_maps import MAPS

        began = time.perf_counter()
        return {"is_whole": MAPS.wait_registered(_REGISTERING_S), "taken_s": time.perf_counter() - began}

    def load(self) -> dict[str, Any]:
        from pilotlight.engine.kv.shared_tiers import open_tiers
        from pilotlight.engine.loading.kv_memory import make_kv_memory
        from pilotlight.engine.loading.loading import load_model

        began = time.perf_counter()
        if self._memory is None:
            self._memory = make_kv_memory(self._config)
            self._tiers = open_tiers(self._config)
        arena_s = time.perf_counter() - began
        self._loaded = load_model(self._spec, self._config, self._memory, tiers=self._tiers)
        info = self._loaded.engine.info
        self.generate(1, _FIRST_PROMPT, 1)
        return {
            "first_token_s": time.perf_counter() - began,
            "since_start_s": time.perf_counter() - STARTED,
            "arena_s": arena_s,
            "load_phases": dict(info.load_phases),
            "weights_bytes": info.weights_bytes,
        }

    def generate(self, number: int, length: int, tokens: int, first: int = 0) -> dict[str, Any]:
        from pilotlight.engine.api.protocol import SamplingParams, Submit

        engine = self._loaded.engine
        vocab, sampling = engine.info.vocab_size, SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        prompts = [random.Random(f"{first} {i}").choices(range(vocab), k=length) for i in range(number)]
        began, first_s, heard, cached = time.perf_counter(), 0.0, 0, 0
        for i, prompt in enumerate(prompts):
            engine.submit(Submit(f"{i}", "bench", tuple(prompt), sampling))
        while engine.has_work:
            if not engine.step():
                time.sleep(0.0005)  # blocks are being loaded from a tier
            for output in engine.sequences.take_outputs():
                assert output.error_message is None, output.error_message
                heard += len(output.token_ids)
                cached += output.num_cached_tokens or 0
                first_s = first_s or time.perf_counter() - began
        taken_s = time.perf_counter() - began
        return {"first_token_s": first_s, "taken_s": taken_s, "tokens": heard, "cached_prompt_tokens": cached}

    def store(self) -> dict[str, Any]:
        began = time.perf_counter()
        engine, before = self._loaded.engine, -1
        while self._tiers is not None and len(self._tiers.host) != before:
            before = len(self._tiers.host)
            for _ in range(50):
                engine.on_idle()
                time.sleep(0.01)
        return {"taken_s": time.perf_counter() - began, "blocks": before}

    def unload(self) -> dict[str, Any]:
        began = time.perf_counter()
        self._loaded.close()
        self._loaded = None
        return {"taken_s": time.perf_counter() - began}


def main() -> None:
    process = ModelProcess(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps({"phases": process.phases, "since_start_s": time.perf_counter() - STARTED}), flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(json.dumps(getattr(process, name)(*map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()

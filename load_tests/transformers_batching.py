"""Many requests at once through transformers' continuous batching, with its defaults.

python -m load_tests.transformers_batching DIRECTORY DEVICE N PROMPT ANSWER
"""

import json
import random
import sys
import time
from typing import Any


def main() -> None:
    import torch
    import transformers

    directory, device = sys.argv[1:3]
    number, length, tokens = map(int, sys.argv[3:])
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    model = loaded.to(device).eval()
    generation = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    taken_s, made = 0.0, 0
    for first in (1, 2):  # the first pass only records and compiles
        prompts = [
            random.Random(f"{first} {i}").choices(range(model.config.vocab_size), k=length) for i in range(number)
        ]
        began = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=generation, progress_bar=False)
        taken_s, made = time.perf_counter() - began, sum(len(one.generated_tokens) for one in outputs.values())
    print(json.dumps({"taken_s": taken_s, "tokens": made, "tokens_per_s": made / taken_s}))


if __name__ == "__main__":
    main()

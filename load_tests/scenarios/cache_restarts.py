"""What is left of the KV cache when everything is restarted? `make bench-cache-restarts` runs it.

Fifty conversations have their first turn. Then the second turn is asked: of the site as it is, of one that was stopped in order and started again,
of one whose processes were all killed at once, and of another site that shares nothing with the first but a Mooncake Store
(pip install 'pilotlight-inference[mooncake]'). Each way has a site of its own, with a host that computes prompts and one that answers, host memory
and a disk, or the store instead; the record says how many tokens of the second turns were found cached.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from load_tests.records import write_record
from load_tests.site_process import SiteProcess
from load_tests.store_process import store_process

MODEL = {"name": "ember", "source": "embedded:ember"}
HOSTS = [{"device": "cpu", "role": "prefill"}, {"device": "cpu", "role": "decode"}]
STORE = "another site, by the store"
WAYS = ("not restarted", "stopped and started", "all killed", STORE)
WORDS = ("pilot", "light", "stove", "warm", "blue", "flame")
GO_ON = {"role": "user", "content": "Go on."}
WRITTEN_S = 2.0  # a write waits for nothing else for so long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--words", type=int, default=80, help="of a first turn")
    options = parser.parse_args()
    console = Console()
    found: dict[str, Any] = {}
    for way in WAYS:
        with console.status(way), behind_host_memory(way) as behind:
            found[way] = run(way, behind, options.conversations, options.words)
    first = found[WAYS[0]]
    table = Table("way", "cached tokens of second turns", "of what was found before", "texts that differ")
    texts = {way: each.pop("texts") for way, each in found.items()}
    for way, each in found.items():
        each["share"] = round(each["cached_tokens"] / first["cached_tokens"], 4)
        each["wrong"] = sum(one != other for one, other in zip(texts[way], texts[WAYS[0]], strict=True))
        table.add_row(way, str(each["cached_tokens"]), f"{each['share']:.1%}", str(each["wrong"]))
    console.print(table)
    console.print(f"Record: {write_record('cache-restarts', found)}", soft_wrap=True)


@contextmanager
def behind_host_memory(way: str) -> Iterator[dict[str, Any]]:
    """Provide a disk, or a store that runs meanwhile, and yield what the site file says of it."""
    if way != STORE:
        with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
            yield {"kv_disk_dir": folder, "kv_disk_gib": 1.0}
        return
    with store_process(1.0) as address:
        yield {"kv_store": address}


def run(way: str, behind: dict[str, Any], conversations: int, words: int) -> dict[str, Any]:
    engine = {
        "kv_gib": 0.1, "kv_host_gib": 0.2, **behind, "hosts": HOSTS,
        "standby": False, "weights_host_gib": 0.1, "scale_up_wait_s": 0,
    }  # fmt: skip
    draw = random.Random(7)
    told = [" ".join(draw.choice(WORDS) + str(draw.randrange(100)) for _ in range(words)) for _ in range(conversations)]
    with SiteProcess("cacherestarts", engine, [MODEL]) as site:
        ready(site)
        first = [ask(site, [{"role": "user", "content": text}]) for text in told]
        time.sleep(WRITTEN_S)
        turns = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": answer["text"]}, GO_ON]
            for text, answer in zip(told, first, strict=True)
        ]
        if way == WAYS[0]:
            return result([ask(site, messages) for messages in turns])
        if way == WAYS[2]:
            for process in site.get("/status")["processes"]:
                os.kill(process["pid"], signal.SIGKILL)
            site.process.wait()
    with SiteProcess("another" if way == STORE else "cacherestarts", engine, [MODEL]) as site:
        ready(site)
        return result([ask(site, messages) for messages in turns])


def ready(site: SiteProcess) -> None:
    site.until(lambda: site.get("/status")["models"][0]["copies"] == len(HOSTS), "both hosts have the model")


def ask(site: SiteProcess, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "ember", "messages": messages, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    answer = site.ask(body, path="/v1/chat/completions")
    usage = answer["usage"]
    return {
        "text": answer["choices"][0]["message"]["content"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "prompt": usage["prompt_tokens"],
    }


def result(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "cached_tokens": sum(answer["cached"] for answer in answers),
        "prompt_tokens": sum(answer["prompt"] for answer in answers),
        "texts": [answer["text"] for answer in answers],
    }


if __name__ == "__main__":
    main()

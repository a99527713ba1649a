"""Placement of sequences on two replicas: the less busy one, unless a cached prefix is worth more (I4)."""

import asyncio
from typing import Any

from pilotlight.engine.api.protocol import AdapterSource, SamplingParams, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.runtime.dispatch.prefixes import CHUNK, PrefixMemory, chain_of, root_of
from tests.asgi import Exchange, call, start
from tests.fakes import says
from tests.runtime.two_devices import CHAT, Pair, ask, even, make_pair

__all__ = ["even", "make_pair"]


async def test_requests_go_where_least_is_open(even: Pair) -> None:
    gate = asyncio.Event()
    for engine in even.engines:
        engine.answer = lambda submit: [*says("H", finish=None), gate, *says("i")]
    exchanges: list[Exchange] = []
    for i in range(6):
        exchanges.append(start(even.site.app, CHAT, ask(stream=True, user=str(i))))
        await exchanges[-1].until(b"H")
    counts = [len(engine.open) for engine in even.engines]
    gate.set()
    assert counts == [3, 3]
    for exchange in exchanges:
        await exchange.done()


async def test_all_choices_of_a_request_are_where_its_prompt_is(even: Pair) -> None:
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    assert len((await call(even.site.app, CHAT, ask(n=4))).json["choices"]) == 4
    assert sorted(len(engine.submits) for engine in even.engines) == [0, 4]


LONG = "the pilot light of a gas stove burns small and blue until somebody wants warm water " * 3  # data


def turn(text: str, answer: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    if answer is not None:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    return {"model": "tiny", "messages": messages}


async def test_a_conversation_stays_where_its_prefix_is_as_long_as_that_pays(even: Pair) -> None:
    gates: list[asyncio.Event] = []
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    assert (await call(even.site.app, CHAT, turn(LONG))).status == 200
    (first,) = [i for i, engine in enumerate(even.engines) if engine.submits]
    # a small request is open there, but computing the long prompt elsewhere would take longer
    blocker = asyncio.Event()
    gates.append(blocker)
    even.engines[first].scripts = []
    even.engines[first].answer = None
    even.engines[first].script = [*says("H", finish=None), blocker, *says("i")]
    holder = start(even.site.app, CHAT, {**turn(LONG), "stream": True, "max_tokens": 2})
    await holder.until(b"H")
    assert even.engines[first].open, "the same prompt went to the same place"
    even.engines[first].answer = lambda submit: says("Hi")
    before = [len(engine.submits) for engine in even.engines]
    assert (await call(even.site.app, CHAT, turn(LONG, "Hi"))).status == 200
    after = [len(engine.submits) for engine in even.engines]
    assert after[first] == before[first] + 1, "it stays"
    even.replicas()[first].work.prefill_tokens += 10_000  # ten seconds of other prompts
    assert (await call(even.site.app, CHAT, turn(LONG, "Hi"))).status == 200
    even.replicas()[first].work.prefill_tokens -= 10_000
    assert len(even.engines[1 - first].submits) == after[1 - first] + 1, "now it does not pay"
    for gate in gates:
        gate.set()
    await holder.done()


def test_another_tenants_prompt_says_nothing() -> None:
    prompt = tuple(range(3 * CHUNK + 5))
    memory = PrefixMemory()
    memory.remember(chain_of(b"one", prompt), 10_000)
    assert memory.held_tokens(chain_of(b"one", (*prompt, 7, 8))) == 3 * CHUNK
    assert memory.held_tokens(chain_of(b"another", prompt)) == 0
    own = Submit("s", "tiny", (1,), SamplingParams(1), b"one")
    assert chain_of(root_of(own), prompt) == chain_of(b"one", prompt)
    assert memory.held_tokens(chain_of(root_of(replace(own, adapter=AdapterSource("a", "", "ab"))), prompt)) == 0
    assert memory.held_tokens(chain_of(b"one", (9, *prompt[1:]))) == 0, "a chain hangs on its beginning"


def test_prefixes_are_forgotten_from_their_tails_and_oldest_first() -> None:
    memory = PrefixMemory()
    old, new = chain_of(b"", range(4 * CHUNK)), chain_of(b"", range(9, 9 + 4 * CHUNK))
    memory.remember(old, 6 * CHUNK)
    memory.remember(new, 6 * CHUNK)
    assert (memory.held_tokens(old), memory.held_tokens(new)) == (2 * CHUNK, 4 * CHUNK)


async def test_sampling_params_reach_the_copy_unchanged(even: Pair) -> None:
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    await call(even.site.app, CHAT, ask(seed=5, temperature=0.5))
    (submit,) = [submit for engine in even.engines for submit in engine.submits]
    assert isinstance(submit.sampling, SamplingParams)
    assert (submit.sampling.seed, submit.sampling.temperature) == (5, 0.5)

"""Adapters: distributions are those of the weights merged by PEFT, in any batch and on every path of a sequence."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pilotlight.engine.api.protocol import HostConfig, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.kv.tiered_cache import TieredCache
from tests.adapters import ATTENTION, LATENT, LINEAR, adapted, write_adapter
from tests.checkpoints import write_llama
from tests.cpu_kernels import BOTH
from tests.engine.agreement import assert_agrees, full
from tests.engine.conftest import make_transfers_pay
from tests.engine.driver import Heard, draft_with, drain, drain_preempting, load_engine, one, random_prompt, submit
from tests.engine.fake_drafter import Remembering
from tests.engine.fake_runner import fake_engine
from tests.engine.families import MODELS, write_family
from tests.engine.test_constrained_answers import JSON, asked, assert_is_person, ember
from tests.in_turn import in_turn
from training.ember.chat import HERE

pytestmark = pytest.mark.usefixtures("arithmetic")

DENSE = [name for name in MODELS if name.startswith(("llama", "qwen2", "qwen3,", "mistral", "gemma3"))]
SPARSE = [name for name in MODELS if name not in DENSE]
OPTIONS: dict[str, dict[str, Any]] = {
    "all projections": {},
    "queries and values, rank 1": {"targets": ("q_proj", "v_proj"), "rank": 1},
    "rsLoRA": {"use_rslora": True, "rank": 9},
    "patterns": {"rank_pattern": {"q_proj": 11, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "some layers": {"layers_to_transform": [1], "rank": 33},
}


class Written(NamedTuple):
    base: Path
    model: PreTrainedModel
    adapters: dict[Path | None, PreTrainedModel]  # merged models; None is the base


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("llama")
    model = write_family(directory / "base", "llama, biased")
    written: dict[Path | None, PreTrainedModel] = {None: model}
    for i, (name, options) in enumerate(OPTIONS.items()):
        written[directory / name] = write_adapter(directory / name, model, seed=i, **options)
    return Written(directory / "base", model, written)


def requests(llama: Written, times: int = 1, **sampling: Any) -> list[tuple[Submit, Path | None]]:
    """Return requests for each adapter and for the base. Their prompts are equal, so that wrongly shared blocks are noticed."""
    settings = {"max_tokens": 12, "num_logprobs": 3} | sampling
    return [
        (adapted(submit(f"{directory and directory.name} {i}", random_prompt(20 + 13 * i, seed=i), **settings), directory), directory)
        for i in range(times)
        for directory in llama.adapters
    ]  # fmt: skip


def alone(llama: Written, messages: list[Submit], **options: Any) -> dict[str, Heard]:
    """Return the answer to each request alone, on a new engine."""
    return {message.sequence_id: one(load_engine(llama.base, **options), message) for message in messages}


def company(llama: Written) -> list[Submit]:
    return [message for message, _ in requests(llama, 3, temperature=0.8, seed=4)]


@pytest.fixture(scope="module")
def each_alone(llama: Written, arithmetic: str) -> dict[str, Heard]:
    return alone(llama, company(llama))


def assert_same(actual: dict[str, Heard], expected: dict[str, Heard]) -> None:
    """Compare tokens exactly, and log-probabilities within the rounding differences of other batch sizes."""
    assert {name: (h.token_ids, h.error) for name, h in actual.items()} == {
        name: (h.token_ids, h.error) for name, h in expected.items()
    }
    for name, heard in actual.items():
        theirs = [reported.logprob for reported in expected[name].logprobs]
        assert [reported.logprob for reported in heard.logprobs] == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(("arithmetic", "family"), in_turn(BOTH, [*DENSE, *SPARSE]), indirect=["arithmetic"])
def test_every_family_agrees_with_merged_weights(tmp_path: Path, family: str) -> None:
    model = write_family(tmp_path / "base", family)
    targets = LATENT if family.startswith("deepseek") else LINEAR if family in DENSE else ATTENTION
    merged = write_adapter(tmp_path / "a", model, targets=targets)
    engine, prompt = load_engine(tmp_path / "base"), random_prompt(61, seed=1)
    heard = one(engine, adapted(full("a", prompt, max_tokens=6, prompt_logprobs=True), tmp_path / "a"))
    assert_agrees(merged, prompt, heard)
    assert_agrees(model, prompt, one(engine, full("b", prompt, max_tokens=3)))


def test_a_mixed_batch_agrees_each_for_itself(llama: Written) -> None:
    asked = [
        (replace(message, sampling=replace(message.sampling, num_logprobs=431)), d) for message, d in requests(llama)
    ]
    heard = drain(load_engine(llama.base), [message for message, _ in asked])
    for message, directory in asked:
        assert_agrees(llama.adapters[directory], list(message.prompt_token_ids), heard[message.sequence_id])


LIMITS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "small chunks": {"max_num_batched_tokens": 13},
    "two slots": {"adapter_slots": 2},
    "one slot": {"adapter_slots": 1, "max_num_seqs": 3},
    "overlapped": {"depth": 2},
    "overlapped and preempted, three slots": {
        "depth": 2, "kv_tokens": 160, "max_num_batched_tokens": 50, "adapter_slots": 3,
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("arithmetic", "limits"), in_turn(BOTH, LIMITS), indirect=["arithmetic"])
def test_company_and_slots_and_preemption_change_nothing(
    llama: Written, each_alone: dict[str, Heard], limits: str
) -> None:
    assert_same(drain(load_engine(llama.base, **LIMITS[limits]), company(llama)), each_alone)


@pytest.mark.long
@pytest.mark.parametrize(("arithmetic", "tokens"), in_turn(BOTH, [2, 17, 32]), indirect=["arithmetic"])
def test_many_adapters_in_one_batch_give_each_what_it_gives_alone(tmp_path: Path, tokens: int) -> None:
    model = write_family(tmp_path / "base", "llama, three heads over one, tied")
    for i in range(8):
        write_adapter(tmp_path / f"{i}", model, seed=i, rank=1 + 7 * i)
    prompt = random_prompt(9, seed=2)
    messages = [adapted(submit(f"{i}", prompt, max_tokens=tokens), tmp_path / f"{i % 8}") for i in range(32)]
    engine = load_engine(tmp_path / "base", adapter_slots=8, kv_tokens=4096)
    heard = drain(engine, messages)
    for i in range(8):
        answer = one(load_engine(tmp_path / "base"), messages[i]).token_ids
        assert all(heard[f"{j}"].token_ids == answer for j in range(i, 32, 8))


def test_preempted_sequences_agree(llama: Written) -> None:
    asked = [(replace(m, sampling=replace(m.sampling, num_logprobs=431, max_tokens=30)), d) for m, d in requests(llama)]
    engine = load_engine(llama.base, kv_tokens=144, max_num_batched_tokens=40)
    heard = drain_preempting(engine, [message for message, _ in asked])
    assert engine.scheduler.counts.preemptions > 0
    for message, directory in asked:
        assert_agrees(llama.adapters[directory], list(message.prompt_token_ids), heard[message.sequence_id])


@pytest.mark.long
def test_drafts_change_no_token(llama: Written) -> None:
    messages = [
        replace(message, prompt_token_ids=(*message.prompt_token_ids, i))
        for i, (message, _) in enumerate(requests(llama, 2))
    ]
    expected = alone(llama, messages)
    engine = load_engine(llama.base)
    remembering = Remembering({m.prompt_token_ids: expected[m.sequence_id].token_ids for m in messages})
    draft_with(engine, remembering)
    assert_same(drain(engine, messages), expected)
    assert remembering.counts.num_accepted_tokens > 10
    drafted_by_base = load_engine(llama.base, speculate=f"draft:{llama.base}")
    assert_same(drain(drafted_by_base, messages), expected)
    assert drafted_by_base.load().drafts.num_accepted_tokens > 10


def test_a_prefix_is_found_under_its_own_adapter_alone(llama: Written) -> None:
    engine, prompt = load_engine(llama.base), random_prompt(80, seed=10)
    first, second = [directory for directory in llama.adapters if directory is not None][:2]
    order = [None, first, second, None, first, second]
    heard = [one(engine, adapted(full(f"{i}", prompt, max_tokens=3), d)) for i, d in enumerate(order)]
    assert [h.num_cached_tokens for h in heard] == [0, 0, 0, 64, 64, 64]
    for directory, each in zip(order, heard, strict=True):
        assert_agrees(llama.adapters[directory], prompt, each)


def test_a_resumed_answer_continues_as_if_never_cut(llama: Written) -> None:
    directory = list(llama.adapters)[1]
    message = adapted(submit("a", random_prompt(20, seed=1), max_tokens=20, temperature=0.9, seed=3), directory)
    whole = one(load_engine(llama.base), message).token_ids
    rest = replace(
        message,
        prompt_token_ids=(*message.prompt_token_ids, *whole[:7]),
        sampling=replace(message.sampling, max_tokens=13),
    )
    assert whole[:7] + one(load_engine(llama.base), replace(rest, num_delivered_tokens=7)).token_ids == whole


def test_several_answers_to_a_prompt_share_it_and_the_adapter(llama: Written) -> None:
    directory = list(llama.adapters)[1]
    leader = adapted(submit("0", random_prompt(64, seed=3), temperature=1.0, seed=0), directory)
    samples = [
        replace(leader, sequence_id=f"{i}", leader="0", sampling=replace(leader.sampling, seed=i)) for i in range(1, 4)
    ]
    engine = load_engine(llama.base)
    heard = drain(engine, [leader, *samples])
    assert [heard[f"{i}"].num_cached_tokens for i in range(4)] == [0, 48, 48, 48]
    assert heard["0"].token_ids == one(load_engine(llama.base), leader).token_ids


def test_recorded_steps_are_those_with_adapters_and_those_without(llama: Written, arithmetic: str) -> None:
    if arithmetic == "torch":
        pytest.skip("torch's steps are not recorded on a CPU")
    engine = load_engine(llama.base)
    assert isinstance(engine.runner, ModelRunner)
    graphs = engine.runner.graphs
    assert graphs is not None
    first, second = [directory for directory in llama.adapters if directory is not None][:2]
    plain = submit("a", random_prompt(5, seed=1), max_tokens=20)
    one(engine, plain)
    assert graphs.num_graphs == 1
    told = one(engine, adapted(plain, first)).token_ids
    graphs = engine.runner.graphs  # the first adapter created the slots, and new graphs
    assert graphs is not None
    assert graphs.num_graphs == 1
    assert one(engine, adapted(plain, first)).token_ids == told
    other = one(engine, adapted(plain, second)).token_ids
    assert graphs.num_graphs == 1, "another adapter is computed by the same recording"
    assert other == one(load_engine(llama.base), adapted(plain, second)).token_ids
    assert one(engine, plain).token_ids == one(load_engine(llama.base), plain).token_ids


def test_bf16_follows_merged_weights(tmp_path: Path) -> None:
    model = write_family(tmp_path / "base", "qwen3, yarn, tied", torch.bfloat16)
    merged = write_adapter(tmp_path / "a", model)
    prompt = random_prompt(40, seed=5)
    engine = load_engine(tmp_path / "base", dtype="bfloat16")
    heard = one(engine, adapted(full("a", prompt, max_tokens=1), tmp_path / "a"))
    plain = one(engine, full("b", prompt, max_tokens=1))
    from tests.engine.agreement import as_distribution

    with torch.inference_mode():
        expected = merged(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    assert (as_distribution(heard.logprobs[0]) - expected).abs().mean() <= 0.07
    assert (as_distribution(plain.logprobs[0]) - expected).abs().mean() > 0.3, "the adapter changes something"


def free_slots(engine: Engine) -> int:
    residency = engine.requirements.adapters
    return len(residency._free) + sum(resident.users == 0 for resident in residency._resident.values())


@pytest.mark.parametrize("cause", ["abort", "end_all", "fail_all"])
def test_whatever_ends_sequences_their_slots_are_free(llama: Written, cause: str) -> None:
    engine = load_engine(llama.base, adapter_slots=3)
    for message, _ in requests(llama, 2):
        engine.submit(message)
    for _ in range(4):
        engine.step()
    if cause == "abort":
        engine.sequences.abort_all()
    elif cause == "end_all":
        engine.sequences.end_all("engine_error", "because")
    else:
        engine.fail_all("engine_error", "because")
    engine.sequences.take_outputs()
    assert not engine.has_work
    assert free_slots(engine) == 3
    message, _ = requests(llama, 1)[1]
    assert one(engine, message).token_ids == one(load_engine(llama.base), message).token_ids


@pytest.mark.long
def test_a_grammar_is_followed_with_an_adapter(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32)
    write_adapter(tmp_path / "a", base, rank=2)
    messages = [adapted(asked(f"{i}", JSON, seed=i), tmp_path / "a" if i % 2 else None) for i in range(4)]
    engine = ember()
    heard = drain(engine, messages)
    for i in range(4):
        assert_is_person(heard[f"{i}"])
    assert heard["1"].token_ids == one(ember(), messages[1]).token_ids


def test_blocks_in_a_tier_are_found_under_their_own_adapter_alone(llama: Written, tmp_path: Path) -> None:
    first, second = [directory for directory in llama.adapters if directory is not None][:2]
    prompt = random_prompt(64, seed=3)
    host = HostConfig(kv_host_bytes=8 << 20, kv_host_dir=str(tmp_path / "host"))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        make_transfers_pay(patch)
        for directory in (first, second, None, first):
            tiers = open_tiers(host)
            assert tiers is not None
            engine = load_engine(llama.base, tiers=tiers)
            assert isinstance(engine.tiers, TieredCache)
            heard = one(engine, adapted(full("a", prompt, max_tokens=3), directory))
            assert_agrees(llama.adapters[directory], prompt, heard)
            found.append(engine.load().prefix_host_hits)
            assert engine.tiers.wait_until_idle(10)
            engine.close()
            tiers.close()
    assert found == [0, 0, 0, 48]


def test_an_adapter_that_cannot_be_used_ends_its_own_sequence_alone(llama: Written, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", hidden_size=24)
    write_adapter(tmp_path / "stranger", other)
    good, prompt = list(llama.adapters)[1], random_prompt(20, seed=1)
    messages = [
        adapted(submit(name, prompt), d) for name, d in (("a", good), ("b", tmp_path / "stranger"), ("c", None))
    ]
    engine = load_engine(llama.base)
    heard = drain(engine, messages)
    assert heard["b"].finish_reason == "error"
    assert heard["b"].error is not None
    assert heard["b"].error.startswith("adapter 'stranger' cannot be used: it is of another model: layers.0.")
    assert heard["a"].token_ids == one(load_engine(llama.base), messages[0]).token_ids
    assert heard["c"].token_ids == one(load_engine(llama.base), messages[2]).token_ids
    assert one(engine, messages[0]).token_ids == heard["a"].token_ids


def test_a_model_without_projections_refuses_adapters(llama: Written) -> None:
    engine, _ = fake_engine()
    heard = drain(engine, [adapted(submit("a", [1, 2, 3]), list(llama.adapters)[1])])
    assert heard["a"].error == "tiny supports no adapters; request tiny itself"

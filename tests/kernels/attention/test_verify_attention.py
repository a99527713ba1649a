"""Verified drafts have the results of decoding each token, and later tokens do not change them; on a CPU to the bit."""

from collections.abc import Iterator

import pytest
import torch

from load_tests.catalogue import attention as catalogue
from load_tests.catalogue.operation import Arguments, Case
from load_tests.catalogue.paged_cases import varlen
from pilotlight.kernels.attention.decode_attention import decode_attention
from pilotlight.kernels.attention.verify_attention import verify_attention
from tests.closeness import assert_close
from tests.cpu_kernels import C_LIBRARY

CASES = [pytest.param(case, id=case.name) for case in catalogue.VERIFY_ATTENTION.cases[1:]]
IN_C = [case for case in CASES if not any(word in str(case.id) for word in ("fp8", "soft_cap", "is_chunked"))]


def decoded_one_by_one(given: Arguments) -> torch.Tensor:
    """Compute each query as the newest token of its context."""
    batch = given["batch"]
    rows: list[int] = []
    tables = batch.block_tables.repeat_interleave(torch.tensor(batch.host_q_lens), dim=0)
    for queries, context in zip(batch.host_q_lens, batch.host_context_lens, strict=True):
        rows += range(context - queries + 1, context + 1)
    lens = torch.tensor(rows)
    return decode_attention(given["q"], given["k_cache"], given["v_cache"], tables, lens, max(rows), given["rule"])


def shortened(given: Arguments) -> Arguments:
    """Remove the last token of each sequence that has more than one."""
    batch = given["batch"]
    less = [int(queries > 1) for queries in batch.host_q_lens]
    kept = [
        torch.arange(queries - fewer) + start
        for queries, fewer, start in zip(batch.host_q_lens, less, batch.cu_seqlens_q.tolist(), strict=False)
    ]
    q_lens = tuple(len(rows) for rows in kept)
    lens = tuple(context - fewer for context, fewer in zip(batch.host_context_lens, less, strict=True))
    return given | {
        "q": given["q"][torch.cat(kept)],
        "batch": varlen(batch.block_tables, q_lens, lens),
        "kept": torch.cat(kept),
    }


@pytest.mark.parametrize("case", CASES)
def test_a_draft_is_seen_as_it_would_be_token_by_token(case: Case) -> None:
    given = case.make(torch.float32)
    assert_close("verified", decoded_one_by_one(given), verify_attention(**given), 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_longer_draft_does_not_change_the_tokens_before_it(case: Case) -> None:
    given = case.make(torch.float32)
    shorter = shortened(given)
    kept = shorter.pop("kept")
    assert_close("before the last", verify_attention(**shorter), verify_attention(**given)[kept], 1e-6)


def test_queries_may_be_strided() -> None:
    given = catalogue.VERIFY_ATTENTION.cases[2].make(torch.float32)
    wide = torch.cat((given["q"], given["q"]), dim=1)
    strided = wide[:, : given["q"].shape[1]]
    assert not strided.is_contiguous()
    assert_close("strided", verify_attention(**given), verify_attention(**given | {"q": strided}), 1e-6)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", IN_C)
def test_a_cpu_computes_the_bits_of_decoding(case: Case, dtype: torch.dtype, threads: int, arithmetic: str) -> None:
    if arithmetic != C_LIBRARY:
        pytest.skip("torch does not guarantee equal bits")
    given = case.make(dtype)
    sinks = given["rule"].sinks  # C takes sinks in the queries' type
    given["rule"] = given["rule"]._replace(sinks=None if sinks is None else sinks.to(dtype))
    assert torch.equal(verify_attention(**given), decoded_one_by_one(given))

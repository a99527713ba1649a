"""A draft's check gives each token what decoding would have given it, and what lies behind a token does not change it."""

import pytest
import torch

from kernels.catalogue import attention as catalogue
from kernels.catalogue.operation import Arguments
from kernels.decode_attention import decode_attention
from kernels.verify_attention import verify_attention
from tests.closeness import assert_close

CASES = [pytest.param(case, id=case.name) for case in catalogue.VERIFY_ATTENTION.cases[1:]]


def decoded_one_by_one(given: Arguments) -> torch.Tensor:
    """Each query as the newest token of its context."""
    queries = given["q"].shape[1]
    rows = []
    for i in range(queries):
        context_lens = given["context_lens"] - (queries - 1 - i)
        one = {"q": given["q"][:, i], "context_lens": context_lens, "max_context_len": int(context_lens.max())}
        rows.append(decode_attention(**given | one))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("case", CASES)
def test_a_draft_is_seen_as_it_would_be_token_by_token(case: catalogue.Case) -> None:
    given = case.make(torch.float32)
    assert_close("verified", decoded_one_by_one(given), verify_attention(**given), 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_longer_draft_does_not_change_the_tokens_before_it(case: catalogue.Case) -> None:
    """So a sequence with a short draft can be padded behind it."""
    given = case.make(torch.float32)
    shorter = given | {"q": given["q"][:, :-1], "context_lens": given["context_lens"] - 1}
    assert_close("before the last", verify_attention(**shorter), verify_attention(**given)[:, :-1], 1e-6)


def test_queries_may_be_strided() -> None:
    given = catalogue.VERIFY_ATTENTION.cases[2].make(torch.float32)
    wide = torch.cat((given["q"], given["q"]), dim=2)
    strided = wide[:, :, : given["q"].shape[2]]
    assert not strided.is_contiguous()
    assert_close("strided", verify_attention(**given), verify_attention(**given | {"q": strided}), 1e-6)

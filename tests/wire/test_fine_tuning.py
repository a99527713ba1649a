"""OpenAI's fine-tuning API: each adapter of an account is a finished job."""

import pytest

from pilotlight.wire.errors import ApiError
from pilotlight.wire.fine_tuning import JOBS, jobs_answer
from pilotlight.wire.hop.finetunes import Finetune

WHOLE = Finetune("a1", "me", "", "ember", "mine", created_s=5.5, modified_s=9.0, is_whole=True)
BEGUN = Finetune("b2", "me", "", "ember", "half", created_s=6.0)


def test_each_adapter_is_a_job_and_a_whole_one_has_succeeded() -> None:
    whole, started = jobs_answer("GET", None, None, [WHOLE, BEGUN])["data"]
    assert (whole["id"], whole["status"], whole["fine_tuned_model"]) == ("a1", "succeeded", "ember:mine")
    assert (whole["created_at"], whole["finished_at"]) == (5, 9)
    assert (started["status"], started["fine_tuned_model"], started["finished_at"]) == ("validating_files", None, None)
    assert jobs_answer("GET", "b2", None, [WHOLE, BEGUN]) == started
    assert jobs_answer("GET", "a1", "events", [WHOLE])["data"] == []


@pytest.mark.parametrize(
    ("method", "job", "part", "word"),
    [("POST", None, None, "not_implemented"), ("GET", "c3", None, "not_found"), ("GET", "a1", "weights", "not_found")],
)
def test_what_is_not_there_is_refused_by_name(method: str, job: str | None, part: str | None, word: str) -> None:
    with pytest.raises(ApiError) as raised:
        jobs_answer(method, job, part, [WHOLE])
    assert raised.value.word == word


def test_their_paths_are_known_under_every_prefix() -> None:
    for prefix in ("/v1", "/ai/v1", "/client/v4/accounts/a/ai/v1"):
        found = JOBS.fullmatch(f"{prefix}/fine_tuning/jobs/a1/events")
        assert found is not None
        assert found.groups() == ("a1", "events")

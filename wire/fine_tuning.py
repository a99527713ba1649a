"""OpenAI's fine-tuning jobs (/v1/fine_tuning/jobs) as a view of an account's uploaded adapters.

Each adapter appears as a finished job.

Nothing is trained here, so a job cannot be started; adapters are uploaded at Workers AI's paths. Sites and routers give the same answers.
"""

import re
from collections.abc import Iterable
from typing import Any

from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.finetunes import Finetune

JOBS = re.compile(
    r"(?:/client/v4/accounts/[^/]+)?(?:/ai)?/v1/fine_tuning/jobs(?:/(?P<job>[^/]+)(?:/(?P<part>[^/]+))?)?"
)
_NO_TRAINING = (
    "training is not supported: train an adapter elsewhere and upload it at /client/v4/accounts/ACCOUNT/ai/finetunes"
)


def jobs_answer(method: str, job: str | None, part: str | None, owned: Iterable[Finetune]) -> dict[str, Any]:
    """Return the response to a request for fine-tuning jobs."""
    if method != "GET":
        raise ApiError("not_implemented", _NO_TRAINING)
    if job is None:
        return {"object": "list", "data": [_job(each) for each in owned], "has_more": False}
    finetune = next((each for each in owned if each.id == job), None)
    if finetune is None:
        raise ApiError("not_found", f"there is no fine-tune {job[:100]!r} of yours")
    if part in ("events", "checkpoints"):
        return {"object": "list", "data": [], "has_more": False}
    if part is not None:
        raise ApiError("not_found", f"a fine-tuning job has no {part[:100]!r}; it has events and checkpoints")
    return _job(finetune)


def _job(finetune: Finetune) -> dict[str, Any]:
    return {
        "id": finetune.id, "object": "fine_tuning.job", "created_at": int(finetune.created_s),
        "finished_at": int(finetune.modified_s) if finetune.is_whole else None, "model": finetune.model,
        "fine_tuned_model": f"{finetune.model}:{finetune.name}" if finetune.is_whole else None,
        "status": "succeeded" if finetune.is_whole else "validating_files", "error": None, "hyperparameters": {}, "organization_id": "",
        "result_files": [], "seed": 0, "trained_tokens": None, "training_file": "", "validation_file": None,
    }  # fmt: skip

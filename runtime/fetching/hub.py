"""Download a model from the Hugging Face hub in a child process.

`python -m pilotlight.runtime.fetching.hub ORG/NAME` runs it. A thread's download cannot be cancelled: a site that should stop while the hub did not
answer never ended. This process is killed with its parent; the next one resumes the download. It writes a JSON object a line: {done, total} in bytes,
and at its end {path} or {error}.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pilotlight.runtime.fetching.errors import FetchError, Progress
from pilotlight.wire.http.listen import PARENT_PID_ENV, follow_parent

# The files that a model needs, without other frameworks' weights, which can double a download.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model", "additional_chat_templates/*"]
_NOT_NEEDED = ["original/*", "consolidated*", "onnx/*", "*.gguf"]


async def downloaded(hub_id: str, on_progress: Progress | None = None) -> Path:
    """Download a model from the hub. Raises FetchError. Cancelling this ends the download."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pilotlight.runtime.fetching.hub", hub_id,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env={**os.environ, PARENT_PID_ENV: str(os.getpid())},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            said = json.loads(line)
            if "path" in said:
                return Path(said["path"])
            if "error" in said:
                raise FetchError(said["error"])
            if on_progress is not None:
                on_progress(said["done"], said["total"])
        raise FetchError(
            f"the download of {hub_id} ended with exit status {await process.wait()}, without an error message"
        )
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def download(hub_id: str, on_progress: Progress) -> Path:
    """Download a model in this process. Raises FetchError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        path = snapshot_download(
            hub_id,
            allow_patterns=_PATTERNS,
            ignore_patterns=_NOT_NEEDED,
            tqdm_class=_progress_class(on_progress),
        )
    except GatedRepoError:
        message = f"{hub_id} asks for its terms to be accepted on the hub first, and for HF_TOKEN to be set"
        raise FetchError(message) from None
    except RepositoryNotFoundError:
        raise FetchError(f"there is no model {hub_id} on the hub, and no such directory here") from None
    except LocalEntryNotFoundError:
        raise FetchError(f"{hub_id} is not in the local cache and the hub cannot be reached") from None
    except (HfHubHTTPError, OSError) as error:
        raise FetchError(f"{hub_id} could not be downloaded: {error}") from None
    return Path(path)


def _progress_class(on_progress: Progress) -> Any:
    """Return a tqdm that draws nothing and reports the bytes of all files together."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    done = total = 0

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal total
            self._counts_bytes = options.get("unit") == "B"
            if self._counts_bytes:
                total += int(options.get("total") or 0)
            options["disable"] = True
            options.pop("name", None)
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            if self._counts_bytes:
                done += int(n or 0)
                on_progress(done, max(done, total))
            super().update(n)

    return Silent


def main() -> None:
    if not follow_parent():
        return
    try:
        last = {"path": str(download(sys.argv[1], lambda done, total: _say({"done": done, "total": total})))}
    except FetchError as error:
        last = {"error": str(error)}
    _say(last)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

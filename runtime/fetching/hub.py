"""Access the Hugging Face hub in a child process.

`python -m pilotlight.runtime.fetching.hub ORG/NAME` downloads a model's files; `--search WORDS` searches the hub. It is a process because a download
in a thread cannot be cancelled: a site could not shut down while the hub did not respond. It is killed with its parent; the next process
resumes the download. It writes a JSON object a line: {done, total} in bytes, and at the end {path}, {found} or {error}.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from pilotlight.runtime.fetching.errors import FetchError, Progress
from pilotlight.wire.http.listen import PARENT_PID_ENV, follow_parent

SEARCH_TIMEOUT_S = 20.0
MAX_FOUND = 20

# The files that a model needs. Weights for other frameworks are left out, because they can double a download.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tiktoken.model", "additional_chat_templates/*"]
_NOT_NEEDED = ["original/*", "consolidated*", "onnx/*", "*.gguf"]


async def downloaded(hub_id: str, on_progress: Progress | None = None, python: str = sys.executable) -> Path:
    """Download a model from the hub in a process of `python`, and return its directory. Raises FetchError.
    Cancellation ends the download."""
    async with aclosing(_messages(hub_id, python=python)) as messages:
        async for message in messages:
            if "path" in message:
                return Path(message["path"])
            if on_progress is not None:
                on_progress(message["done"], message["total"])
    raise AssertionError("messages end with a result or an error")


async def searched(words: str, timeout_s: float = SEARCH_TIMEOUT_S) -> list[dict[str, Any]]:
    """Search the hub and return models as `search` describes them, the most downloaded first.
    Raises FetchError."""
    try:
        async with asyncio.timeout(timeout_s), aclosing(_messages("--search", words)) as messages:
            async for message in messages:
                found: list[dict[str, Any]] = message["found"]
                return found
    except TimeoutError:
        raise FetchError(f"the hub did not answer within {timeout_s:g} s") from None
    raise AssertionError("messages end with a result or an error")


async def _messages(*arguments: str, python: str = sys.executable) -> AsyncGenerator[dict[str, Any], None]:
    """Run this module as a process and yield its messages. Raises FetchError.

    Closing the iterator kills the process.
    """
    process = await asyncio.create_subprocess_exec(
        python, "-m", "pilotlight.runtime.fetching.hub", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env={**os.environ, PARENT_PID_ENV: str(os.getpid())},
        start_new_session=True,  # a terminal's Ctrl-C reaches only this process
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            message = json.loads(line)
            if "error" in message:
                raise FetchError(message["error"])
            yield message
        status = await process.wait()
        raise FetchError(f"the process for {arguments[-1]} ended with exit status {status} without a result")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def download(hub_id: str, on_progress: Progress, snapshot: Callable[..., str] | None = None) -> Path:
    """Download a model in this process and return its directory. Raises FetchError.
    `snapshot` replaces the hub library's function."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        path = (snapshot or snapshot_download)(
            hub_id,
            allow_patterns=_PATTERNS,
            ignore_patterns=_NOT_NEEDED,
            tqdm_class=_progress_class(on_progress),
        )
    except GatedRepoError:
        message = f"{hub_id} requires that you accept its terms on the hub and set HF_TOKEN"
        raise FetchError(message) from None
    except RepositoryNotFoundError:
        raise FetchError(f"there is no model {hub_id} on the hub, and no such directory here") from None
    except LocalEntryNotFoundError:
        remedy = "check the network (HTTPS_PROXY if there is a proxy), or name a directory with the model's files"
        raise FetchError(f"{hub_id} is not in the local cache and the hub cannot be reached: {remedy}") from None
    except (HfHubHTTPError, OSError) as error:
        raise FetchError(f"{hub_id} could not be downloaded: {error}") from None
    return Path(path)


def search(words: str) -> list[dict[str, Any]]:
    """Search the hub in this process. Raises FetchError.

    Each result has its id, architectures, parameters, licence, downloads, and whether access must be requested.
    """
    from huggingface_hub import constants, get_session, get_token

    fields = ("config", "downloads", "gated", "safetensors", "tags")
    query: list[tuple[str, str | int | float | bool | None]]
    query = [("search", words), ("filter", "safetensors"), ("sort", "downloads"), ("limit", MAX_FOUND)]
    query += [("expand", field) for field in fields]
    headers = {"authorization": f"Bearer {token}"} if (token := get_token()) else {}
    try:  # HfApi.list_models is not used: it would retry an unreachable hub for half a minute
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/models", params=query, headers=headers, timeout=SEARCH_TIMEOUT_S
        )
        answer.raise_for_status()
        return [_described(model) for model in answer.json()]
    except Exception as error:  # the HTTP client of the library, and so its error class, depends on the version
        raise FetchError(f"the hub cannot be searched: {error or type(error).__name__}") from None


def _described(model: dict[str, Any]) -> dict[str, Any]:
    licenses = (tag.removeprefix("license:") for tag in model.get("tags") or () if tag.startswith("license:"))
    return {
        "id": str(model["id"]),
        "architectures": (model.get("config") or {}).get("architectures") or [],
        "parameters": int((model.get("safetensors") or {}).get("total") or 0),
        "license": next(licenses, ""),
        "downloads": int(model.get("downloads") or 0),
        "is_gated": bool(model.get("gated")),
    }


def _progress_class(on_progress: Progress) -> Any:
    """Return a tqdm class that draws nothing and reports the bytes of all files together."""
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
        if sys.argv[1] == "--search":
            last: dict[str, Any] = {"found": search(sys.argv[2])}
        else:
            last = {"path": str(download(sys.argv[1], lambda done, total: _say({"done": done, "total": total})))}
    except FetchError as error:
        last = {"error": str(error)}
    _say(last)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

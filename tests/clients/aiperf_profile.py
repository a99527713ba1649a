"""aiperf: a short profile of each API through its command, with its recommended options for answers of equal length."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from harness import expect

COUNT = 3


def profile(kind: str, model: str, *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [
                str(Path(sys.executable).with_name("aiperf")), "profile", "-m", model, "--endpoint-type", kind, "-u", harness.ROUTER,
                "--request-count", str(COUNT), "--concurrency", "1", "--tokenizer", harness.CHAT_FILES, "--isl", "32", "--ui", "none", *options,
            ],
            capture_output=True, text=True, check=False, cwd=folder,
        )  # fmt: skip
        (report,) = [*Path(folder).rglob("profile_export_aiperf.json")] or [None]
        expect(report is not None, (told.stdout + told.stderr)[-1500:])
        found = json.loads(report.read_text())
    expect(found["completed_request_count"]["avg"] == COUNT and not found["error_summary"], found["error_summary"])


def chat() -> None:
    profile(
        "chat",
        harness.CHAT,
        "--streaming",
        "--osl",
        "16",
        "--extra-inputs",
        "min_tokens:16",
        "--extra-inputs",
        "ignore_eos:true",
    )


def completions() -> None:
    profile("completions", harness.CHAT, "--streaming", "--osl", "16", "--extra-inputs", "ignore_eos:true")


def embeddings() -> None:
    profile("embeddings", harness.VECTORS)


if __name__ == "__main__":
    harness.main("aiperf", {"chat": chat, "completions": completions, "embeddings": embeddings})

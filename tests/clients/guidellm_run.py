"""guidellm: a short run against each API through its command."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
from harness import expect

COUNT = 3


def run(path: str, model: str = harness.CHAT) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        told = subprocess.run(
            [
                str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
                "--backend", f"kind=openai_http,target={harness.ROUTER},model={model},request_format={path}",
                "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={COUNT}",
                "--tokenizer", f"kind=hf_auto,model={harness.CHAT_FILES}",
                "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", f"kind=json,path={report}",
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        expect(report.exists(), told.stderr[-1500:])
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    expect(metrics["request_totals"]["successful"] == COUNT, metrics["request_totals"])
    expect(metrics["output_token_count"]["successful"]["mean"] == 16, metrics["output_token_count"])


if __name__ == "__main__":
    harness.main("guidellm", {
        "chat": lambda: run("/v1/chat/completions"), "completions": lambda: run("/v1/completions"),
        "embeddings": lambda: run("/v1/embeddings", harness.VECTORS),
    })  # fmt: skip

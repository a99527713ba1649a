"""One command per subject for a machine with a GPU: `make gpu-check` (correctness) and `make gpu-bench` (records).

Both run from the bare tree with whatever Python has torch, triton, safetensors, tokenizers, numpy and pytest; each ends inside eight minutes and
prints its table last. Without a GPU they say so and end with status 3, unless asked to rehearse on the CPU.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from load_tests.records import write_record

ROOT = Path(__file__).parents[1]
NO_GPU = 3
# What a bare GPU machine can run: kernels, and the engine in-process (no msgspec, pyzmq, starlette, pydantic there).
CHECKED = ["tests/kernels", "tests/engine"]
NEEDS_MORE = {"msgspec", "zmq", "transformers", "jinja2", "orjson", "starlette", "pydantic"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=["check", "bench"])
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, with a tiny shape: shows that the command works"
    )
    parser.add_argument("--shape", default=None, help="of the model: 8b, 0.5b or tiny")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not options.rehearse:
        print(
            "There is no CUDA device here. On a machine with one, run this again; --rehearse tries it on the CPU.",
            file=sys.stderr,
        )
        return NO_GPU
    device = "cpu" if options.rehearse else "cuda"
    return (
        check(device)
        if options.subject == "check"
        else bench(device, options.shape or ("tiny" if options.rehearse else "8b"))
    )


def check(device: str) -> int:
    """The suites of kernels/ and engine/ with their tensors on `device`. The project's own pytest settings are left aside: they name plugins that
    a bare machine lacks."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider",
        "--import-mode=importlib", "-m", "not slow", *ignored(), *CHECKED,
    ]  # fmt: skip
    environment = {**os.environ, "PILOTLIGHT_TEST_DEVICE": device, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def ignored() -> list[str]:
    """Test files that import what this machine does not have; each is named, so that nothing is left out in silence."""
    import importlib.util

    missing = {name for name in NEEDS_MORE if importlib.util.find_spec(name) is None}
    left_out = []
    for folder in CHECKED:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            needs = {
                line.split()[1].partition(".")[0]
                for line in path.read_text().splitlines()
                if line.startswith(("import ", "from "))
            }
            if needs & missing:
                print(f"left out (needs {', '.join(sorted(needs & missing))}): {path.relative_to(ROOT)}")
                left_out.append(f"--ignore={path}")
    return left_out


def bench(device_name: str, shape: str) -> int:
    import torch

    from load_tests.engine_speed import measure

    device = torch.device(device_name)
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu or shape != "tiny" else torch.float32
    batches, prompts = ([1, 8, 64, 256], [512, 2048, 8192, 32768]) if is_gpu else ([1, 4], [64, 256])
    results = measure(shape, device, dtype, batches, prompts)
    path = write_record(f"engine-{shape}", results)
    show(results)
    print(f"Record: {path}")
    return 0


def show(results: dict[str, Any]) -> None:
    print(f"\n{results['shape']} {results['dtype']}, {results['weight_gb']:.2f} GB of weights read per token")
    print("  " + "  ".join(f"{name} {value:,.1f}" for name, value in results["ceilings"].items()))
    for row in results["decode"]:
        extra = ""
        if "kernels" in row:
            extra = f"  {row['step_ms_without_graphs']:8.2f} ms without graphs, in {row['kernels']} kernels"
        print(
            f"  decode  batch {row['batch']:>4}: {row['step_ms']:8.2f} ms  {row['tokens_per_s']:10,.1f} tokens/s"
            f"  {row['share_of_bandwidth']:6.1%} of bandwidth{extra}"
        )
    for row in results["prefill"]:
        print(
            f"  prefill {row['tokens']:>6} tokens: {row['step_ms']:8.2f} ms  {row['tokens_per_s']:10,.1f} tokens/s"
            f"  {row['mfu']:6.1%} of matmul rate"
        )


if __name__ == "__main__":
    sys.exit(main())

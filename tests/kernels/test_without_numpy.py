"""An engine host's torch: it computes, copies bytes and says what it cannot do, without numpy and without a word about it."""

import subprocess
import sys

HOST = """
import sys
from engine import preparation
preparation.take_process()
preparation.import_early()
import torch
"""

WORK = (
    HOST
    + """
from kernels import postponed
from engine.weights.filling import as_bytes
if not postponed.build().has_gpus:
    assert "numpy" not in sys.modules
    try:
        torch.ones(2).numpy()
    except RuntimeError as error:
        assert "Numpy is not available" in str(error)
    else:
        raise AssertionError("an array was made")
values = torch.arange(6, dtype=torch.float32).bfloat16().view(2, 3)
content = as_bytes(values)
assert bytes(content) == b"".join(int(word).to_bytes(2, "little", signed=True) for word in values.view(torch.int16).flatten().tolist())
content[0:2] = (0x4000).to_bytes(2, "little")
assert values[0, 0] == 2.0
assert len(as_bytes(torch.empty(0))) == 0
alone = as_bytes(torch.full((1 << 20,), 7, dtype=torch.uint8))  # the memory outlives the tensor's name
torch.zeros(1 << 20, dtype=torch.uint8)
assert alone[-1] == alone[12345] == 7
assert torch.tensor([[1.0, 2.0], [3.0, 4.0]]).tolist() == [[1.0, 2.0], [3.0, 4.0]]
"""
)


def test_a_host_computes_and_copies_without_numpy() -> None:
    assert run(WORK) == ""


def test_a_process_that_has_numpy_keeps_it_for_torch() -> None:
    run("import numpy\n" + HOST + "assert torch.ones(2).numpy().sum() == 2")


def run(program: str) -> str:
    """What it says on standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr

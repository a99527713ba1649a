"""torch with parts that are imported when they are asked for: an engine's own kind of use works, and every part is the real one in the end."""

import subprocess
import sys

POSTPONED = """
import sys
from kernels import postponed
postponed.postpone()
import torch
"""

META = (
    POSTPONED
    + """
planned = torch.empty(6, 4, device="meta")
assert [tuple(part.shape) for part in torch.split(planned, [2, 4])] == [(2, 4), (4, 4)]
with torch.inference_mode():
    x = torch.ones(3, 4).bfloat16()
    assert torch.nn.functional.linear(x, torch.ones(5, 4).bfloat16()).sum() == 60
    assert torch.topk(torch.arange(5.0), 2).indices.tolist() == [4, 3]
assert not hasattr(sys.modules["torch._meta_registrations"], "__warned__")  # nobody's question by a special name makes it load
assert "activate_meta" not in vars(sys.modules["torch._meta_registrations"])
postponed.load_meta_formulas()
real = sys.modules["torch._meta_registrations"]
assert "activate_meta" in vars(real)
product = torch.nn.functional.scaled_dot_product_attention(*(torch.empty(1, 2, 3, 8, device="meta") for _ in range(3)))
assert product.shape == (1, 2, 3, 8)
postponed.load_meta_formulas()
assert sys.modules["torch._meta_registrations"] is real
finders = len(sys.meta_path)
postponed.postpone()
assert len(sys.meta_path) == finders, "torch is there, and has what it has"
"""
)

# What every part has in the end, beside a torch that was imported whole: the same names, and the same kinds of things under them.
CONTENTS = """
import json, types
parts = {}
for name in sorted(PARTS):
    module = __import__("importlib").import_module(name)
    module.__all__ if hasattr(module, "__all__") else None
    names = [one for one in dir(module) if not one.startswith("__")]
    parts[name] = {one: type(getattr(module, one)).__name__ for one in names}
    assert sys.modules[name] is module and type(module) is types.ModuleType, name
functions = {one: getattr(torch, one)(lambda x: x + 1)(torch.ones(2)).tolist() for one in ("vmap",)}
functions["cond"] = float(torch.cond(torch.tensor(True), lambda: torch.ones(()), lambda: torch.zeros(())))
torch.manual_seed(3)
functions["lobpcg"] = round(float(torch.lobpcg(torch.diag(torch.arange(1.0, 10)), k=1)[0]), 3)
print(json.dumps([parts, functions, torch.jit.Future.__module__], sort_keys=True))
"""

THREADS = (
    POSTPONED
    + """
import threading
barrier = threading.Barrier(8)
found, errors = [], []
def ask(i):
    barrier.wait()
    try:
        found.append(torch.fx.GraphModule if i % 2 else torch.distributions.Normal)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
assert len(set(found)) == 2
"""
)


def test_torch_works_without_them_and_gets_its_meta_formulas_on_demand() -> None:
    run(META)


def test_every_part_becomes_what_it_is_in_a_torch_that_was_imported_whole() -> None:
    parts = "from kernels.postponed import _OF_GPUS, _PARTS\nPARTS = _PARTS | _OF_GPUS\n"
    postponed = run(POSTPONED + parts + CONTENTS)
    whole = run("import sys, torch\n" + parts + CONTENTS)
    assert postponed == whole


def test_threads_that_ask_at_once_get_the_same_whole_module() -> None:
    run(THREADS)


def test_less_than_half_of_torch_is_imported_for_an_engine() -> None:
    count = "print(sum(name.startswith('torch.') for name in sys.modules))"
    import_all = "import sys\nfrom engine.preparation import import_early\nimport_early()\n"
    assert int(run(import_all + count)) < 0.6 * int(run("import sys, torch\n" + count))


def test_another_version_of_torch_is_imported_as_it_is() -> None:
    program = (
        "import sys\nfrom kernels import postponed\npostponed._VERSIONS = ('1.13.',)\nfinders = len(sys.meta_path)\n"
    )
    run(program + "postponed.postpone()\nassert len(sys.meta_path) == finders")


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

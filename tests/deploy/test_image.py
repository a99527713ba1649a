"""The Containerfile: unprivileged images, with bytecode of what an engine host imports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "deploy" / "Containerfile").read_text()
TARGETS = re.split(r"^FROM .* AS (\w+)$", TEXT, flags=re.MULTILINE)
STAGES = dict(zip(TARGETS[1::2], TARGETS[2::2], strict=True))
# Imports what an engine host does, and prints the missing bytecode files of torch.
HOST = """
import sys
from pathlib import Path
from pilotlight.engine.host import model_loader, torch_parts

torch_parts.leave_out()
model_loader.import_libraries()
specs = [vars(module).get("__spec__") for name, module in list(sys.modules.items()) if name.startswith("torch")]
cached = [spec.cached for spec in specs if spec is not None and spec.cached]
assert len(cached) > 100
print(*(path for path in cached if not Path(path).exists()))
"""


def test_the_image_runs_as_an_unprivileged_user_under_tini_with_a_health_check() -> None:
    assert set(STAGES) == {"base", "cpu", "cuda"}
    for name in ("cpu", "cuda"):
        assert "USER 10001" in STAGES[name]
        assert "HEALTHCHECK" in STAGES[name]
        assert 'ENTRYPOINT ["tini", "--", "pilotlight"]' in STAGES[name]
    assert "gcc" not in TEXT


@pytest.mark.process
@pytest.mark.long
def test_the_cpu_image_has_bytecode_of_all_of_torch_that_a_host_imports(tmp_path: Path) -> None:
    (compiling,) = re.findall(r'^ && python -c "(.*)"$', STAGES["cpu"], flags=re.MULTILINE)
    assert "PYTHONDONTWRITEBYTECODE" not in TEXT
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", compiling], env=environment, check=True)
    command = [sys.executable, "-B", "-c", HOST]
    host = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (host.returncode, host.stdout) == (0, "\n"), host.stdout + host.stderr

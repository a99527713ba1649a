"""Projects of `pilotlight init --template`: the tests of each template pass under plain pytest."""

from pathlib import Path

import pytest

from pilotlight.functions.manifest import load_manifest
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.init import init, template_names

pytestmark = pytest.mark.process
pytest_plugins = ["pytester"]


@pytest.mark.parametrize("template", template_names())
def test_a_templates_own_tests_pass(pytester: pytest.Pytester, template: str) -> None:
    folder = pytester.path / "made"
    init(folder, "my-app", template)
    assert load_manifest(folder).name == "my-app"
    for path in folder.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
    result = pytester.runpytest_subprocess("made", "-p", "no:xdist", "-q")  # as `init` prints it
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}, result.stdout.str()


def test_a_template_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="There is no template 'web'; there are chat, hello, mcp, queue, rag, room"):
        init(tmp_path / "f", None, "web")
    assert not (tmp_path / "f").exists()


def test_a_repository_keeps_its_gitignore_and_ignores_what_a_function_must_not_commit(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.log\n\n# caches\n\n__pycache__/")
    init(tmp_path, "f")
    kept = (tmp_path / ".gitignore").read_text()
    assert kept == "*.log\n\n# caches\n\n__pycache__/\n.pilotlight/\n.dev.vars*\n.env*\n"
    with pytest.raises(CliError, match="is there already; choose another folder"):
        init(tmp_path, "f")
    assert (tmp_path / ".gitignore").read_text() == kept

"""Packages of functions: installed once from local wheels, shared by versions, and refused with their name if not permitted."""

import asyncio
import base64
import hashlib
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.host.dependencies.layers import (
    DAY_S,
    LayerBudget,
    LayerError,
    Layers,
    digest_of,
    requirements_of,
)
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.zygotes.zygote_budget import ZygoteBudget
from pilotlight.functions.manifest import ManifestError
from tests.asgi import eventually
from tests.functions.conftest import ServedMaker

USES = """
import greeter
from workers import WorkerEntrypoint, Response
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(greeter.greet() + " v1")
"""


def make_wheel(folder: Path, name: str, version: str, source: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build all wheels that the tests install, because there is no network."""
    folder = tmp_path / "wheels"
    make_wheel(folder, "greeter", "1.0", "def greet():\n    return 'hello from a wheel'\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    return folder


async def test_a_function_has_its_packages_and_versions_share_them(make_served: ServedMaker, tmp_path: Path) -> None:
    async with make_served(state_dir=tmp_path / "state") as served:
        served.add(USES, requirements_dot_txt="greeter==1.0  # the newest\n")
        assert await served.get() == b"hello from a wheel v1"
        served.add(USES.replace("v1", "v2"), requirements_dot_txt="greeter==1.0\n")
        assert await served.get() == b"hello from a wheel v2"
        served.add(
            USES.replace("v1", "v3"),
            "g",
            pyproject_dot_toml='[project]\nname = "g"\nversion = "1"\ndependencies = ["workers-py", "greeter==1.0"]\n',
        )
        assert await served.get(name="g") == b"hello from a wheel v3"
    layers = [path for path in (tmp_path / "state/layers").iterdir() if not path.name.startswith(".")]
    assert [path.name for path in layers] == [digest_of(("greeter==1.0",))]


@pytest.mark.process
async def test_an_installation_is_logged_while_a_request_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers = Layers(tmp_path / "layers")
    with caplog.at_level("INFO", "pilotlight.function"):
        await layers.get(("greeter",))
        await layers.get(("greeter",))
    first, second = caplog.messages
    assert first == "installing greeter"
    assert second.startswith("installed in ")


async def test_packages_that_cannot_be_had_are_named_with_the_installers_words(make_served: ServedMaker) -> None:
    async with make_served() as served:
        served.add(USES, requirements_dot_txt="greeter==9.9\n")
        with pytest.raises(Fault, match="cannot be installed") as failed:
            await served.get()
        assert "greeter==9.9" in failed.value.detail
        served.add(USES, requirements_dot_txt="greeter\n")
        assert await served.get() == b"hello from a wheel v1"


@pytest.mark.process
async def test_a_layer_that_several_ask_for_is_installed_once_and_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Layers(tmp_path / "layers")
    first, second = await asyncio.gather(layers.get(("greeter",)), layers.get(("greeter",)))
    assert first == second
    assert (first / "greeter.py").is_file()
    with pytest.raises(LayerError):
        await layers.get(("greeter", "nobody-has-this"))
    cancelled = asyncio.ensure_future(layers.get(("greeter==1.0",)))
    await eventually(lambda: any(path.name.startswith(".making-") for path in (tmp_path / "layers").iterdir()))
    await layers.close()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert [path.name for path in (tmp_path / "layers").iterdir() if not path.name.startswith(".lock")] == [first.name]


@pytest.mark.process
async def test_nothing_but_wheels_is_installed(tmp_path: Path, wheels: Path) -> None:
    """The setup.py of a source distribution would run with the site's privileges."""
    source = wheels / "evil-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with zipfile.ZipFile(wheels / "evil-1.0.zip", "w") as archive:
        archive.write(source / "setup.py", "evil-1.0/setup.py")
    with pytest.raises(LayerError):
        await Layers(tmp_path / "layers").get(("evil",))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "line",
    ["--index-url=http://evil", "-e .", "../wheel.whl", "x @ file:///etc/passwd", "git+https://x/y", "a b", "-r other"],
)
def test_what_is_no_name_with_versions_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(f"ok>=1\n{line}\n")
    with pytest.raises(ManifestError, match="is not a name with versions"):
        requirements_of(tmp_path)


def test_requirements_are_read_as_they_are_written(tmp_path: Path) -> None:
    assert requirements_of(tmp_path) == ()
    (tmp_path / "requirements.txt").write_text('# c\nb[x,y] >=1.0, <2 ; python_version > "3"\na\nWorkers_Py\nssl\n')
    assert requirements_of(tmp_path) == ("a", 'b[x,y] >=1.0, <2 ; python_version > "3"')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["c~=1.1"]\n')
    assert requirements_of(tmp_path) == ("c~=1.1",)
    (tmp_path / "pyproject.toml").write_text("[tool.x]\n")
    assert len(requirements_of(tmp_path)) == 2


async def test_what_a_function_imports_stays_in_memory_while_it_sleeps_as_far_as_there_is_room(
    make_served: ServedMaker,
) -> None:
    async with make_served(limits={"idle_s": 0.05}, zygotes_mib=10_000) as served:
        served.add(USES, requirements_dot_txt="greeter\n")
        await served.get()
        pool = served.functions.pools["f"]
        await asyncio.wait_for(
            _until(lambda: not pool.isolates.living and pool.factory.zygote.asleep_mib is not None), 10
        )
        assert pool.factory.zygote.asleep_mib is not None
        assert pool.factory.zygote.asleep_mib > 0
        ZygoteBudget(mib=0).end_longest_asleep(served.functions.pools.values())
        assert pool.factory.zygote.asleep_mib is None
        assert await served.get() == b"hello from a wheel v1"


async def _until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.01)


def layer_in(folder: Path, name: str, *, kib: int, days_unused: float) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "package.py").write_bytes(bytes(kib << 10))
    then = time.time() - days_unused * DAY_S
    os.utime(path, (then, then))
    return path


async def test_unused_layers_are_deleted_by_age_and_beyond_their_room_the_longest_unused_first(tmp_path: Path) -> None:
    used = digest_of(("greeter==1.0",))
    for name, days in (("ancient", 40), ("old", 20), ("newer", 10), ("young", 0.01), (used, 50)):
        layer_in(tmp_path / "kept", name, kib=600, days_unused=days)
    roomy, tight = (Layers(tmp_path / "kept", LayerBudget(mib=mib, days=30)) for mib in (100, 1))
    for each in (roomy, tight):
        each.use("f", ("greeter==1.0",))
    await roomy.prune()
    assert names_in(tmp_path / "kept") == {"old", "newer", "young", used}
    await tight.prune()
    assert names_in(tmp_path / "kept") == {"young", used}  # recently used layers stay, whatever their size
    tight.release("f")
    await tight.prune()
    assert names_in(tmp_path / "kept") == {"young", used}  # the layer was in use until now


async def test_a_layer_that_is_asked_for_while_layers_are_measured_stays(tmp_path: Path) -> None:
    asked, loop = ("greeter==1.0",), asyncio.get_running_loop()
    path = layer_in(tmp_path / "kept", digest_of(asked), kib=10, days_unused=40)

    class AskedLayers(Layers):
        def measured(self) -> list[Any]:
            found = super().measured()
            assert asyncio.run_coroutine_threadsafe(self.get(asked), loop).result() == path
            return found

    await AskedLayers(tmp_path / "kept", LayerBudget(mib=0, days=1)).prune()
    assert names_in(tmp_path / "kept") == {path.name}


async def test_what_was_deleted_or_installed_halfway_is_removed_later(tmp_path: Path) -> None:
    for name in (".gone-one", ".making-two"):
        layer_in(tmp_path / "kept", name, kib=1, days_unused=1)
    layer_in(tmp_path / "kept", ".making-now", kib=1, days_unused=0)
    await Layers(tmp_path / "kept").prune()
    assert names_in(tmp_path / "kept", hidden=True) == {".making-now"}


async def test_a_site_keeps_the_layers_of_what_it_serves_and_lets_go_of_those_it_has_replaced(
    make_served: ServedMaker, tmp_path: Path
) -> None:
    num_measured = 0

    class CountingLayers(Layers):
        def measured(self) -> list[Any]:
            nonlocal num_measured
            num_measured += 1
            return super().measured()

    layers = CountingLayers(Path(), LayerBudget(mib=0, days=0.0, young_s=0.0, prune_every_s=0.05))
    async with make_served(state_dir=tmp_path / "state", layers=layers) as served:
        served.add(USES, requirements_dot_txt="greeter==1.0\n")
        assert await served.get() == b"hello from a wheel v1"
        before = num_measured
        await eventually(lambda: num_measured >= before + 3)
        assert names_in(tmp_path / "state/layers") == {digest_of(("greeter==1.0",))}
        served.add(USES.replace("import greeter", "").replace("greeter.greet()", "'plain'"), requirements_dot_txt="")
        assert await served.get() == b"plain v1"
        await eventually(lambda: not names_in(tmp_path / "state/layers"))


def names_in(folder: Path, *, hidden: bool = False) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(".") is hidden}

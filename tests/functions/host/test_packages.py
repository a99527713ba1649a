"""The packages on a function's import path, and packages that cannot be installed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.functions.host.dependencies.layers import LayerError
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.packages import REFUSED_FOR_S, Packages
from tests.clock import Clock


class Installer:
    def __init__(self, layer: Path | None = None) -> None:
        self.layer, self.num_asked = layer, 0
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self) -> Path | None:
        self.num_asked += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return self.layer


def packages(folder: Path, installer: Installer | None, *layers: Path, clock: Clock | None = None) -> Packages:
    return Packages(cast(Any, SimpleNamespace(name="f", directory=folder)), layers, installer, clock or Clock(1000.0))


async def test_what_is_installed_comes_before_a_functions_own_layers_and_is_installed_once(tmp_path: Path) -> None:
    given, vendored = tmp_path / "given", tmp_path / "python_modules"
    vendored.mkdir()
    installer = Installer(tmp_path / "x" / ".." / "layer")
    installer.go.clear()
    made = packages(tmp_path, installer, given)
    assert made.layers == [str(given), str(vendored)]
    both = [asyncio.ensure_future(made.install()) for _ in range(2)]
    await asyncio.sleep(0)
    installer.go.set()
    await asyncio.gather(*both)
    await made.install()
    assert made.layers == [str(tmp_path / "layer"), str(given), str(vendored)]
    assert installer.num_asked == 2


async def test_where_nothing_is_to_be_installed_nothing_changes(tmp_path: Path) -> None:
    installer = Installer(None)
    for made in (packages(tmp_path, None), packages(tmp_path, installer)):
        await made.install()
        await made.install()
        assert made.layers == []
    assert installer.num_asked == 1


async def test_packages_that_cannot_be_installed_are_not_tried_again_at_once(tmp_path: Path) -> None:
    installer = Installer(tmp_path / "layer")
    installer.error = LayerError("there is no such package")
    clock = Clock(1000.0)
    made = packages(tmp_path, installer, clock=clock)
    for after_s, num_asked in ((0.0, 1), (REFUSED_FOR_S - 0.1, 1), (0.1, 2), (1.0, 2)):
        clock.now += after_s
        with pytest.raises(Fault, match="packages of 'f' cannot be installed") as refused:
            await made.install()
        assert (refused.value.code, "no such package" in refused.value.detail) == ("dependencies", True)
        assert installer.num_asked == num_asked
    clock.now += REFUSED_FOR_S
    installer.error = None
    await made.install()
    assert made.layers == [str(tmp_path / "layer")]

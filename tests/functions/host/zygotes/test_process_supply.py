"""The supply of a pool: the packages that its function brings or requires, and its Python."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pilotlight.functions.host.dependencies.python_versions import OWN
from pilotlight.functions.host.zygotes.process_supply import ProcessSupply
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.sandbox.confinement.isolation import Isolation

OTHER = SimpleNamespace(python="3.99")


class Supply:
    """A ProcessSupply that is not started; `used` lists the layers that were recorded as used."""

    def __init__(self, folder: Path, *, tier: int = 1, other: Any = None, layers: Any = None) -> None:
        self.asked: list[str] = []
        self.used: list[Any] = []

        def wanted_by(pool: str, directory: Path) -> Any:
            self.asked.append(pool)
            return other

        self.released: list[object] = []
        layers = layers or SimpleNamespace(use=lambda *noted: self.used.append(noted), release=self.released.append)
        interpreters: Any = SimpleNamespace(wanted_by=wanted_by)
        self.supply = ProcessSupply((0, 3), None, folder / "state", layers, interpreters)
        self.supply.isolation = Isolation(tier, "tried")
        self.manifest = Manifest("hello", folder, folder / "main.py", ())


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("brings", [False, True])
@pytest.mark.parametrize("tier", [1, 3])
@pytest.mark.parametrize("other", [None, OTHER])
def test_packages_are_installed_where_a_function_asks_for_some_and_brings_none(
    tmp_path: Path, asks: bool, brings: bool, tier: int, other: Any
) -> None:
    if asks:
        (tmp_path / "requirements.txt").write_text("numpy==2.0\n")
    made = Supply(tmp_path, tier=tier, other=other)
    provision = made.supply.provide("hello@1", made.manifest, (tmp_path / "layer",) if brings else ())
    is_looked_for = not brings and tier != 3  # a container has its own Python
    assert made.asked == (["hello@1"] if is_looked_for else [])
    has_other = is_looked_for and other is not None
    assert (provision.context.zygotes is OTHER) is has_other
    assert (provision.install is not None) == ((asks and not brings) or has_other)
    assert provision.takes_long == (brings or tier == 3 or provision.install is not None)
    assert (provision.context.tier, provision.context.scratch) == (tier, tmp_path / "state" / "scratch")
    provision.use()
    is_noted = asks and not brings
    assert [noted[1:] for noted in made.used] == ([(("numpy==2.0",), "3.99" if has_other else OWN)] if is_noted else [])


def test_a_pool_that_ends_releases_nothing_of_another_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy==2.0\n")
    made = Supply(tmp_path)
    first, second = (made.supply.provide("hello@1", made.manifest, ()) for _ in range(2))
    first.use()
    second.use()
    first.release()
    assert made.used[0][0] is not made.used[1][0]
    assert made.released == [made.used[0][0]]


def test_every_pool_has_a_user_of_its_own(tmp_path: Path) -> None:
    made = Supply(tmp_path)
    assert len({made.supply.provide("p", made.manifest, ()).context.user.id for _ in range(3)}) == 3


@pytest.mark.parametrize(("asks", "is_used"), [(False, True), (True, True), (True, False)])
async def test_a_python_is_started_before_packages_are_installed_for_the_one_that_it_became(
    tmp_path: Path, asks: bool, is_used: bool
) -> None:
    steps: list[Any] = []

    async def start() -> str:
        steps.append("started")
        return "3.98"

    async def get(*asked: Any) -> Path:
        steps.append(asked)
        return tmp_path / "layer"

    layers = SimpleNamespace(
        is_used_by=lambda user: is_used,
        use=lambda user, *noted: steps.append(noted),
        get=get,
        release=lambda user: None,
    )
    made = Supply(tmp_path, other=SimpleNamespace(start=start), layers=layers)
    requirements = ("numpy==2.0",) if asks else ()
    (tmp_path / "requirements.txt").write_text("\n".join(requirements))
    install = made.supply.provide("p", made.manifest, ()).install
    assert install is not None
    assert await install() == (tmp_path / "layer" if asks else None)
    noted = [(requirements, "3.98")] if asks and is_used else []
    assert steps == ["started", *noted, *([(requirements, "3.98")] if asks else [])]

"""The record of a traced request: files and functions by package, for each traced commit."""

from collections.abc import Iterable

from load_tests.records import Record


def rows(results: Record) -> Iterable[list[str]]:
    trees = results["trees"]
    packages = sorted({name for tree in trees for name in tree["packages"]})
    yield ["files, functions entered", *(f"commit {tree['commit']}" for tree in trees)]
    for name in packages:
        counts = [tree["packages"].get(name, {"files": 0, "functions": 0}) for tree in trees]
        yield [f"`{name}/`", *(f"{count['files']}, {count['functions']}" for count in counts)]
    yield ["all", *(f"{tree['files']}, {tree['functions']}" for tree in trees)]
    for process in dict.fromkeys(_role(one["module"]) for tree in trees for one in tree["processes"]):
        yield [f"asyncio tasks of {process}", *(str(_num_tasks(tree, process)) for tree in trees)]
    yield ["callbacks assigned after construction", *(str(len(tree["callbacks_on_path"])) for tree in trees)]


def _role(module: str) -> str:
    """Return a process's name from its package, because modules have moved between commits."""
    return {"edge_router": "the router", "runtime": "the site", "engine": "the engine host"}[
        module.removeprefix("pilotlight.").partition(".")[0]
    ]


def _num_tasks(tree: Record, role: str) -> int:
    return sum(len(one["tasks"]) for one in tree["processes"] if _role(one["module"]) == role)

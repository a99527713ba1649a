"""A harness that calls the `test` handler of a worker of workerd's tests.

workerd_tests.py copies this file into the worker's folder as the function's main module. It has all names of the worker's own main module, and one
more entrypoint, `WorkerdTester`. A test that only calls others, one by one, is run and counted in these parts. The harness is a function, and imports
nothing of this project.
"""

import ast
import importlib
import inspect
import textwrap
import traceback
from types import SimpleNamespace

from workers import WorkerEntrypoint, env

tested = importlib.import_module(env.TESTED_MODULE)
globals().update({name: value for name, value in vars(tested).items() if not name.startswith("__")})


class WorkerdTester(WorkerEntrypoint):
    """The entrypoint that workerd_tests.py calls."""

    async def names(self, is_alone):
        """Return the names of the tests: "" for one that is not divided.
        An empty test counts only if its worker is alone: the worker can then be imported, which is what it tests."""
        handler, _ = self.handler()
        if handler is None or (is_empty(handler) and not is_alone):
            return []
        return list(parts(handler)) or [""]

    async def outcome(self, name):
        """Return why a test fails; empty if it passes."""
        try:
            handler, target = self.handler()
            if not name:
                return await self.tried(handler)
            code = compile(parts(handler)[name], f"{tested.__name__}::{name}", "exec")
            exec(code, namespace := {**vars(tested)})
            return await self.tried(lambda: namespace["part"](target, SimpleNamespace(), self.env))
        except BaseException as error:
            return text_of(error)

    def handler(self):
        """Return the `test` handler, and the object to which it belongs."""
        if (kind := vars(tested).get("Default")) is not None:
            target = kind(self.ctx, self.env)
            return getattr(target, "test", None), target
        return vars(tested).get("test"), None

    async def tried(self, handler):
        parameters = inspect.signature(handler).parameters.values()
        given = [SimpleNamespace(), self.env, self.ctx]
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            given = given[: len(parameters)]
        result = handler(*given)
        if inspect.isawaitable(result):
            await result
        return ""


def body_of(handler):
    return ast.parse(textwrap.dedent(inspect.getsource(handler))).body[0].body


def is_empty(handler):
    return all(isinstance(each, ast.Pass) for each in body_of(handler))


def parts(handler):
    """Return the calls of which a test consists, by the called name.
    Each is the module of an async function `part`. Empty if the test does anything else."""
    if not inspect.ismethod(handler):
        return {}
    body = body_of(handler)
    calls = [each for each in body if isinstance(each, ast.Expr) and isinstance(each.value, (ast.Call, ast.Await))]
    if len(calls) < 2 or not all(each in calls or isinstance(each, ast.Assign) for each in body):
        return {}
    found = {}
    for each in calls:
        module = ast.parse("async def part(self, ctrl, js_env): ...")
        module.body[0].body = [each]
        called = each.value.value if isinstance(each.value, ast.Await) else each.value
        found[called.func.attr if isinstance(called.func, ast.Attribute) else called.func.id] = module
    return found


def text_of(error):
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == tested.__file__]
    place = f" ({frames[-1].name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"

"""A harness that runs the SDK's own tests inside a function here, instead of its `worker.py`.

Each test is awaited in the function's own loop. sdk_tests.py copies this file into the function's folder as `worker.py`; it is a function, and
imports nothing of this project.
"""

import importlib
import inspect
import json
import traceback
from urllib.parse import urlsplit

import pytest

from workers import Response, WorkerEntrypoint

try:
    from worker_durable_object import TestDurableObject as TestDurableObject
    from worker_workflow import TestWorkflow as TestWorkflow
except ImportError:
    pass

RECEIVED_MESSAGES = []  # test_queue.py reads it


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        suite = urlsplit(request.url).path.rpartition("/")[2]
        try:
            module = importlib.import_module(f"test_{suite}")
        except Exception as error:
            return Response(json.dumps({"import": f"{type(error).__name__}: {error}"}))
        results = {}
        for name, test in list(vars(module).items()):
            if name.startswith("test_") and callable(test):
                results[name[5:]] = await outcome(test, self.env)
        return Response(json.dumps(results))

    async def queue(self, batch, env, ctx):
        for message in batch.messages:
            RECEIVED_MESSAGES.append({"id": message.id, "body": message.body, "attempts": message.attempts})
            message.ack()


async def outcome(test, env):
    """Return why a test fails or is skipped; empty if it passes."""
    given = {"env": env}
    try:
        wanted = inspect.signature(test).parameters
        result = test(**{name: given[name] for name in wanted})
        if inspect.isawaitable(result):
            await result
    except pytest.skip.Exception as skipped:
        return f"skipped: {skipped}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({last.name}:{last.lineno})"
    return ""

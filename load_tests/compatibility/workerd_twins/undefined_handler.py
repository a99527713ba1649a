"""The service `server`: a request to a function without a handler for it."""

# The harness is the main module here, and a longer sentence follows.
EXPECTED = 'Python entrypoint "workerd_harness.py" does not export a handler named "on_fetch"'


async def test(ctrl, env):
    found = "nothing"
    try:
        await env.pythonWorker.fetch("http://example.com")
    except Exception as error:
        found = str(error)
    assert found.startswith(EXPECTED), found

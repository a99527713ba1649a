"""The import path of a function's zygote."""

from tests.functions.conftest import Served


async def test_path_files_of_vendored_packages_are_processed_once(served: Served) -> None:
    source = """
    import more, sys, unlucky
    from workers import Response, WorkerEntrypoint

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            return Response(f"{more.VALUE} {unlucky.VALUE} {sys.times}")
    """
    files = {
        "python_modules__more_dot_pth": "extra\nimport sys; sys.times = getattr(sys, 'times', 0) + 1",
        "python_modules__extra__more_dot_py": "VALUE = 42",
        "python_modules__unlucky_dot_pth": "import sys; sys.exit('the end')",
        "python_modules__unlucky_dot_py": "VALUE = 43",
    }
    served.add(source, **files)
    assert await served.get() == b"42 43 1"

"""A site whose umask makes its new files private: functions, which run as separate users, still read their code."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import asyncio, sys
from pathlib import Path
from pilotlight.functions.channel.frames import UNNUMBERED, FetchEvent
from pilotlight.functions.deployed import unpack_bundle
from pilotlight.functions.host.site_functions import SiteFunctions
from pilotlight.functions.manifest import load_manifest
from pilotlight.wire.hop.bundles import pack

root, tier = Path(sys.argv[1]), int(sys.argv[2])
(root / "source/src/lib").mkdir(parents=True)
(root / "source/src/lib/word.py").write_text("WORD = 'read'")
(root / "source/src/entry.py").write_text('''
import lib.word
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(lib.word.WORD)
''')
(root / "source/wrangler.toml").write_text('name = "f"\\nmain = "src/entry.py"')
(root / "deployed").mkdir()
unpack_bundle(pack(root / "source"), root / "deployed/version")

async def main():
    async with SiteFunctions(min_tier=tier, max_tier=tier, state_dir=root / "state") as functions:
        functions.add(load_manifest(root / "deployed/version"))
        print((await functions.fetch("f", FetchEvent(UNNUMBERED, "GET", "http://x/", [], b""))).body.decode())

asyncio.run(main())
"""


@pytest.mark.parametrize("tier", [1, 2])
def test_a_deployed_function_is_read_though_the_site_closes_what_it_makes(tier: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(tier)]
    result = subprocess.run(command, capture_output=True, text=True, umask=0o077, cwd=Path(__file__).parents[3])
    assert (result.returncode, result.stdout) == (0, "read\n"), result.stderr

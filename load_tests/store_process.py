"""store_process: a KV store as `pilotlight store` runs it, on a local port, for one scenario."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from load_tests.local_network import free_ports
from load_tests.site_process import ROOT


@contextmanager
def store_process(gib: float) -> Iterator[str]:
    """Yield the store's address. Raises SystemExit if it does not start, for example without Mooncake."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "pilotlight.engine.kv.store.store_node", "--address", address, "--gib", str(gib)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not any("ready" in line for line in process.stdout):
                raise SystemExit("the store did not start")
            yield address
        finally:
            process.terminate()

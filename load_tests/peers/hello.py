"""Hello-worlds of other servers for `make bench-functions`, started from functions_setup.sh's folder.

Each answers with a few bytes, from one worker if that can be configured, because our site has one. A server that is not installed is skipped.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from load_tests.local_network import free_ports

WORKERD = """
using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (
  services = [(name = "main", worker = .hello)],
  sockets = [(name = "http", address = "127.0.0.1:PORT", http = (), service = "main")]
);
const hello :Workerd.Worker = (
  modules = [(name = "worker", esModule = embed "worker.js")],
  compatibilityDate = "2024-09-23",
);
"""
WORKER_JS = 'export default { async fetch(request) { return new Response("hi"); } };\n'
LITSERVE = """
import litserve, sys
class Hello(litserve.LitAPI):
    def setup(self, device): pass
    def decode_request(self, request): return request
    def predict(self, x): return "hi"
    def encode_response(self, output): return {"output": output}
if __name__ == "__main__":
    server = litserve.LitServer(Hello(), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
"""
BENTOML = """
import bentoml
@bentoml.service(workers=1, traffic={"timeout": 30})
class Hello:
    @bentoml.api(route="/hello")
    async def hello(self) -> str:
        return "hi"
"""
RAY = """
import sys, time
import ray
from ray import serve
from starlette.responses import PlainTextResponse
@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.5})
class Hello:
    async def __call__(self, request):
        return PlainTextResponse("hi")
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2], object_store_memory=80_000_000)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Hello.bind(), route_prefix="/")
while True:
    time.sleep(1)
"""


class Peer(NamedTuple):
    name: str
    program: str  # relative to the folder
    method: str = "GET"
    path: str = "/hello"
    body: bytes = b""


PEERS = (
    Peer("workerd (JavaScript)", "workerd/node_modules/.bin/workerd"),
    Peer("LitServe", "litserve/bin/python", "POST", "/predict", b"{}"),
    Peer("BentoML", "bentoml/bin/bentoml", "POST", "/hello", b"{}"),
    Peer("Ray Serve", "ray-serve/bin/python"),
)


def there(folder: Path) -> list[Peer]:
    return [peer for peer in PEERS if (folder / peer.program).exists()]


@contextmanager
def running(peer: Peer, folder: Path) -> Iterator[int]:
    """Start a server; yield its port. The caller waits until it answers."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="pilotlight-peer-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        process = subprocess.Popen(
            _command(peer, folder, home, port), cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""},
            start_new_session=True,
        )  # fmt: skip
        try:
            yield port
        finally:
            _end_group(process)


def _command(peer: Peer, folder: Path, home: Path, port: int) -> list[str]:
    program = str((folder / peer.program).absolute())
    if peer.name.startswith("workerd"):
        (home / "worker.js").write_text(WORKER_JS)
        (home / "config.capnp").write_text(WORKERD.replace("PORT", str(port)))
        return [program, "serve", str(home / "config.capnp")]
    if peer.name == "BentoML":
        (home / "service.py").write_text(BENTOML)
        return [program, "serve", "service:Hello", "--host", "127.0.0.1", "--port", str(port)]
    (home / "hello.py").write_text(LITSERVE if peer.name == "LitServe" else RAY)
    return [program, "hello.py", str(port), str(home)]


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a peer with its helpers, which are in its session."""
    for number in (15, 9):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(8)
        except subprocess.TimeoutExpired:
            continue

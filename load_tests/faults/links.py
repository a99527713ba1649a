"""Packet loss on the links between router and sites: total, in one direction, or partial.

The network runs in a private network namespace, which `in_own_namespace` creates, so the rules affect no other packets.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

INSIDE = "PILOTLIGHT_FAULTS_INSIDE"


def in_own_namespace(module: str, arguments: Sequence[str]) -> None:
    """Run the module again inside private network and mount namespaces.

    Returns inside them, or outside if they cannot be created.
    """
    if (
        INSIDE in os.environ
        or os.getuid() != 0
        or not all(shutil.which(tool) for tool in ("unshare", "ip", "iptables"))
    ):
        return
    script = 'ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})


def can_filter() -> bool:
    return INSIDE in os.environ


class Links:
    """Rules of packet loss, removed when the scope closes."""

    def __enter__(self) -> "Links":
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()

    def lose(self, url: str, to_site: bool = True, from_site: bool = True, share: float = 1.0) -> None:
        """Drop this share of the packets to and from the listener at `url`."""
        drawn = [] if share >= 1.0 else ["-m", "statistic", "--mode", "random", "--probability", str(share)]
        for flag, is_wanted in (("--dport", to_site), ("--sport", from_site)):
            if is_wanted:
                _drop(flag, str(urlsplit(url).port), *drawn)

    def lose_connection(self, client_port: int, server_port: int) -> None:
        """Drop one connection's packets both ways; another one from the same port to elsewhere is unaffected."""
        _drop("--sport", str(client_port), "--dport", str(server_port))
        _drop("--sport", str(server_port), "--dport", str(client_port))

    def heal(self) -> None:
        if can_filter():
            _iptables("-F", "INPUT")


def _drop(*matches: str) -> None:
    _iptables("-A", "INPUT", "-p", "tcp", *matches, "-j", "DROP")


def _iptables(*arguments: str) -> None:
    subprocess.run(["iptables", "-w", *arguments], check=True, capture_output=True)

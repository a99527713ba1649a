"""`serve --ray start` runs the first node of a Ray cluster, and stops it at its end."""

import socket

import psutil
import pytest

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.models.ray_head import own_address, ray_head

LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by an address that other machines can reach


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.process
@pytest.mark.slow  # Ray starts in seconds, and on a busy machine in minutes
def test_a_cluster_lives_as_long_as_the_command() -> None:
    of_other_tests = set(psutil.Process().children(recursive=True))
    with ray_head(LOOPBACK, 26379) as address:
        assert address == "127.0.0.2:26379"
        assert listens(address)
        started = set(psutil.Process().children(recursive=True)) - of_other_tests
        assert started
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left
    assert not listens(address)


@pytest.mark.process
def test_a_port_that_is_taken_is_refused_with_advice() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CliError, match=f"--ray 127.0.0.2:{port} joins it"), ray_head(LOOPBACK, port):
            pass


@pytest.mark.process
def test_the_own_address_is_one_of_this_machine() -> None:
    with socket.create_server((own_address(), 0)):
        pass

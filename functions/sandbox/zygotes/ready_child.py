"""A child that the site's zygote forks before it is needed: the next function's zygote.

The start of that function waits neither for the fork nor for namespaces. The child has run no code of a function. It waits for its command on a
socket, and ends when the site's zygote does.
"""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from pilotlight.functions.sandbox.confinement import system
from pilotlight.functions.sandbox.zygotes.control_messages import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES


class ReadyChild:
    def __init__(self, flags: int, run: Callable[[socket.socket], None]) -> None:
        """Fork a child with clone flags; it calls `run` with its socket, and ends. Raises OSError."""
        self.flags = flags
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = system.clone(flags)
            if self.pid == 0:
                try:
                    run(theirs)
                finally:
                    os._exit(1)

    def take(self, command: bytes, fds: list[int]) -> bool:
        """Pass its command on; return whether it could take it."""
        try:
            socket.send_fds(self._socket, [command], fds)
        except OSError:
            return False
        self._socket.close()
        return True

    def end(self) -> None:
        self._socket.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def received(commands: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for the command in the child; return it with its descriptors. Empty if the zygote has ended."""
    with commands, suppress(ConnectionError):
        data, fds, _, _ = socket.recv_fds(commands, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        return data, fds
    return b"", []

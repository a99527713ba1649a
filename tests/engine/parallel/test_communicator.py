"""What ranks of one machine find each other by is nobody else's."""

import socket

from torch._C._distributed_c10d import TCPStore

from engine.parallel.communicator import LOCALHOST, new_store


def test_the_ranks_store_listens_on_this_machine_alone() -> None:
    store = new_store()
    TCPStore(LOCALHOST, store.port, is_master=False).set("a", "b")
    assert store.get("a") == b"b", "another rank reaches it"
    # Free on another loopback address: a listener on all addresses would have it there as well.
    with socket.create_server(("127.0.0.2", store.port)):
        pass

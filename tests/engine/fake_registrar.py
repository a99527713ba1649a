"""A fake driver that registers memory and records its calls."""

import threading

REFUSAL = "out of memory"


class FakeRegistrar:
    """A registrar for at most `limit` regions. Like a driver, it refuses to register memory twice, and to unregister unknown memory."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.started = threading.Semaphore(0)

    def register(self, address: int, num_bytes: int) -> str | None:
        self.started.release()
        assert self.may_go_on.wait(60)
        self.calls.append(f"register {threading.current_thread().name}")
        if len(self.registered) == self.limit:
            return REFUSAL
        assert address not in self.registered, "already registered"
        self.registered[address] = num_bytes
        return None

    def unregister(self, address: int) -> str | None:
        self.calls.append("unregister")
        return None if self.registered.pop(address, 0) else "not registered"

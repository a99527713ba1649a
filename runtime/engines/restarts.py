"""How often a device's engine host has died, and what follows: how long to wait before the next, whether that removes what hosts have built, and
whether there is any hope.
"""

FIRST_PAUSE_S = 0.2  # before the second restart in a row; doubled for each further host that does not live, up to:
LONGEST_PAUSE_S = 10.0
AFRESH_AFTER = 2  # hosts in a row that crashed before they had answered anything
HOPELESS_AFTER = 3  # hosts in a row that did not live: requests are then sent elsewhere instead of kept waiting


class RestartHistory:
    def __init__(self) -> None:
        self.num_restarts = 0
        self.last_death = ""
        self._failures = 0  # hosts in a row that did not live
        self._crashes = 0  # those of them that crashed

    @property
    def is_hopeless(self) -> bool:
        """Whether host after host does not live."""
        return self._failures >= HOPELESS_AFTER

    @property
    def wants_afresh(self) -> bool:
        """Whether the next host is to remove what hosts before it have built."""
        return self._crashes >= AFRESH_AFTER

    @property
    def pause_s(self) -> float:
        """The pause before the next host: none after a first death, since most hosts that die have lived well, and their models are missed."""
        return 0.0 if self._failures < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 2))

    def note_death(self, reason: str) -> None:
        self.last_death = reason
        self._failures += 1

    def note_exit(self, has_crashed: bool) -> None:
        self._crashes = self._crashes + 1 if has_crashed else 0

    def note_answer(self) -> None:
        """Note that the host lives."""
        self._failures = self._crashes = 0

    def note_long_life(self) -> None:
        """Note that the host had been up for long when it died."""
        self._failures = 0

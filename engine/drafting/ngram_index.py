"""An index of a growing list of tokens that finds earlier occurrences of its last tokens.

A hash table maps each pair of adjacent tokens to its newest place, and a chain leads from each place to the previous one with the same hash. Flat
arrays take 12 to 16 bytes per token: 4 for the token, 4 for the chain, and 4 to 8 for the table. This module knows token ids, and is independent of
their sequence.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

SEPARATOR = -1  # stands between texts that are not contiguous
MOST_MATCHED = 16  # limit of compared tokens: a longer match is not better
_MOST_LOOKED_AT = 12  # limit of compared places, the newest first
_LEAST_ENTRIES = 1 << 8


class Match(NamedTuple):
    end: int  # end of the match: the tokens after it are the draft
    length: int


class NgramIndex:
    def __init__(self) -> None:
        self.tokens = array("i")
        self._before = array("i")  # for each place, the previous place with the same hash
        self._newest = array("i", [-1]) * _LEAST_ENTRIES  # by hash of a pair, the newest place of its second token

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return sum(len(part) * part.itemsize for part in (self.tokens, self._before, self._newest))

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        if len(self.tokens) > len(self._newest):
            entries = 1 << len(self.tokens).bit_length()
            self._newest, self._before, first = array("i", [-1]) * entries, array("i"), 0
        newest, before, mask = self._newest, self._before, len(self._newest) - 1
        last = self.tokens[first - 1] if first else SEPARATOR
        for place, token in enumerate(self.tokens[first:] if first else self.tokens, first):
            entry = (last * 0x9E3779B1 ^ token * 0x85EBCA77) >> 4 & mask
            before.append(newest[entry])
            newest[entry] = place
            last = token

    def find(self, tail: SequenceOf[int]) -> Match | None:
        """Return the longest match of a suffix of `tail`, among the newest places of its last two tokens.

        A match has at least two tokens, and at least one token follows it. If several are equally long, return the newest; if there is none, None.
        """
        if len(tail) < 2:
            return None
        tokens, end = self.tokens, len(self.tokens)
        last, second = tail[-1], tail[-2]
        place = self._newest[(second * 0x9E3779B1 ^ last * 0x85EBCA77) >> 4 & len(self._newest) - 1]
        best_end = best = 0
        for _ in range(_MOST_LOOKED_AT):
            if place < 1:
                break
            if tokens[place] == last and tokens[place - 1] == second and place + 1 < end:
                length, longest = 2, min(len(tail), place + 1, MOST_MATCHED)
                while length < longest and tokens[place - length] == tail[-1 - length]:
                    length += 1
                if length > best:
                    best_end, best = place + 1, length
                    if best == MOST_MATCHED:
                        break
            place = self._before[place]
        return Match(best_end, best) if best else None

    def following(self, match: Match, most: int) -> list[int]:
        """Return the tokens that follow a match, up to the end of its text."""
        found = self.tokens[match.end : match.end + most].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

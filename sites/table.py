"""Base class of configuration tables: frozen values, units in names, rules beyond types."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

Rules = Mapping[str, Callable[[Any], None]]  # field name -> rule

SIZES, MOST = ("_gib", "_mib"), 1e9  # endings of the names of fields with a size, and the largest allowed size


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a configuration file.
    `rules` check single fields and `agree` checks fields together; both raise ValueError."""

    rules: ClassVar[Rules] = {}

    def __post_init__(self) -> None:
        for field, rule in self.rules.items():
            rule(getattr(self, field))
        for field in self.__struct_fields__:
            if field.endswith(SIZES) and (getattr(self, field) or 0) > MOST:
                raise ValueError(f"{field} is larger than any machine's memory: remove it or lower it")
        self.agree()

    def agree(self) -> None:
        """Check fields against each other. Raises ValueError."""

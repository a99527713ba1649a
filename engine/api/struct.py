"""The base class of messages: msgspec's Struct, or data classes with the same fields without msgspec.

That is for a bare GPU machine, on which an engine runs in-process and no message becomes bytes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgspec import Struct
    from msgspec.structs import asdict, replace
else:
    try:
        from msgspec import Struct
        from msgspec.structs import asdict, replace
    except ImportError:
        from dataclasses import asdict, dataclass, replace

        class Struct:
            def __init_subclass__(cls, **_options: object) -> None:
                dataclass(frozen=True)(cls)


__all__ = ["Struct", "asdict", "replace"]

"""The base class of messages: msgspec's Struct, or dataclasses if msgspec is not installed.

msgspec may be missing on a machine where an engine runs in-process and no message is encoded.
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

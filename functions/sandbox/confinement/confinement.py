"""The confinement of a function's processes, which tiers.py and oci.py apply."""

import msgspec


class Confinement(msgspec.Struct, frozen=True):
    """The resources and files that the processes of one function may use."""

    tier: int
    folder: str  # read only
    layers: list[str]  # read only
    scratch: str  # writable directory in tier 1; tier 2 has /tmp in memory
    uid: int | None  # None for the runtime's own user, which is not root
    memory_mib: int
    disk_mib: int
    open_files: int
    threads: int
    isolates: int = 4  # number of isolates at once

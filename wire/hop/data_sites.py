"""The sites that may see a request beside the one that answers it, as a router tells that one: all, or these. Who is told nothing tells nobody."""

from collections.abc import Iterable

DATA_SITES = "x-pilotlight-data-sites"  # router -> site

DataSites = tuple[str, ...] | None  # None: all sites
NO_OTHERS: DataSites = ()
_ALL = "*"


def encode_data_sites(names: Iterable[str] | None) -> str:
    return _ALL if names is None else ",".join(sorted(names))


def decode_data_sites(value: str | None) -> DataSites:
    if value == _ALL:
        return None
    return tuple([name for name in (value or "").split(",") if name])

"""The header with the sites that may see a request besides the one that answers it.

Its value is `*` for all sites, or a list. Without the header, the site may ask no other site.
"""

from collections.abc import Iterable

DATA_SITES = "x-pilotlight-data-sites"  # router -> site

DataSites = tuple[str, ...] | None  # None if all sites may see it
NO_OTHERS: DataSites = ()
EVERY_SITE = "*"


def encode_data_sites(names: Iterable[str] | None) -> str:
    return EVERY_SITE if names is None else ",".join(sorted(names))


def decode_data_sites(value: str | None) -> DataSites:
    if value == EVERY_SITE:
        return None
    return tuple([name for name in (value or "").split(",") if name])

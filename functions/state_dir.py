"""The default directory for the data of a site's bindings.

Imports nothing of the site, because commands must start fast.
"""

from pathlib import Path

from pilotlight.sites.config import state_directory
from pilotlight.sites.site import SiteConfig


def state_dir_of(site: SiteConfig) -> Path:
    """Return the directory in which the site's bindings keep their data."""
    if site.functions.state_dir is not None:
        return Path(site.functions.state_dir).expanduser()
    return state_directory(site.name)

"""The directories of a router's and its sites' state, which a backup copies.

Their names are the same on every machine. Independent of their contents (backup.py). Caches (models, compiled kernels, KV blocks) and logs are
excluded.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pilotlight.functions.state_dir import state_dir_of
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.sites.config import router_state_directory
from pilotlight.sites.network import NETWORK_FILE, NetworkConfig, load_network
from pilotlight.sites.site import LOCAL, SiteConfig, load_site

TRANSIENT = ("scratch", "layers", "oci")  # folders of a site's state that its next start creates again


class StateRoot(NamedTuple):
    """A directory with state."""

    name: str  # its name in backups, such as router/ledger or ams1/state
    path: Path
    left_out: tuple[str, ...] = ()  # excluded folders directly inside it


def load_files(network: Path | None, sites: Sequence[Path] | None) -> tuple[NetworkConfig | None, list[SiteConfig]]:
    """Return the content of a router's and sites' files. Raises ConfigError.

    The default files are those of `pilotlight up`."""
    if network is None and not sites:
        network, sites = NETWORK_FILE, sorted(LOCAL.glob("*.toml"))
    return None if network is None else load_network(network), [load_site(path) for path in sites or ()]


def state_roots(network: NetworkConfig | None, sites: Sequence[SiteConfig]) -> list[StateRoot]:
    """Return the roots of a router, if any, and of sites.
    A directory inside another root gets no entry."""
    found: list[StateRoot] = []
    for root in [
        *([] if network is None else _of_router(network)),
        *(root for site in sites for root in _of_site(site)),
    ]:
        path = root.path.expanduser().absolute()
        if not any(path.is_relative_to(other.path) for other in found):
            found.append(root._replace(path=path))
    return found


def _of_router(network: NetworkConfig) -> Iterator[StateRoot]:
    yield StateRoot("router/deployments", router_state_directory())
    if network.ledger.directory is not None:
        yield StateRoot("router/ledger", Path(network.ledger.directory))
    if network.responses.store is None:
        yield StateRoot("router/responses", network.responses.file_of(f"router-{network.listen.port}").parent)


def _of_site(site: SiteConfig) -> Iterator[StateRoot]:
    yield StateRoot(f"{site.name}/state", state_dir_of(site), TRANSIENT)
    yield StateRoot(f"{site.name}/responses", site.responses.file_of(site.name).parent)
    if site.finetunes.directory is not None:
        yield StateRoot(f"{site.name}/finetunes", Path(site.finetunes.directory).expanduser() / site.name)
    for model in site.models:
        if model.adapters_dir is not None:
            yield StateRoot(f"{site.name}/adapters/{model.name}", Path(model.adapters_dir))


def check_owner(path: Path) -> None:
    """Raise CliError if the state belongs to another user.

    Its owner could not read or write the files that this process would leave there."""
    owner = path.stat().st_uid
    if owner != os.geteuid():
        import pwd

        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"#{owner}"
        raise CliError(f"{path} is {name}'s: run this as {name} (sudo -u {name} pilotlight ...).")

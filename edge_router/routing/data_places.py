"""Data rules: the sites that may see a request, by its account and its model.
They hold for failover too."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from pilotlight.edge_router.requests.request import ValidRequest
from pilotlight.sites.network import NetworkConfig, PlacesConfig, SiteRef
from pilotlight.wire.errors import ApiError


class AllowedSites(NamedTuple):
    names: frozenset[str]
    why: str  # whose rule it is, such as "of the account NAME"


class DataPlaces:
    def __init__(self, network: NetworkConfig) -> None:
        self._accounts = {
            account.name: _sites_of(account.data, network.sites) for account in network.accounts if account.data
        }
        self._models = [(model.model, _sites_of(model.data, network.sites)) for model in network.models if model.data]

        self.is_empty = not (self._accounts or self._models)  # without rules all data may go to all sites

    def update_from(self, other: "DataPlaces") -> None:
        self._accounts, self._models, self.is_empty = other._accounts, other._models, other.is_empty

    def allowed(self, request: ValidRequest, own_name: str | None) -> AllowedSites | None:
        """Return the sites that may be asked; None if all.
        `own_name` is the model's own name; the request may have an alias."""
        holder = request.head.holder
        return self.of(None if holder is None else holder.account.name, own_name, request.model)

    def of(self, account: str | None, own_name: str | None, model: str | None) -> AllowedSites | None:
        """Return the sites allowed for an account's data and a model, by own name or alias; None if all."""
        names = None if account is None else self._accounts.get(account)
        why = [] if names is None else [f"of the account {account}"]
        for pattern, of_model in self._models:
            if any(name is not None and fnmatchcase(name, pattern) for name in (own_name, model)):
                names = of_model if names is None else names & of_model
                why.append(f"for the model {own_name}")
        return None if names is None else AllowedSites(names, " and ".join(why))


def refusal(allowed: AllowedSites, states: str) -> ApiError:
    """Return the error of a request whose allowed sites are all unusable."""
    where = ", ".join(sorted(allowed.names)) or "no site at all"
    sentence = f"data {allowed.why} may go to {where} alone: {states or 'none of them is usable'}"
    return ApiError("no_site_available" if allowed.names else "forbidden", sentence, retry_after_s=1.0)


def _sites_of(data: PlacesConfig, sites: Sequence[SiteRef]) -> frozenset[str]:
    return frozenset(site.name for site in sites if site.name in data.sites or site.region in data.regions)

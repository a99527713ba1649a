"""Homes of deployed functions.

A function whose bindings keep data on a site's disk runs only at its home; others run at every site.

Two sites would have two databases of one name and two instances of one Durable Object. So a function that keeps data, or calls one that does, has a
home, which stays the same for all its versions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.deployments import Deployment, NewVersion


def home_of(deployment: Deployment, new: NewVersion, known: Mapping[str, Deployment], sites: Sequence[str]) -> str:
    """Return the home for a function's new version; empty if it may run everywhere.

    `sites` are the sites that may store its account's data, preferred ones first. Raises ApiError.
    """
    called = {known[name].home: name for name in new.services if name in known and known[name].home}
    if new.home is not None:
        home = new.home
        if home and home not in sites:
            named = ", ".join(sites) or "none"
            raise ApiError(
                "invalid_request",
                f"{home[:100]!r} is not a healthy site that accepts deployed functions and may have their data; choose one of: {named}",
            )
    else:
        home = deployment.home or next(iter(called), "")
        if not home and new.keeps_data:
            if not sites:
                raise ApiError(
                    "no_site_available",
                    f"no healthy site that accepts deployed functions may have the data of {deployment.name}",
                )
            home = _usual(known, sites)
    for site, name in called.items():
        if site != home:
            sentence = f"{deployment.name} calls {name}, which runs only at {site}, because its data is there: deploy with --home {site}"
            raise ApiError("invalid_request", sentence)
    return home


def with_callers(known: Mapping[str, Deployment]) -> dict[str, Deployment]:
    """Move callers of functions that have a home to that home, and their callers, too.

    Only functions that would run everywhere are moved.
    """
    moved = dict(known)
    while True:
        homes = {name: deployment.home for name, deployment in moved.items() if deployment.home}
        callers = {
            name: homes[called]
            for name, deployment in moved.items()
            if not deployment.home
            for called in deployment.services
            if called in homes
        }
        if not callers:
            return moved
        moved |= {name: replace(moved[name], home=home) for name, home in callers.items()}


def _usual(known: Mapping[str, Deployment], sites: Sequence[str]) -> str:
    """Return the site that is the home of most functions. Functions that share a store need the same home."""
    homes = Counter(deployment.home for deployment in known.values() if deployment.home in sites)
    return max(homes, key=homes.__getitem__) if homes else sites[0]

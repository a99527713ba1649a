"""Messages between a machine that joins a network and a router (`pilotlight join`)."""

from typing import Annotated

import msgspec
from msgspec import Meta

from pilotlight.wire.hop.status import Place

AUTHORITY_PATH = "/network/authority"
JOIN_PATH = "/network/join"


class NetworkFace(msgspec.Struct, frozen=True):
    """A router's answer over an untrusted connection. The token verifies the authority."""

    authority: str  # PEM
    place: Place  # location of the router


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Machine -> router: the request to join."""

    token: str
    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\Z")]
    url: Annotated[str, Meta(max_length=300)]  # where routers reach the site
    place: Place
    certificate_request: str  # PEM


class Joined(msgspec.Struct, frozen=True):
    """Router -> machine, over TLS: what the machine needs to join."""

    certificate: str  # PEM
    secret: str  # the network's secret

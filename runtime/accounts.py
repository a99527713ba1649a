"""Tenants: the owners of requests. A stand-in until accounts exist: a tenant is whoever holds the same key and account id.

Nothing is looked up; requests that send neither share the anonymous tenant. What a tenant's prompts leave in the prefix
cache is found only with its salt (I4), so two tokens never see each other's cache even without accounts.
"""

import hashlib
from typing import NamedTuple

from wire.credentials import bearer_token


class Tenant(NamedTuple):
    id: str  # safe to log: a hash, never the token
    salt: bytes  # seeds the engine's prefix cache


def tenant_of(authorization: str | None, account_id: str | None) -> Tenant:
    """Return the tenant of a request's credentials and account. Raises ApiError for credentials that are no key."""
    key = bearer_token(authorization)
    if not key and not account_id:
        return ANONYMOUS
    # Lengths first, so that no pair of key and account can be confused with another.
    identity = f"{len(key)}:{key}:{account_id or ''}".encode()
    digest = hashlib.sha256(b"pilotlight tenant\0" + identity).digest()
    return Tenant(digest[:8].hex(), digest[8:24])


ANONYMOUS = Tenant("anonymous", hashlib.sha256(b"pilotlight anonymous tenant").digest()[8:24])

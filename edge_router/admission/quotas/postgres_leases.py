"""The store of accounts' shared usage, and of the leases of routers.

Usage of a limit decays at the limit's own rate, by the database's clock, so that routers' clocks do not matter; daily usage does not decay. Usage and
leases together never exceed the limit. A lease that its router does not confirm ends; usage under it is reported when the router returns.
"""

from collections.abc import Sequence

from pilotlight.edge_router.admission.quotas.lease_store import EXPIRES_S, LeaseClaim, LeaseGrant, LeaseKey, granted
from pilotlight.edge_router.metering.ledger.postgres import Connection, PostgresDatabase

KEPT_S = 3 * 86_400  # unused entries are deleted after this time
_LOCK = 0x70696C6F7401  # advisory lock: one router at a time creates the tables
_NOW = "EXTRACT(EPOCH FROM clock_timestamp())::DOUBLE PRECISION"
_KEY = "account = %(account)s AND limit_name = %(limit)s AND period = %(period)s"
_NAMED = "%(account)s, %(limit)s, %(period)s"
_USE = f"""
INSERT INTO quota_use AS known (account, limit_name, period, used, at_s) VALUES ({_NAMED}, %(before)s + %(spent)s, {_NOW})
ON CONFLICT (account, limit_name, period) DO UPDATE SET
    used = GREATEST(0, known.used - %(per_s)s * GREATEST(0, excluded.at_s - known.at_s)) + %(spent)s, at_s = excluded.at_s
RETURNING used
"""
_OTHERS = f"SELECT COALESCE(SUM(held), 0) AS held FROM quota_leases WHERE {_KEY} AND router <> %(router)s AND seen_s > {_NOW} - {EXPIRES_S}"
_HOLD = f"""
INSERT INTO quota_leases (account, limit_name, period, router, held, seen_s) VALUES ({_NAMED}, %(router)s, %(held)s, {_NOW})
ON CONFLICT (account, limit_name, period, router) DO UPDATE SET held = excluded.held, seen_s = excluded.seen_s
"""
_GIVE_BACK = f"DELETE FROM quota_leases WHERE {_KEY} AND router = %(router)s"
_TABLES = (
    'CREATE TABLE IF NOT EXISTS quota_use (account TEXT COLLATE "C", limit_name TEXT COLLATE "C", period INTEGER, '
    "used DOUBLE PRECISION NOT NULL, at_s DOUBLE PRECISION NOT NULL, PRIMARY KEY (account, limit_name, period))",
    'CREATE TABLE IF NOT EXISTS quota_leases (account TEXT COLLATE "C", limit_name TEXT COLLATE "C", period INTEGER, router TEXT, '
    "held DOUBLE PRECISION NOT NULL, seen_s DOUBLE PRECISION NOT NULL, PRIMARY KEY (account, limit_name, period, router))",
)


class PostgresLeases(PostgresDatabase):
    def __init__(self, url: str) -> None:
        """Raises UsageStoreError for an invalid database URL."""
        super().__init__(url, _prepare)

    def exchange(self, router: str, claims: Sequence[LeaseClaim]) -> list[LeaseGrant]:
        """Store all claims in one transaction and return their grants. Raises UsageStoreError."""
        grants: dict[LeaseKey, LeaseGrant] = {}
        with self.working() as connection, connection.transaction():
            for claim in sorted(claims):  # rows stay locked: in different orders two routers could deadlock
                grants[claim.key] = _exchange(connection, router, claim)
        return [grants[claim.key] for claim in claims]


def _exchange(connection: Connection, router: str, claim: LeaseClaim) -> LeaseGrant:
    values = {
        **claim.key._asdict(),
        "router": router,
        "before": claim.before,
        "spent": claim.spent,
        "per_s": claim.per_s,
    }
    used = connection.execute(_USE, values).fetchone()  # locks the row of the limit for the following statements
    others = connection.execute(_OTHERS, values).fetchone()
    assert used is not None
    assert others is not None
    grant = granted(claim, used["used"], others["held"])
    connection.execute(_HOLD if grant.held else _GIVE_BACK, {**values, "held": grant.held})
    return grant


def _prepare(connection: Connection) -> None:
    """Create missing tables, and delete old entries.

    If the tables exist, no right to create them is needed.
    """
    found = connection.execute(
        "SELECT to_regclass('quota_use') AS used, to_regclass('quota_leases') AS leases"
    ).fetchone()
    if found is None or None in found.values():
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            for statement in _TABLES:
                connection.execute(statement)
    connection.execute(f"DELETE FROM quota_use WHERE at_s < {_NOW} - {KEPT_S}")
    connection.execute(f"DELETE FROM quota_leases WHERE seen_s < {_NOW} - {KEPT_S}")

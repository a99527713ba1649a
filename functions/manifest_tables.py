"""The tables of a manifest: wrangler's names, and the types of their values.

manifest.py loads the file and interprets the values.
"""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from pilotlight.sites.config import Count
from pilotlight.sites.table import Table

Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z_$][A-Za-z0-9_$]{0,127}\Z")]
FunctionName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z")]


class ConsumerDeclaration(Table, frozen=True, kw_only=True):
    queue: str
    type: str = "worker"
    max_batch_size: Annotated[int, Meta(ge=1, le=100)] = 10
    max_batch_timeout: Annotated[float, Meta(ge=0, le=60)] = 5
    max_retries: Annotated[int, Meta(ge=0, le=100)] = 3
    dead_letter_queue: str | None = None
    max_concurrency: Annotated[int, Meta(ge=1, le=250)] | None = None
    retry_delay: Annotated[float, Meta(ge=0, le=43200)] = 0


class Renamed(Table, frozen=True, kw_only=True):
    from_: str = msgspec.field(name="from")
    to: str


class Migration(Table, frozen=True, kw_only=True):
    """A change of Durable Object classes; functions/bindings/objects/object_migrations.py applies it."""

    tag: str
    new_classes: tuple[str, ...] = ()
    new_sqlite_classes: tuple[str, ...] = ()
    renamed_classes: tuple[Renamed, ...] = ()
    deleted_classes: tuple[str, ...] = ()


class AiTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    remote: bool = False
    staging: bool = False
    aliases: dict[str, str] = msgspec.field(default_factory=dict)  # Pilotlight's own table: model aliases


class KvTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    id: str = ""
    preview_id: str = ""
    remote: bool = False


class D1Table(Table, frozen=True, kw_only=True):
    binding: Identifier
    database_name: str = ""
    database_id: str = ""
    preview_database_id: str = ""
    migrations_dir: str = "migrations"
    migrations_table: str = "d1_migrations"
    remote: bool = False


class R2Table(Table, frozen=True, kw_only=True):
    binding: Identifier
    bucket_name: str = ""
    preview_bucket_name: str = ""
    jurisdiction: str = ""
    remote: bool = False


class ProducerTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    queue: str
    delivery_delay: Annotated[float, Meta(ge=0, le=43200)] = 0
    remote: bool = False


class QueuesTable(Table, frozen=True, kw_only=True):
    producers: tuple[ProducerTable, ...] = ()
    consumers: tuple[ConsumerDeclaration, ...] = ()


class ServiceTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    service: str
    entrypoint: str | None = None
    environment: str | None = None
    props: dict[str, Any] = msgspec.field(default_factory=dict)
    remote: bool = False


class WorkflowTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    name: str
    class_name: str
    script_name: str | None = None
    remote: bool = False


class SecretsStoreTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    store_id: str
    secret_name: str


class DatasetTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    dataset: str = ""


class VectorizeTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    index_name: str
    remote: bool = False


class HyperdriveTable(Table, frozen=True, kw_only=True):
    binding: Identifier
    id: str = ""
    localConnectionString: str = ""


class WorkerLoaderTable(Table, frozen=True, kw_only=True):
    binding: Identifier


class VersionMetadataTable(Table, frozen=True, kw_only=True):
    binding: Identifier


class DurableObjectTable(Table, frozen=True, kw_only=True):
    name: Identifier
    class_name: str
    script_name: str | None = None
    environment: str | None = None


class DurableObjectsTable(Table, frozen=True, kw_only=True):
    bindings: tuple[DurableObjectTable, ...] = ()


class SimpleTable(Table, frozen=True, kw_only=True):
    limit: Count
    period: Annotated[int, Meta(description="seconds")]


class RateLimitTable(Table, frozen=True, kw_only=True):
    name: Identifier
    namespace_id: str | int = ""
    simple: SimpleTable


class UnsafeBindingTable(Table, frozen=True, kw_only=True):
    name: Identifier
    type: str
    namespace_id: str | int = ""
    simple: SimpleTable | None = None


class UnsafeTable(Table, frozen=True, kw_only=True):
    bindings: tuple[UnsafeBindingTable, ...] = ()


class AssetsTable(Table, frozen=True, kw_only=True):
    directory: str
    binding: Identifier | None = None
    html_handling: str = "auto-trailing-slash"
    not_found_handling: str = "none"
    run_worker_first: bool | tuple[str, ...] = False


class TriggersTable(Table, frozen=True, kw_only=True):
    crons: tuple[str, ...] = ()


class LimitsTable(Table, frozen=True, kw_only=True):
    cpu_ms: Annotated[int, Meta(ge=1, le=300_000)] | None = None
    subrequests: Count | None = None


class TailConsumerTable(Table, frozen=True, kw_only=True):
    service: FunctionName
    environment: str | None = None


Rate = Annotated[float, Meta(ge=0, le=1)]


class ObservedLogsTable(Table, frozen=True, kw_only=True):
    enabled: bool = True
    head_sampling_rate: Rate | None = None
    invocation_logs: bool = True
    persist: bool = True


class ObservabilityTable(Table, frozen=True, kw_only=True):
    """Settings for the log of invocations; unlike on the platform, all are kept by default."""

    enabled: bool = True
    head_sampling_rate: Rate = 1.0
    logs: ObservedLogsTable = ObservedLogsTable()

    @property
    def sampling(self) -> float:
        """Return the share of invocations that the log keeps."""
        is_on = self.enabled and self.logs.enabled and self.logs.persist
        rate = self.head_sampling_rate if self.logs.head_sampling_rate is None else self.logs.head_sampling_rate
        return rate if is_on else 0.0


class RouteTable(Table, frozen=True, kw_only=True):
    pattern: str
    custom_domain: bool = False
    zone_id: str = ""  # accepted and ignored: the router's file names its zones
    zone_name: str = ""


class ManifestSection(Table, frozen=True, kw_only=True):
    """The top level of the file, or one `[env.NAME]`."""

    name: FunctionName | None = None
    main: str | None = None
    compatibility_date: str | None = None
    compatibility_flags: tuple[str, ...] | None = None
    triggers: TriggersTable | None = None
    limits: LimitsTable | None = None
    assets: AssetsTable | None = None
    vars: dict[Identifier, Any] = msgspec.field(default_factory=dict)
    ai: AiTable | None = None
    kv_namespaces: tuple[KvTable, ...] = ()
    d1_databases: tuple[D1Table, ...] = ()
    r2_buckets: tuple[R2Table, ...] = ()
    queues: QueuesTable = QueuesTable()
    services: tuple[ServiceTable, ...] = ()
    durable_objects: DurableObjectsTable = DurableObjectsTable()
    migrations: tuple[Migration, ...] = ()
    ratelimits: tuple[RateLimitTable, ...] = ()
    workflows: tuple[WorkflowTable, ...] = ()
    secrets_store_secrets: tuple[SecretsStoreTable, ...] = ()
    analytics_engine_datasets: tuple[DatasetTable, ...] = ()
    vectorize: tuple[VectorizeTable, ...] = ()
    hyperdrive: tuple[HyperdriveTable, ...] = ()
    worker_loaders: tuple[WorkerLoaderTable, ...] = ()
    version_metadata: VersionMetadataTable | None = None
    unsafe: UnsafeTable = UnsafeTable()
    route: str | RouteTable | None = None
    routes: tuple[str | RouteTable, ...] = ()
    workers_dev: bool | None = None
    observability: ObservabilityTable | None = None
    tail_consumers: tuple[TailConsumerTable, ...] = ()

    def named_bindings(self) -> Iterator[tuple[str, Any]]:
        """Yield the kind and the table of each binding that has its name in the table's field `binding`."""
        by_kind: dict[str, tuple[Any, ...]] = {
            "kv": self.kv_namespaces, "d1": self.d1_databases, "r2": self.r2_buckets, "queue_producer": self.queues.producers,
            "service": self.services, "secrets_store": self.secrets_store_secrets, "analytics_engine": self.analytics_engine_datasets,
            "vectorize": self.vectorize, "hyperdrive": self.hyperdrive, "worker_loader": self.worker_loaders,
        }  # fmt: skip
        return ((kind, table) for kind, tables in by_kind.items() for table in tables)


def prune(values: dict[str, Any], table: type[Table], where: str = "") -> list[str]:
    """Remove unknown keys, recursively; return a warning for each, as wrangler does."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(table)}
    warnings = []
    for key in list(values):
        if key not in fields:
            del values[key]
            nearest = difflib.get_close_matches(key, fields, n=1)
            warnings.append(f"{where}{key}" + (f" (did you mean {nearest[0]}?)" if nearest else ""))
            continue
        inner = _table_in(fields[key])
        items = values[key] if isinstance(values[key], list) else [values[key]]
        for item in items if inner is not None else ():
            if isinstance(item, dict) and inner is not None:
                warnings += prune(item, inner, f"{where}{key}.")
    return warnings


def _table_in(kind: Any) -> type[Table] | None:
    """Return the table class in a field's type, possibly inside a union or a tuple; None if there is none."""
    if isinstance(kind, type) and issubclass(kind, Table):
        return kind
    return next((found for each in get_args(kind) if (found := _table_in(each)) is not None), None)

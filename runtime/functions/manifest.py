"""A function's manifest: wrangler.toml, wrangler.jsonc or wrangler.json read into frozen values, with what `.dev.vars` adds.

`load_manifest` is the only reader. A misspelt key and a kind of binding that is not offered are refused with the nearest valid name. Keys that
speak of somebody else's platform (routes, account_id, ...) are taken and kept by name in `ignored`. Knows files; refuses to know what is bound.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from runtime.functions import cron, jsonc
from sites.config import ConfigError, Count, parse
from sites.table import Table

FILES = ("wrangler.jsonc", "wrangler.json", "wrangler.toml")
DEV_VARS = ".dev.vars"

Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z_$][A-Za-z0-9_$]{0,127}\Z")]
FunctionName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}\Z")]


class ManifestError(ConfigError):
    """The folder is no function; the message says which file, where, and what to change."""


class BindingDeclaration(NamedTuple):
    """`kind` is one of ai, kv, d1, r2, queue_producer, rate_limit, assets, service, durable_object, var, secret."""

    kind: str
    name: str  # as in `self.env.NAME`
    options: Mapping[str, Any]


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
    """What became of Durable Objects' classes; runtime/functions/bindings/object_migrations.py carries it out."""

    tag: str
    new_classes: tuple[str, ...] = ()
    new_sqlite_classes: tuple[str, ...] = ()
    renamed_classes: tuple[Renamed, ...] = ()
    deleted_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    name: str
    directory: Path
    main: Path  # absolute
    bindings: tuple[BindingDeclaration, ...] = ()
    crons: tuple[str, ...] = ()
    consumers: tuple[ConsumerDeclaration, ...] = ()
    migrations: tuple[Migration, ...] = ()
    assets: "ManifestAssets | None" = None
    cpu_ms: int | None = None
    compatibility_date: str = ""
    compatibility_flags: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # keys without an effect here


class ManifestAssets(NamedTuple):
    """Files that are answered without the function, where the path is none of `worker_first`."""

    declaration: BindingDeclaration
    worker_first: tuple[str, ...]  # patterns with *; one that begins with ! takes paths out again


class _Ai(Table, frozen=True, kw_only=True):
    binding: Identifier
    remote: bool = False
    staging: bool = False


class _Kv(Table, frozen=True, kw_only=True):
    binding: Identifier
    id: str = ""
    preview_id: str = ""
    remote: bool = False


class _D1(Table, frozen=True, kw_only=True):
    binding: Identifier
    database_name: str = ""
    database_id: str = ""
    preview_database_id: str = ""
    migrations_dir: str = "migrations"
    migrations_table: str = "d1_migrations"
    remote: bool = False


class _R2(Table, frozen=True, kw_only=True):
    binding: Identifier
    bucket_name: str = ""
    preview_bucket_name: str = ""
    jurisdiction: str = ""
    remote: bool = False


class _Producer(Table, frozen=True, kw_only=True):
    binding: Identifier
    queue: str
    delivery_delay: Annotated[float, Meta(ge=0, le=43200)] = 0
    remote: bool = False


class _Queues(Table, frozen=True, kw_only=True):
    producers: tuple[_Producer, ...] = ()
    consumers: tuple[ConsumerDeclaration, ...] = ()


class _Service(Table, frozen=True, kw_only=True):
    binding: Identifier
    service: str
    entrypoint: str | None = None
    environment: str | None = None
    props: dict[str, Any] = msgspec.field(default_factory=dict)
    remote: bool = False


class _DurableObject(Table, frozen=True, kw_only=True):
    name: Identifier
    class_name: str
    script_name: str | None = None
    environment: str | None = None


class _DurableObjects(Table, frozen=True, kw_only=True):
    bindings: tuple[_DurableObject, ...] = ()


class _Simple(Table, frozen=True, kw_only=True):
    limit: Count
    period: Annotated[int, Meta(description="seconds")]


class _RateLimit(Table, frozen=True, kw_only=True):
    name: Identifier
    namespace_id: str | int = ""
    simple: _Simple


class _UnsafeBinding(Table, frozen=True, kw_only=True):
    name: Identifier
    type: str
    namespace_id: str | int = ""
    simple: _Simple | None = None


class _Unsafe(Table, frozen=True, kw_only=True):
    bindings: tuple[_UnsafeBinding, ...] = ()


class _Assets(Table, frozen=True, kw_only=True):
    directory: str
    binding: Identifier | None = None
    html_handling: str = "auto-trailing-slash"
    not_found_handling: str = "none"
    run_worker_first: bool | tuple[str, ...] = False


class _Triggers(Table, frozen=True, kw_only=True):
    crons: tuple[str, ...] = ()


class _Limits(Table, frozen=True, kw_only=True):
    cpu_ms: Annotated[int, Meta(ge=1, le=300_000)] | None = None
    subrequests: Count | None = None


class _Section(Table, frozen=True, kw_only=True):
    """The top of the file, or one `[env.NAME]`."""

    name: FunctionName | None = None
    main: str | None = None
    compatibility_date: str | None = None
    compatibility_flags: tuple[str, ...] | None = None
    triggers: _Triggers | None = None
    limits: _Limits | None = None
    assets: _Assets | None = None
    vars: dict[Identifier, Any] = msgspec.field(default_factory=dict)
    ai: _Ai | None = None
    kv_namespaces: tuple[_Kv, ...] = ()
    d1_databases: tuple[_D1, ...] = ()
    r2_buckets: tuple[_R2, ...] = ()
    queues: _Queues = _Queues()
    services: tuple[_Service, ...] = ()
    durable_objects: _DurableObjects = _DurableObjects()
    migrations: tuple[Migration, ...] = ()
    ratelimits: tuple[_RateLimit, ...] = ()
    unsafe: _Unsafe = _Unsafe()


# What a published manifest may say about the platform it was written for; it means nothing here.
_FOREIGN = """
    $schema account_id alias base_dir build cache cloudchamber containers define dev env_vars
    find_additional_modules first_party_worker jsx_factory jsx_fragment keep_names keep_vars legacy_env logfwdr
    logpush minify no_bundle observability pages_build_output_dir placement preserve_file_names
    preview_urls python_modules route routes rules secrets send_metrics site tail_consumers topology tsconfig
    upload_source_maps usage_model userconfigpath workers_dev zone_id
"""
_UNKNOWN_BINDINGS = """
    analytics_engine_datasets browser dispatch_namespaces hyperdrive images mtls_certificates pipelines
    secrets_store_secrets send_email tail_consumers text_blobs vectorize version_metadata vpc_services
    wasm_modules worker_loaders workflows
"""
IGNORED, NOT_OFFERED = frozenset(_FOREIGN.split()), frozenset(_UNKNOWN_BINDINGS.split())
OFFERED = "ai, kv_namespaces, d1_databases, r2_buckets, queues, services, durable_objects, ratelimits, assets, vars"


def load_manifest(directory: Path, environment: str | None = None) -> Manifest:
    """Load the manifest of a folder, or of one of its `[env.NAME]` sections. Raises ManifestError."""
    path = manifest_file(directory)
    values = _read(path)
    sections = values.pop("env", {})
    top, ignored = _section(values, str(path))
    chosen, name = top, top.name
    if not isinstance(sections, dict):
        raise ManifestError(f"{path}: env must be a table of tables")
    named = {key: _section(section, f"{path}: env.{key}") for key, section in sections.items()}
    if environment is not None:
        if environment not in named:
            raise ManifestError(f"{path}: there is no [env.{environment}]; there is: {', '.join(named) or 'none'}")
        chosen, more = named[environment]
        ignored += more
        name = chosen.name or (f"{top.name}-{environment}" if top.name else None)
        # https://developers.cloudflare.com/workers/wrangler/configuration: these are inherited, bindings and vars are not
        inherited = ("main", "migrations", "compatibility_date", "compatibility_flags", "triggers", "limits", "assets")
        chosen = msgspec.structs.replace(
            chosen, **{key: getattr(top, key) for key in inherited if getattr(chosen, key) is None}
        )
    manifest = _manifest(chosen, name or directory.resolve().name.lower(), directory.resolve(), path)
    manifest = replace(manifest, ignored=tuple(sorted(ignored)))
    return _with_dev_vars(manifest, environment)


def manifest_file(directory: Path) -> Path:
    for name in FILES:
        if (directory / name).is_file():
            return directory / name
    raise ManifestError(f"{directory}: there is no {' or '.join(FILES)}; `pilotlight init` writes one")


def parse_dev_vars(text: str, origin: str) -> dict[str, str]:
    """NAME=value lines: quotes, comments and `export` as dotenv files have them."""
    values: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name.isidentifier():
            raise ManifestError(f"{origin}: line {number} is not NAME=value")
        if value[:1] in ("'", '"', "`") and value[-1:] == value[:1] and len(value) > 1:
            escaped = value[0] == '"'
            value = value[1:-1]
            value = value.replace("\\n", "\n").replace('\\"', '"') if escaped else value
        else:
            value = value.split(" #")[0].rstrip()
        values[name] = value
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
        values = tomllib.loads(text) if path.suffix == ".toml" else jsonc.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"{path}: not valid TOML: {error}") from None
    except json.JSONDecodeError as error:
        raise ManifestError(f"{path}: not valid JSON: {error}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ManifestError(f"{path}: must be an object")
    return values


def _section(values: Any, origin: str) -> tuple[_Section, tuple[str, ...]]:
    if not isinstance(values, dict):
        raise ManifestError(f"{origin}: must be a table")
    ignored = tuple(key for key in values if key in IGNORED)
    wanted = {key: value for key, value in values.items() if key not in IGNORED}
    for key in wanted:
        if key in NOT_OFFERED:
            raise ManifestError(f"{origin}: bindings of the kind {key!r} are not offered here; offered are {OFFERED}")
    try:
        return parse(_Section, wanted, origin), ignored
    except ManifestError:
        raise
    except ConfigError as error:
        raise ManifestError(str(error)) from None


def _manifest(section: _Section, name: str, directory: Path, path: Path) -> Manifest:
    if section.main is None:
        raise ManifestError(f'{path}: main is missing; it names the Python file, such as main = "src/entry.py"')
    main = (directory / section.main).resolve()
    if not main.is_relative_to(directory):
        raise ManifestError(f"{path}: main leads out of the function's folder: {section.main!r}")
    if main.suffix != ".py":
        raise ManifestError(f"{path}: main must be a Python file; {section.main!r} is none")
    if not main.is_file():
        raise ManifestError(f"{path}: main names {section.main!r}, which does not exist")
    bindings = tuple(_bindings(section, directory, path))
    seen: set[str] = set()
    for binding in bindings:
        if binding.name in seen:
            raise ManifestError(f"{path}: the binding name {binding.name!r} is used twice")
        seen.add(binding.name)
    crons = section.triggers.crons if section.triggers else ()
    for expression in crons:
        try:
            cron.parse(expression)
        except cron.CronError as error:
            raise ManifestError(f"{path}: triggers.crons: {error}") from None
    return Manifest(
        name,
        directory,
        main,
        bindings,
        crons=crons,
        consumers=section.queues.consumers,
        migrations=section.migrations,
        assets=_assets(section.assets, directory, path) if section.assets is not None else None,
        cpu_ms=section.limits.cpu_ms if section.limits else None,
        compatibility_date=section.compatibility_date or "",
        compatibility_flags=section.compatibility_flags or (),
    )


def _bindings(section: _Section, directory: Path, path: Path) -> Iterator[BindingDeclaration]:
    for name, value in section.vars.items():
        yield BindingDeclaration("var", name, {"value": value})
    if section.ai is not None:
        yield BindingDeclaration("ai", section.ai.binding, {})
    named: list[tuple[str, tuple[Any, ...]]] = [
        ("kv", section.kv_namespaces), ("d1", section.d1_databases), ("r2", section.r2_buckets),
        ("queue_producer", section.queues.producers), ("service", section.services),
    ]  # fmt: skip
    for kind, tables in named:
        for table in tables:
            yield BindingDeclaration(kind, table.binding, _options(table, "binding", "remote"))
    for durable in section.durable_objects.bindings:
        yield BindingDeclaration("durable_object", durable.name, _options(durable, "name"))
    for limit in section.ratelimits:
        yield _rate_limit(limit.name, limit.namespace_id, limit.simple)
    for unsafe in section.unsafe.bindings:
        if unsafe.type != "ratelimit" or unsafe.simple is None:
            raise ManifestError(
                f'{path}: unsafe.bindings: of these only type "ratelimit" with `simple` is offered here'
            )
        yield _rate_limit(unsafe.name, unsafe.namespace_id, unsafe.simple)
    if section.assets is not None and section.assets.binding is not None:
        yield _assets(section.assets, directory, path).declaration


def _options(table: Table, *without: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(table).items() if name not in without}


def _assets(assets: _Assets, directory: Path, path: Path) -> ManifestAssets:
    folder = (directory / assets.directory).resolve()
    if not folder.is_relative_to(directory):
        raise ManifestError(f"{path}: assets.directory leads out of the function's folder")
    options = _options(assets, "binding", "directory") | {"directory": str(folder)}
    first = assets.run_worker_first
    patterns = ("/*",) if first is True else () if first is False else first
    return ManifestAssets(BindingDeclaration("assets", assets.binding or "ASSETS", options), patterns)


def _rate_limit(name: str, namespace_id: str | int, simple: _Simple) -> BindingDeclaration:
    options = {"namespace_id": str(namespace_id), "limit": simple.limit, "period": simple.period}
    return BindingDeclaration("rate_limit", name, options)


def _with_dev_vars(manifest: Manifest, environment: str | None) -> Manifest:
    """Add local secrets; as on the platform, they win over vars of the same name."""
    names = [f"{DEV_VARS}.{environment}", DEV_VARS] if environment else [DEV_VARS]
    path = next((manifest.directory / name for name in names if (manifest.directory / name).is_file()), None)
    if path is None:
        return manifest
    secrets = parse_dev_vars(path.read_text(encoding="utf-8"), str(path))
    taken = {binding.name for binding in manifest.bindings if binding.kind not in ("var", "secret")}
    if clash := sorted(taken & secrets.keys()):
        raise ManifestError(f"{path}: {clash[0]} is the name of a binding already")
    kept = tuple(binding for binding in manifest.bindings if binding.name not in secrets)
    added = tuple(BindingDeclaration("secret", name, {"value": value}) for name, value in secrets.items())
    return replace(manifest, bindings=kept + added)

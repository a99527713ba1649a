"""A function's manifest: wrangler.toml, wrangler.jsonc or wrangler.json, loaded into frozen values.

The variables of `.dev.vars` or `.env` are added. `load_manifest` is the only loader. Invalid values are refused. Unknown keys, and keys that matter
only on Cloudflare's platform (account_id, ...), are listed in `ignored`.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pilotlight.functions import cron, jsonc
from pilotlight.functions.manifest_tables import (
    AssetsTable,
    ConsumerDeclaration,
    FunctionName,
    ManifestSection,
    Migration,
    SimpleTable,
    prune,
)
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.table import Table
from pilotlight.wire.host_patterns import parse_pattern

FILES = ("wrangler.jsonc", "wrangler.json", "wrangler.toml")
MAX_NAMED = 5  # folders in an error
DEV_VARS, DOT_ENV = ".dev.vars", ".env"
# Prefix of the class name of a workflow's instances, which are stored as Durable Objects. No Python class can have such a name.
WORKFLOW_PREFIX = "$workflow$"


# Kinds of bindings whose data is at one site only. Rate limits and secrets are not among them: each site counts separately, as on the platform, and
# secrets are stored at each site that needs them.
_KEPT = frozenset(("kv", "d1", "r2", "queue_producer", "durable_object", "workflow", "vectorize", "analytics_engine"))


class ManifestError(ConfigError):
    """The folder is not a valid function; the message names the file, the place and the remedy."""


class MisfitError(ManifestError):
    """The version does not fit the existing Durable Objects, whose classes were renamed or deleted."""


class BindingDeclaration(NamedTuple):
    """One binding of a manifest.
    `kind` is a key of bindings/registry.py's OPENERS or one of its VALUES."""

    kind: str
    name: str  # NAME in `self.env.NAME`
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    name: str
    directory: Path
    main: Path  # absolute path of the Python file
    bindings: tuple[BindingDeclaration, ...] = ()
    crons: tuple[str, ...] = ()
    consumers: tuple[ConsumerDeclaration, ...] = ()
    migrations: tuple[Migration, ...] = ()
    assets: "ManifestAssets | None" = None
    cpu_ms: int | None = None
    subrequests: int | None = None
    compatibility_date: str = ""
    compatibility_flags: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # keys without an effect here
    log_sampling: float = 1.0  # share of invocations that the site's log keeps
    tail_consumers: tuple[str, ...] = ()  # functions that get this one's invocations
    routes: tuple[str, ...] = ()  # host patterns at which a router serves it, once deployed
    has_subdomain: bool = True
    has_egress: bool = True  # false for a dynamic worker that is loaded without network access

    @property
    def keeps_data(self) -> bool:
        """Tell whether two sites that serve it would have diverging data, or run something twice."""
        return bool(self.crons or self.consumers) or any(binding.kind in _KEPT for binding in self.bindings)

    @property
    def services(self) -> list[str]:
        """Return the names of other functions that it calls or whose objects it binds."""
        named = {binding.options.get("service") or binding.options.get("script_name") for binding in self.bindings}
        named.update(self.tail_consumers)
        return sorted(name for name in named if name and not name.startswith("@") and name != self.name)

    @property
    def notes(self) -> list[str]:
        """Return notes for the author, one line each: settings without an effect, and unsupported bindings."""
        # $schema is meant for editors
        lines = [f"{key} in the manifest has no effect here" for key in self.ignored if key != "$schema"]
        return lines + [
            f"{binding.name}: {binding.options['kind']} is not offered here; it fails when it is used"
            for binding in self.bindings
            if binding.kind == "not_offered"
        ]


class ManifestAssets(NamedTuple):
    """Files that are served without calling the function, unless the path matches `worker_first`."""

    declaration: BindingDeclaration
    worker_first: tuple[str, ...]  # patterns with *; a leading ! excludes paths


# Settings for the original platform, without an effect here.
_FOREIGN = """
    $schema account_id alias base_dir build cache cloudchamber containers define dev env_vars
    find_additional_modules first_party_worker jsx_factory jsx_fragment keep_names keep_vars legacy_env logfwdr
    logpush minify no_bundle pages_build_output_dir placement preserve_file_names
    preview_urls python_modules rules secrets send_metrics site topology tsconfig
    upload_source_maps usage_model userconfigpath zone_id
"""
_UNKNOWN_BINDINGS = """
    browser dispatch_namespaces images mtls_certificates pipelines send_email text_blobs vpc_services wasm_modules
"""
MAX_BYTES = 128 << 10  # per file
# A line of a dotenv file, or a variable whose quoted value may have several lines; a comment may follow the value.
_VARIABLE = re.compile(
    r"""(?P<start>[^\n=#]*=)[^\S\n]*(?P<quoted>(["'`])(?:\\\3|(?!\3)(?s:.))*\3)[^\S\n]*(?:\#[^\n]*)?$|(?P<line>[^\n]+)""",
    re.MULTILINE,
)
_MOST_PARTS = 32
# tomllib is quadratic in the number of a key's parts: 8,000 parts (16 KB) take six seconds. A match may start at any part of a key.
_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DEEP_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{{_MOST_PARTS}}}")
IGNORED, NOT_OFFERED = frozenset(_FOREIGN.split()), frozenset(_UNKNOWN_BINDINGS.split())


def load_manifest(directory: Path, environment: str | None = None) -> Manifest:
    """Load the manifest of a folder, or of one of its `[env.NAME]` sections. Raises ManifestError."""
    path = manifest_file(directory)
    values = _read(path)
    sections = values.pop("env", {})
    top, ignored, not_offered = _section(values, str(path))
    chosen, name = top, top.name
    if not isinstance(sections, dict):
        raise ManifestError(f"{path}: env must be a table of tables")
    named = {key: _section(section, f"{path}: env.{key}") for key, section in sections.items()}
    if environment is not None:
        if environment not in named:
            raise ManifestError(f"{path}: there is no [env.{environment}]; there is: {', '.join(named) or 'none'}")
        chosen, more, not_offered = named[environment]
        ignored += more
        name = chosen.name or (f"{top.name}-{environment}" if top.name else None)
        # An environment inherits these keys, but not bindings and vars: https://developers.cloudflare.com/workers/wrangler/configuration
        inherited = (
            "main",
            "migrations",
            "compatibility_date",
            "compatibility_flags",
            "triggers",
            "limits",
            "assets",
            "observability",
        )
        chosen = msgspec.structs.replace(
            chosen, **{key: getattr(top, key) for key in inherited if not getattr(chosen, key)}
        )
    if chosen.main is None:
        sentence = 'main is missing; it names the Python file, such as main = "src/entry.py"'
        raise ManifestError(f"{path}: {sentence}{_hint([key for key in ignored if key not in IGNORED])}")
    if name is None:
        name = _name_of_folder(directory, path)
    manifest = _manifest(chosen, not_offered, name, directory.resolve(), path)
    manifest = replace(manifest, ignored=tuple(sorted(ignored)))
    return _with_dev_vars(manifest, environment)


def _name_of_folder(directory: Path, path: Path) -> str:
    """Return the name of a function whose manifest has none. Raises ManifestError."""
    name = directory.resolve().name.lower()
    try:
        return msgspec.convert(name, FunctionName)
    except msgspec.ValidationError:
        sentence = (
            f"name is missing, and the folder's name {name!r} is not a function's: add a line such as name = \"hello\""
        )
        raise ManifestError(f"{path}: {sentence}") from None


def manifest_file(directory: Path) -> Path:
    for name in FILES:
        if (directory / name).is_file():
            return directory / name
    if not directory.is_dir():
        raise ManifestError(f"{directory}: is no folder; name the one that has {' or '.join(FILES)}")
    inner = sorted({path.parent.name for name in FILES for path in directory.glob(f"*/{name}")})
    further = f"there is one in {', '.join(inner[:MAX_NAMED])}" if inner else "`pilotlight init` writes one"
    raise ManifestError(f"{directory}: there is no {' or '.join(FILES)}; {further}")


def parse_dev_vars(text: str, origin: str) -> dict[str, str]:
    """Parse lines of NAME=value with the quotes, comments and `export` of dotenv files.
    Raises ManifestError."""
    values: dict[str, str] = {}
    for found in _VARIABLE.finditer(text):
        line = (found["start"] or found["line"]).strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name.isidentifier():
            number = text.count("\n", 0, found.start()) + 1
            raise ManifestError(f"{origin}: line {number} is not NAME=value")
        value = found["quoted"] or value
        if value[:1] in ("'", '"', "`") and value[-1:] == value[:1] and len(value) > 1:
            escaped = value[0] == '"'
            value = value[1:-1]
            value = value.replace("\\n", "\n").replace('\\"', '"') if escaped else value
        else:
            value = value.split(" #")[0].rstrip()
        values[name] = value
    return values


def read_toml(path: Path) -> dict[str, Any]:
    """Load an untrusted TOML file.
    Raises ManifestError if it is too large or would take too long, OSError, UnicodeDecodeError, RecursionError and TOMLDecodeError."""
    text = _small_text(path)
    if _DEEP_KEY.search(text):
        raise ManifestError(f"{path}: has a key of more than {_MOST_PARTS} parts; no valid key has so many")
    return tomllib.loads(text)


def _small_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ManifestError(f"{path}: has more than {MAX_BYTES >> 10} KiB; keep large values in files or bindings")
    return content.decode("utf-8-sig")  # Windows editors write a byte order mark


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_toml(path) if path.suffix == ".toml" else jsonc.loads(_small_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"{path}: not valid TOML: {error}") from None
    except json.JSONDecodeError as error:
        raise ManifestError(f"{path}: not valid JSON: {error}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ManifestError(f"{path}: must be an object")
    return values


class _ReadSection(NamedTuple):
    section: ManifestSection
    ignored: list[str]
    not_offered: tuple[BindingDeclaration, ...]


def _section(values: Any, origin: str) -> _ReadSection:
    if not isinstance(values, dict):
        raise ManifestError(f"{origin}: must be a table")
    ignored = [key for key in values if key in IGNORED]
    not_offered = tuple(each for key in values if key in NOT_OFFERED for each in _not_offered(key, values[key]))
    wanted = {key: value for key, value in values.items() if key not in IGNORED | NOT_OFFERED}
    unknown = prune(wanted, ManifestSection)
    ignored += unknown
    try:
        return _ReadSection(parse(ManifestSection, wanted, origin), ignored, not_offered)
    except ManifestError:
        raise
    except ConfigError as error:
        raise ManifestError(f"{error}{_hint(unknown)}") from None


def _hint(unknown: list[str]) -> str:
    return f"; unknown keys: {', '.join(unknown)}" if unknown else ""


def _not_offered(kind: str, value: Any) -> Iterator[BindingDeclaration]:
    """Yield declarations of bindings that are not offered here: they fail only when they are used."""
    for table in value if isinstance(value, list) else [value]:
        if isinstance(table, dict):
            named = table.get("binding") or table.get("name")
            for name in [named] if named else table:
                yield BindingDeclaration("not_offered", str(name), {"kind": kind})


def _manifest(
    section: ManifestSection, not_offered: tuple[BindingDeclaration, ...], name: str, directory: Path, path: Path
) -> Manifest:
    assert section.main is not None, "checked by load_manifest"
    main = (directory / section.main).resolve()
    if not main.is_relative_to(directory):
        raise ManifestError(f"{path}: main is outside the function's folder: {section.main!r}")
    if main.suffix != ".py":
        raise ManifestError(f"{path}: main must be a Python file, not {section.main!r}; no JavaScript runs here")
    if not main.is_file():
        raise ManifestError(f"{path}: main names {section.main!r}, which does not exist")
    bindings = (*_bindings(section, directory, path), *not_offered)
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
        subrequests=section.limits.subrequests if section.limits else None,
        log_sampling=section.observability.sampling if section.observability else 1.0,
        tail_consumers=tuple(
            _of_environment(_options(consumer), "service", path)["service"] for consumer in section.tail_consumers
        ),
        routes=tuple(_routes(section, path)),
        has_subdomain=section.workers_dev is not False,
        compatibility_date=section.compatibility_date or "",
        compatibility_flags=section.compatibility_flags or (),
    )


def _routes(section: ManifestSection, path: Path) -> Iterator[str]:
    """Yield the host patterns of routes; a custom domain becomes a pattern for all its paths.
    Raises ManifestError."""
    for each in (*section.routes, *([section.route] if section.route is not None else [])):
        text, is_custom = (each, False) if isinstance(each, str) else (each.pattern, each.custom_domain)
        try:
            parse_pattern(text, is_custom_domain=is_custom)
        except ValueError as error:
            raise ManifestError(f"{path}: routes: {error}") from None
        yield f"{text}/*" if is_custom else text


def _bindings(section: ManifestSection, directory: Path, path: Path) -> Iterator[BindingDeclaration]:
    for name, value in section.vars.items():
        yield BindingDeclaration("var", name, {"value": value})
    if section.ai is not None:
        yield BindingDeclaration("ai", section.ai.binding, {"aliases": section.ai.aliases})
    for kind, table in section.named_bindings():
        options = _options(table, "binding", "remote")
        yield BindingDeclaration(kind, table.binding, _of_environment(options, "service", path))
    if section.version_metadata is not None:
        yield BindingDeclaration("version_metadata", section.version_metadata.binding, {})
    for workflow in section.workflows:
        options = {"name": workflow.name, "script_name": workflow.script_name}
        yield BindingDeclaration(
            "workflow", workflow.binding, {**options, "class_name": WORKFLOW_PREFIX + workflow.class_name}
        )
    for durable in section.durable_objects.bindings:
        options = _of_environment(_options(durable, "name"), "script_name", path)
        yield BindingDeclaration("durable_object", durable.name, options)
    for limit in section.ratelimits:
        yield _rate_limit(limit.name, limit.namespace_id, limit.simple)
    for unsafe in section.unsafe.bindings:
        if unsafe.type != "ratelimit" or unsafe.simple is None:
            raise ManifestError(f'{path}: unsafe.bindings: only the type "ratelimit" with `simple` is offered here')
        yield _rate_limit(unsafe.name, unsafe.namespace_id, unsafe.simple)
    if section.assets is not None and section.assets.binding is not None:
        yield _assets(section.assets, directory, path).declaration


def _of_environment(options: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return options without `environment`, which the function's name in `key` gets as a suffix."""
    environment = options.pop("environment", None)
    if environment is None:
        return options
    if not options.get(key) or options[key].startswith("@"):
        raise ManifestError(f"{path}: environment = {environment!r} needs {key}, the name of a function")
    return {**options, key: f"{options[key]}-{environment}"}


def _options(table: Table, *without: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(table).items() if name not in without}


def _assets(assets: AssetsTable, directory: Path, path: Path) -> ManifestAssets:
    folder = (directory / assets.directory).resolve()
    if not folder.is_relative_to(directory):
        raise ManifestError(f"{path}: assets.directory is outside the function's folder")
    if not folder.is_dir():
        raise ManifestError(
            f"{path}: assets.directory names {assets.directory!r}, which does not exist; does it have to be built first?"
        )
    options = _options(assets, "binding", "directory") | {"directory": str(folder)}
    first = assets.run_worker_first
    patterns = ("/*",) if first is True else () if first is False else first
    return ManifestAssets(BindingDeclaration("assets", assets.binding or "ASSETS", options), patterns)


def _rate_limit(name: str, namespace_id: str | int, simple: SimpleTable) -> BindingDeclaration:
    options = {"namespace_id": str(namespace_id), "limit": simple.limit, "period": simple.period}
    return BindingDeclaration("rate_limit", name, options)


def _with_dev_vars(manifest: Manifest, environment: str | None) -> Manifest:
    """Add local secrets, which override vars of the same name, as on the platform.
    `.env` files are used only if there is no `.dev.vars`."""
    paths = _secret_files(manifest.directory, environment)
    if not paths:
        return manifest
    secrets: dict[str, str] = {}
    for path in paths:
        try:
            secrets |= parse_dev_vars(path.read_text(encoding="utf-8-sig"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(f"{path}: cannot be read: {error}") from None
    taken = {binding.name for binding in manifest.bindings if binding.kind not in ("var", "secret")}
    if clash := sorted(taken & secrets.keys()):
        raise ManifestError(f"{path}: {clash[0]} is the name of a binding already")
    kept = tuple(binding for binding in manifest.bindings if binding.name not in secrets)
    added = tuple(BindingDeclaration("secret", name, {"value": value}) for name, value in secrets.items())
    return replace(manifest, bindings=kept + added)


def _secret_files(directory: Path, environment: str | None) -> list[Path]:
    """Return the existing files with local secrets; later ones override earlier ones."""
    of_environment = [f"{DEV_VARS}.{environment}"] if environment else []
    for name in (*of_environment, DEV_VARS):
        if (directory / name).is_file():
            return [directory / name]
    names = [DOT_ENV, *([f"{DOT_ENV}.{environment}"] if environment else []), f"{DOT_ENV}.local"]
    names += [f"{DOT_ENV}.{environment}.local"] if environment else []
    return [directory / name for name in names if (directory / name).is_file()]

"""Manifests as published (wrangler.toml, wrangler.jsonc), and errors with the nearest valid name."""

import json
from pathlib import Path

import pytest

from pilotlight.functions import jsonc
from pilotlight.functions.manifest import BindingDeclaration, ManifestError, load_manifest, parse_dev_vars, read_toml

TOML = """
#:schema node_modules/wrangler/config-schema.json
name = "shop"
main = "src/entry.py"
compatibility_date = "2026-01-01"
compatibility_flags = ["python_workers"]
workers_dev = true

[observability]
enabled = true

[vars]
GREETING = "hello"
LIMITS = { a = 1 }

[ai]
binding = "AI"

[[kv_namespaces]]
binding = "KV"
id = "abc"

[[d1_databases]]
binding = "DB"
database_name = "shop"
database_id = "1-2"

[[queues.producers]]
binding = "JOBS"
queue = "jobs"

[[queues.consumers]]
queue = "jobs"
max_batch_size = 5

[[services]]
binding = "OTHER"
service = "other"
entrypoint = "Admin"

[[ratelimits]]
name = "LIMITER"
namespace_id = "1001"
simple = { limit = 100, period = 60 }

[durable_objects]
bindings = [{ name = "ROOM", class_name = "Room" }]

[triggers]
crons = ["*/5 * * * *"]

[limits]
cpu_ms = 50

[env.staging]
vars = { GREETING = "moin" }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/entry.py").write_text("")
    return tmp_path


def write(folder: Path, text: str, name: str = "wrangler.toml") -> Path:
    (folder / name).write_text(text)
    return folder


def test_a_full_manifest_becomes_declarations(folder: Path) -> None:
    manifest = load_manifest(write(folder, TOML))
    assert (manifest.name, manifest.main, manifest.cpu_ms) == ("shop", folder.resolve() / "src/entry.py", 50)
    kinds = {binding.name: binding.kind for binding in manifest.bindings}
    assert kinds == {
        "GREETING": "var", "LIMITS": "var", "AI": "ai", "KV": "kv", "DB": "d1", "JOBS": "queue_producer", "OTHER": "service",
        "LIMITER": "rate_limit", "ROOM": "durable_object",
    }  # fmt: skip
    options = {binding.name: binding.options for binding in manifest.bindings}
    assert options["LIMITS"] == {"value": {"a": 1}}
    assert options["KV"]["id"] == "abc"
    assert options["OTHER"]["entrypoint"] == "Admin"
    assert options["LIMITER"] == {"namespace_id": "1001", "limit": 100, "period": 60}
    assert manifest.crons == ("*/5 * * * *",)
    assert manifest.consumers[0].max_batch_size == 5
    assert manifest.ignored == ()


def test_an_environment_inherits_main_and_not_bindings(folder: Path) -> None:
    manifest = load_manifest(write(folder, TOML), "staging")
    assert manifest.name == "shop-staging"
    assert manifest.bindings == (BindingDeclaration("var", "GREETING", {"value": "moin"}),)
    assert manifest.crons == ("*/5 * * * *",)
    with pytest.raises(ManifestError, match=r"no \[env.nowhere\]; there is: staging"):
        load_manifest(folder, "nowhere")


@pytest.mark.parametrize(
    ("tables", "keeps_data", "services"),
    [
        ("", False, []),
        ('[ai]\nbinding = "AI"\n[vars]\nA = "1"', False, []),
        ('[[ratelimits]]\nname = "L"\nnamespace_id = "1"\nsimple = { limit = 1, period = 60 }', False, []),
        ('[[kv_namespaces]]\nbinding = "KV"', True, []),
        ('[[r2_buckets]]\nbinding = "FILES"\nbucket_name = "b"', True, []),
        ('[[queues.consumers]]\nqueue = "jobs"', True, []),
        ('[triggers]\ncrons = ["* * * * *"]', True, []),
        ('[[workflows]]\nbinding = "W"\nname = "w"\nclass_name = "W"', True, []),
        (
            '[[services]]\nbinding = "A"\nservice = "other"\n[[services]]\nbinding = "B"\nservice = "@org/model"\n'
            '[[services]]\nbinding = "C"\nservice = "shop"',
            False,
            ["other"],
        ),
        ('[[durable_objects.bindings]]\nname = "R"\nclass_name = "R"\nscript_name = "rooms"', True, ["rooms"]),
    ],
)
def test_what_a_function_keeps_and_whom_it_calls_is_known(
    folder: Path, tables: str, keeps_data: bool, services: list[str]
) -> None:
    manifest = load_manifest(write(folder, f'name = "shop"\nmain = "src/entry.py"\n{tables}'))
    assert (manifest.keeps_data, manifest.services) == (keeps_data, services)


def test_jsonc_takes_comments_and_trailing_commas(folder: Path) -> None:
    text = """{
        // the name
        "name": "shop", /* and
        more */ "main": "src/entry.py",
        "vars": {"URL": "http://x//y", "QUOTE": "a \\" // b", "LIST": [1, 2,],},
    }"""
    manifest = load_manifest(write(folder, text, "wrangler.jsonc"))
    values = {binding.name: binding.options["value"] for binding in manifest.bindings}
    assert values == {"URL": "http://x//y", "QUOTE": 'a " // b', "LIST": [1, 2]}


@pytest.mark.parametrize(
    "text",
    [
        "name" + ".a" * 8000 + " = 1",
        "x = {" + "a . " * 8000 + "b = 1}",
        "[" + '"a".' * 8000 + "b]",
        "'a'" + ".'b'" * 40 + " = 1",
    ],
)
def test_keys_that_take_the_parser_long_are_refused_before_it_reads_them(folder: Path, text: str) -> None:
    (folder / "wrangler.toml").write_text(text)
    with pytest.raises(ManifestError, match="has a key of more than 32 parts"):
        load_manifest(folder)


def test_dots_that_are_no_keys_are_taken(folder: Path) -> None:
    numbers = ", ".join(["1.5"] * 100)
    (folder / "wrangler.toml").write_text(f'[vars]\nA = [{numbers}]\nB = "a.b. c.d"\n')
    assert read_toml(folder / "wrangler.toml")["vars"] == {"A": [1.5] * 100, "B": "a.b. c.d"}


@pytest.mark.parametrize("name", ["wrangler.toml", "wrangler.jsonc"])
def test_a_manifest_of_any_size_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / "wrangler.toml").unlink(missing_ok=True)
    (folder / name).write_text(" " * (129 << 10))
    with pytest.raises(ManifestError, match="has more than 128 KiB"):
        load_manifest(folder)


def test_jsonc_takes_as_many_commas_as_a_manifest_may_have() -> None:
    """Copying the rest of the text at each comma once took gigabytes for 128 KiB of commas."""
    assert len(jsonc.loads("[" + "1," * 65_000 + "]")) == 65_000


def test_a_mistake_in_jsonc_is_reported_in_its_own_line() -> None:
    with pytest.raises(json.JSONDecodeError, match="line 3"):
        jsonc.loads('{\n// a comment\n"a" 1}')


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            'main = "src/entry.py"\n[[kv_namespaces]]\nbidning = "KV"',
            r"unknown keys: kv_namespaces.bidning \(did you mean binding\?\)",
        ),
        ('main = "src/entry.py"\n[[unsafe.bindings]]\nname = "X"\ntype = "magic"', 'only the type "ratelimit"'),
        ('main = "src/entry.py"\n[assets]\ndirectory = "dist"', "'dist', which does not exist"),
        ('name = "x"', "main is missing"),
        ('name = "x"\nmian = "src/entry.py"', r"main is missing; .*; unknown keys: mian \(did you mean main\?\)"),
        ('main = "../entry.py"', "is outside the function's folder"),
        ('main = "src/entry.js"', "must be a Python file, not 'src/entry.js'; no JavaScript runs here"),
        ('main = "src/other.py"', "which does not exist"),
        ('main = "src/entry.py"\n[vars]\nA = 1\n[ai]\nbinding = "A"', "'A' is used twice"),
        ('name = "No Spaces"\nmain = "src/entry.py"', "name: must match .*, which 'No Spaces' does not"),
        ("main = ", "not valid TOML"),
        ('main = "src/entry.py"\nroutes = ["a.example:80/*"]', "begins with no host name"),
        ('main = "src/entry.py"\nroutes = [{pattern = "a.example/x", custom_domain = true}]', "a host name alone"),
    ],
)
def test_a_mistake_is_refused_with_what_to_change(folder: Path, text: str, sentence: str) -> None:
    with pytest.raises(ManifestError, match=sentence):
        load_manifest(write(folder, text))


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ('nmae = "x"\nmain = "src/entry.py"', "nmae (did you mean name?)"),
        ('main = "src/entry.py"\n[[kv_namespace]]\nbinding = "KV"', "kv_namespace (did you mean kv_namespaces?)"),
        ('main = "src/entry.py"\n[assets]\ndirectory = "src"\naccount_id = "1"', "assets.account_id"),
    ],
)
def test_an_unknown_key_is_a_warning_as_in_wrangler(folder: Path, text: str, warning: str) -> None:
    assert load_manifest(write(folder, text)).ignored == (warning,)


@pytest.mark.parametrize(
    ("text", "routes"),
    [
        ('route = "a.example/*"', ("a.example/*",)),
        ('routes = ["a.example/*", { pattern = "b.example", custom_domain = true }]', ("a.example/*", "b.example/*")),
        ('routes = [{ pattern = "*.a.example/api/*", zone_name = "a.example" }]', ("*.a.example/api/*",)),
    ],
)
def test_routes_are_read_as_wrangler_writes_them(folder: Path, text: str, routes: tuple[str, ...]) -> None:
    manifest = load_manifest(write(folder, f'main = "src/entry.py"\n{text}\nworkers_dev = false'))
    assert (manifest.routes, manifest.has_subdomain, manifest.ignored) == (routes, False, ())


def test_an_environment_has_routes_of_its_own(folder: Path) -> None:
    write(
        folder, 'main = "src/entry.py"\nroutes = ["a.example/*"]\n[env.staging]\nroutes = ["s.example/*"]\n[env.other]'
    )
    assert load_manifest(folder, "staging").routes == ("s.example/*",)
    assert load_manifest(folder, "other").routes == ()


def test_a_kind_that_is_not_offered_is_a_binding_of_its_own(folder: Path) -> None:
    text = 'main = "src/entry.py"\nbrowser = { binding = "B" }\n[[send_email]]\nname = "MAIL"\n'
    assert load_manifest(write(folder, text)).bindings == (
        BindingDeclaration("not_offered", "B", {"kind": "browser"}),
        BindingDeclaration("not_offered", "MAIL", {"kind": "send_email"}),
    )


def test_a_folder_without_a_manifest_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="pilotlight init"):
        load_manifest(tmp_path)
    for name in ("py", "ts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "wrangler.jsonc").write_text("{}")
    with pytest.raises(ManifestError, match=r"there is one in py, ts$"):
        load_manifest(tmp_path)


def test_dev_vars_are_secrets_and_win_over_vars(folder: Path) -> None:
    (folder / ".dev.vars").write_text("# local\nexport TOKEN='a b'\nGREETING=\"two\\nlines\"\nPLAIN = x # comment\n")
    manifest = load_manifest(write(folder, TOML))
    secrets = {binding.name: binding.options["value"] for binding in manifest.bindings if binding.kind == "secret"}
    assert secrets == {"TOKEN": "a b", "GREETING": "two\nlines", "PLAIN": "x"}
    assert sum(binding.name == "GREETING" for binding in manifest.bindings) == 1
    (folder / ".dev.vars").write_text("KV=1")
    with pytest.raises(ManifestError, match="KV is the name of a binding"):
        load_manifest(folder)
    with pytest.raises(ManifestError, match="line 2 is not NAME=value"):
        parse_dev_vars("A=1\nnonsense", "x")


def test_a_manifest_in_place_of_its_folder_is_refused_with_the_folder_to_name(folder: Path) -> None:
    write(folder, TOML)
    for misspelt in (folder / "wrangler.toml", folder / "nowhere"):
        with pytest.raises(ManifestError, match=r"is no folder; name the one that has wrangler\.jsonc"):
            load_manifest(misspelt)


def test_dev_vars_that_are_no_text_are_refused_by_name(folder: Path) -> None:
    (folder / ".dev.vars").write_bytes(b"\xff\xfeT\0")
    with pytest.raises(ManifestError, match=r"\.dev\.vars: cannot be read: .*utf-8"):
        load_manifest(write(folder, TOML))


def test_a_function_without_a_name_has_its_folders_if_that_is_one(tmp_path: Path) -> None:
    for name in ("Notes", "My function"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "entry.py").touch()
        (tmp_path / name / "wrangler.toml").write_text('main = "entry.py"\n')
    assert load_manifest(tmp_path / "Notes").name == "notes"
    with pytest.raises(ManifestError, match="name is missing, and the folder's name 'my function' is not a function's"):
        load_manifest(tmp_path / "My function")


def test_a_quoted_value_may_have_several_lines_and_a_comment_after_it() -> None:
    text = """# NOT="a
export KEY="-----BEGIN-----
ab=c
-----END-----"
A = "x" # the "comment"
B='a # b' \t
C="open
D="say \\"hi\\"" # done
E='C:\\'
F=`it's "F"`
"""
    assert parse_dev_vars(text, ".dev.vars") == {
        "KEY": "-----BEGIN-----\nab=c\n-----END-----", "A": "x", "B": "a # b", "C": '"open', "D": 'say "hi"', "E": "C:\\",
        "F": "it's \"F\"",
    }  # fmt: skip


def test_env_files_are_secrets_where_there_are_no_dev_vars(folder: Path) -> None:
    def secrets(environment: str | None = None) -> dict[str, str]:
        bindings = load_manifest(folder, environment).bindings
        return {binding.name: binding.options["value"] for binding in bindings if binding.kind == "secret"}

    write(folder, TOML)
    for name, text in {
        "": "A=1\nB=1\nC=1\nD=1",
        ".staging": "B=2\nC=2\nD=2",
        ".local": "C=3\nD=3",
        ".staging.local": "D=4",
    }.items():
        (folder / f".env{name}").write_text(text)
    assert secrets() == {"A": "1", "B": "1", "C": "3", "D": "3"}
    assert secrets("staging") == {"A": "1", "B": "2", "C": "3", "D": "4"}
    (folder / ".dev.vars").write_text("E=5")
    assert secrets("staging") == {"E": "5"}


@pytest.mark.parametrize(("name", "text"), [("wrangler.toml", 'main = "e.py"'), ("wrangler.jsonc", '{"main": "e.py"}')])
def test_a_manifest_may_begin_with_a_byte_order_mark(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "e.py").touch()
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert load_manifest(tmp_path).main.name == "e.py"


def test_a_value_in_place_of_tables_gets_an_example_of_a_tables_start(folder: Path) -> None:
    write(folder, 'name = "f"\nmain = "src/entry.py"\n[kv_namespaces]\nbinding = "KV"\n')
    with pytest.raises(
        ManifestError,
        match=r"kv_namespaces: must be an array, not a table; each of its tables begins with \[\[kv_namespaces\]\]",
    ):
        load_manifest(folder)


def test_functions_and_objects_of_another_environment_are_named_as_they_are_served(folder: Path) -> None:
    text = (
        'name = "f"\nmain = "src/entry.py"\n[[services]]\nbinding = "A"\nservice = "other"\nenvironment = "staging"\n'
        '[[durable_objects.bindings]]\nname = "B"\nclass_name = "Room"\nscript_name = "rooms"\nenvironment = "staging"\n'
    )
    service, objects = load_manifest(write(folder, text)).bindings
    assert (service.options["service"], objects.options["script_name"]) == ("other-staging", "rooms-staging")
    assert "environment" not in {**service.options, **objects.options}


@pytest.mark.parametrize(
    "table",
    [
        '[[services]]\nbinding = "A"\nservice = "@m/model"\nenvironment = "x"\n',
        '[[durable_objects.bindings]]\nname = "B"\nclass_name = "Room"\nenvironment = "x"\n',
    ],
)
def test_an_environment_of_no_function_is_refused(folder: Path, table: str) -> None:
    with pytest.raises(ManifestError, match=r"environment = 'x' needs .*, the name of a function"):
        load_manifest(write(folder, f'name = "f"\nmain = "src/entry.py"\n{table}'))


def test_the_schema_of_an_editor_is_no_news_to_an_author(folder: Path) -> None:
    text = (
        '{"$schema": "node_modules/wrangler/config-schema.json", "name": "f", "main": "src/entry.py", "logpush": true}'
    )
    assert load_manifest(write(folder, text, "wrangler.jsonc")).notes == ["logpush in the manifest has no effect here"]


def test_limits_of_a_workflow_are_named_as_without_effect(folder: Path) -> None:
    text = 'name = "f"\nmain = "src/entry.py"\n[[workflows]]\nbinding = "W"\nname = "w"\nclass_name = "W"\nlimits = { steps = 5 }\n'
    assert load_manifest(write(folder, text)).notes == ["workflows.limits in the manifest has no effect here"]


def test_an_environment_inherits_migrations(folder: Path) -> None:
    text = 'name = "f"\nmain = "src/entry.py"\n[[migrations]]\ntag = "v1"\nnew_sqlite_classes = ["A"]\n[env.x]\n'
    assert [each.tag for each in load_manifest(write(folder, text), "x").migrations] == ["v1"]

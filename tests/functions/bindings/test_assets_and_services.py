"""Static assets (responses, canonical URLs, paths that try to leave the folder), and service bindings."""

import mimetypes
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pilotlight.functions.bindings.assets.asset_rules import MAX_REDIRECTS, compiled_pattern, match_pattern
from pilotlight.functions.bindings.binding import BindingError, Services
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import FetchEvent, RpcEvent
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.manifest import BindingDeclaration, Manifest, ManifestAssets
from tests.functions.bindings.conftest import Wire
from tests.functions.channel.whole import whole

pytest.importorskip("workers.http.outbound")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "public"
    (root / "docs").mkdir(parents=True)
    for name in ("index.html", "about.html", "404.html", "docs/index.html", "docs/404.html", "app.js", "a b.txt"):
        (root / name).write_text(f"<{name}>")
    (root / ".dev.vars").write_text("TOKEN=secret")
    (tmp_path / "outside.txt").write_text("outside")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    return root


async def answered(assets: Any, path: str, **options: Any) -> tuple[int, str]:
    response = await assets.fetch(f"http://site{path}", **options)
    return response.status, response.headers.get("location") or await response.text()


async def test_a_file_comes_with_its_type_and_tag(wire: Wire, folder: Path) -> None:
    assets = (await wire(("assets", "ASSETS", {"directory": str(folder)}))).env["ASSETS"]
    response = await assets.fetch("http://site/app.js")
    assert (response.status, await response.text()) == (200, "<app.js>")
    assert response.headers["content-type"].startswith("text/javascript")
    assert response.headers["content-length"] == "8"
    tag = response.headers["etag"]
    again = await assets.fetch("http://site/app.js", headers={"if-none-match": f'"x", W/{tag}'})
    assert (again.status, await again.text()) == (304, "")
    (folder / "app.js").write_text("changed!")
    changed = await assets.fetch("http://site/app.js", headers={"if-none-match": tag})
    assert (changed.status, await changed.text()) == (200, "changed!")
    assert await answered(assets, "/a%20b.txt") == (200, "<a b.txt>")
    assert await answered(assets, "/app.js", method="HEAD") == (200, "")
    assert (await answered(assets, "/app.js", method="POST", body="x"))[0] == 405


async def test_a_path_that_belongs_to_the_function_does_so_in_any_encoding(folder: Path, tmp_path: Path) -> None:
    declared = BindingDeclaration("assets", "ASSETS", {"directory": str(folder)})
    manifest = Manifest("f", tmp_path, tmp_path / "entry.py", assets=ManifestAssets(declared, ("/docs/*",)))
    services = Services()
    bindings = FunctionBindings(manifest, tmp_path / "state", services)
    for path in ("/docs/", "/%64ocs/", "/d%6Fcs/index.html"):
        assert await bindings.static("HEAD", f"http://site{path}", []) is None, path
    assert await bindings.static("HEAD", "http://site/%61pp.js", []) is not None
    await bindings.close()
    await services.databases.close()


async def test_the_types_of_files_do_not_depend_on_the_machine(wire: Wire, folder: Path) -> None:
    expected = {
        "app.js": "text/javascript; charset=utf-8",
        "font.WOFF2": "font/woff2",
        "photo.webp": "image/webp",
        "rows.csv": "text/csv; charset=utf-8",
        "rows.csv.gz": "application/gzip",
        "rows.csv.br": "application/octet-stream",
        "unknown": "application/octet-stream",
    }
    for name in expected:
        (folder / name).write_text("x")
    assets = (await wire(("assets", "ASSETS", {"directory": str(folder)}))).env["ASSETS"]
    mimetypes.init([])  # a machine without /etc/mime.types
    try:
        types = {name: (await assets.fetch(f"http://site/{name}")).headers["content-type"] for name in expected}
    finally:
        mimetypes.init()
    assert types == expected


@pytest.mark.parametrize(
    ("handling", "expected"),
    [
        (
            "auto-trailing-slash",
            {"/": "<index.html>", "/about": "<about.html>", "/about/": "/about", "/about.html": "/about", "/docs": "/docs/",
             "/docs/": "<docs/index.html>", "/docs/index.html": "/docs/", "/about/?q=1": "/about?q=1"},
        ),
        ("force-trailing-slash", {"/about": "/about/", "/about/": "<about.html>", "/docs": "/docs/", "/docs/": "<docs/index.html>"}),
        ("drop-trailing-slash", {"/about": "<about.html>", "/about/": "/about", "/docs": "<docs/index.html>", "/docs/": "/docs"}),
        ("none", {"/about": "", "/about.html": "<about.html>", "/docs/": "", "/docs/index.html": "<docs/index.html>"}),
    ],
)  # fmt: skip
async def test_pages_have_one_address(wire: Wire, folder: Path, handling: str, expected: dict[str, str]) -> None:
    options = {"directory": str(folder), "html_handling": handling}
    assets = (await wire(("assets", "ASSETS", options))).env["ASSETS"]
    assert {path: (await answered(assets, path))[1] for path in expected} == expected


async def test_what_is_missing_is_answered_as_the_manifest_says(wire: Wire, folder: Path) -> None:
    base = {"directory": str(folder)}
    wired = await wire(
        ("assets", "PLAIN", base),
        ("assets", "PAGE", {**base, "not_found_handling": "404-page"}),
        ("assets", "APP", {**base, "not_found_handling": "single-page-application"}),
    )
    assert await answered(wired.env["PLAIN"], "/nothing") == (404, "")
    assert await answered(wired.env["PAGE"], "/nothing/here") == (404, "<404.html>")
    assert await answered(wired.env["PAGE"], "/docs/nothing") == (404, "<docs/404.html>")
    assert await answered(wired.env["APP"], "/any/route") == (200, "<index.html>")


@pytest.mark.parametrize(
    "path",
    ["/../outside.txt", "/%2e%2e/outside.txt", "/docs/../../outside.txt", "/..%2foutside.txt", "/link.txt", "/.dev.vars", "//app.js", "/app.js%00",
     "/docs", "/" + "x" * 5000],
)  # fmt: skip
async def test_a_path_that_wants_out_does_not_exist(wire: Wire, folder: Path, path: str) -> None:
    options = {"directory": str(folder), "html_handling": "none"}
    assets = (await wire(("assets", "ASSETS", options))).env["ASSETS"]
    assert await answered(assets, path) == (404, "")


async def test_a_folder_that_is_not_there_is_named(wire: Wire, tmp_path: Path) -> None:
    with pytest.raises(BindingError, match="there is no folder 'nowhere'"):
        await wire(("assets", "ASSETS", {"directory": str(tmp_path / "nowhere")}))


class Response(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    stream: AsyncIterator[bytes] | None


class Called(NamedTuple):
    value: Any
    body: AsyncIterator[bytes] | None = None


class Functions:
    """A stand-in for a site with one function, `calc`."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.sockets: list[bool] = []

    async def fetch(self, function: str, event: FetchEvent, body: Any = None, *, is_socket: bool = False) -> Response:
        self.options.append(event.options)
        self.sockets.append(is_socket)
        sent = event.body if body is None else b"".join([chunk async for chunk in body])
        told = [("x-entry", event.entrypoint), ("x-got", dict(event.headers).get("x-asked", ""))]
        return Response(201, told, b"", once(sent.upper()))

    async def ask(self, function: str, event: RpcEvent, body: Any = None) -> Called:
        if event.method != "addAll":
            raise Failure(f"{event.entrypoint} has no method {event.method!r}", code="no_method", name="TypeError")
        return Called({"sum": sum(event.args) + event.kwargs.get("more", 0), "function": function})


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_a_service_is_fetched_and_its_methods_are_called(wire: Wire) -> None:
    functions = Functions()
    declared = {"service": "calc", "entrypoint": "Adder", "props": {"who": "me"}}
    service = (await wire(("service", "CALC", declared), functions=functions)).env["CALC"]

    async def stream() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"cd"

    for body in ("abcd", stream()):
        response = await service.fetch("http://calc/x", method="POST", body=body, headers={"x-asked": "1"})
        assert (response.status, response.headers["x-entry"], response.headers["x-got"]) == (201, "Adder", "1")
        assert await response.text() == "ABCD"
    assert functions.options[0] == {"props": {"who": "me"}}
    result = await service.addAll(1, 2, more=3)
    assert (result.sum, result["function"]) == (6, "calc")
    with pytest.raises(Failure, match="Adder has no method 'subtract'"):
        await service.subtract(1)


async def test_a_socket_is_one_where_its_messages_come_along(wire: Wire) -> None:
    functions = Functions()
    channel = (await wire(("service", "CALC", {"service": "calc"}), functions=functions)).channel
    for asks, body in ((True, once(b"a")), (True, None), (False, once(b"a")), (False, None)):
        result = await channel.begin("CALC", "fetch", ("GET", "http://calc/"), {"web_socket": asks}, body)
        assert result.body is not None
        await whole(result.body)
    assert functions.sockets == [True, False, False, False]


async def test_a_service_without_functions_is_refused(wire: Wire) -> None:
    with pytest.raises(BindingError, match="the site has no other functions"):
        await wire(("service", "CALC", {"service": "calc"}))


REDIRECTS = """
# where things went
/old /about 301
/blog/* https://blog.example.com/:splat
/u/:user/posts/:post /about?user=:user&post=:post 307
/app/* /index.html 200
/away https://example.com/?a=b
/at/:host/* https://:host/:splat
/bad
/worse /about 999
nonsense /about
/:a-:b /about
"""
HEADERS = """
/*
  X-All: yes
  Cache-Control: max-age=60

/docs/*
  X-All: docs
  X-Splat: in :splat
  ! etag
/about
  no colon here
https://other.example/*
  X-Other: yes
"""


async def test_redirects_lead_away_and_lines_that_make_no_sense_are_named(
    wire: Wire, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "_redirects").write_text(REDIRECTS)
    assets = (await wire(("assets", "ASSETS", {"directory": str(folder)}))).env["ASSETS"]
    expected = {
        "/old": (301, "/about"),
        "/old?x=1": (301, "/about?x=1"),
        "/blog/a/b": (302, "https://blog.example.com/a/b"),
        "/u/ada/posts/7": (307, "/about?user=ada&post=7"),
        "/app/deep/link": (200, "<index.html>"),
        "/away?c=d": (302, "https://example.com/?a=b"),
        "/about": (200, "<about.html>"),
        "/_redirects": (404, ""),
    }
    expected["/at/[/a"] = (404, "")  # a host that does not exist
    for path, wanted in expected.items():
        assert await answered(assets, path, redirect="manual") == wanted, path
    assert [line.split(" is ignored")[0] for line in caplog.messages] == [
        f"_redirects, line {number}" for number in (9, 10, 11, 12)
    ]


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("_redirects", "/a", "is not: SOURCE DESTINATION"),
        ("_redirects", "/a /b 301 more", "is not: SOURCE DESTINATION"),
        ("_redirects", "/a about", "leads neither to a path nor to a URL"),
        ("_redirects", "/a https://x.example/ 200", "leads neither to a path nor to a URL"),
        ("_redirects", "https://x.example/a /b", "begins with no path"),
        ("_redirects", "/a /b 30x", "has the code '30x'"),
        ("_headers", "about\n  x: y", "begins with no path and no URL"),
    ],
)
async def test_a_rule_that_makes_no_sense_is_named_by_its_line(
    wire: Wire, folder: Path, caplog: pytest.LogCaptureFixture, file: str, line: str, complaint: str
) -> None:
    (folder / file).write_text(f"# first\n{line}\n")
    await wire(("assets", "ASSETS", {"directory": str(folder)}))
    assert [("2" in text, complaint in text) for text in caplog.messages][:1] == [(True, True)]


@pytest.mark.parametrize(
    ("source", "url", "found"),
    [
        ("/a/:b/c", "/a/x/c", {"b": "x"}),
        ("/a/:b/c", "/a//c", None),
        ("/a/:b/c", "/a/x/y/c", None),
        ("/a/*", "/a/x/y", {"splat": "x/y"}),
        ("/a/*", "/a/", {"splat": ""}),
        ("/a.b", "/axb", None),
        ("https://:sub.x.example/*", "one.x.example/a/b", {"sub": "one", "splat": "a/b"}),
        ("https://*.x.example/a", "one.x.example/a", {"splat": "one"}),
        ("https://*.x.example/a", "one.x.example/b/a", None),
        ("https://x.example/:p", "x.example/", None),
        ("https://x.example/:p", "x.example/q", {"p": "q"}),
    ],
)
def test_a_placeholder_is_one_part_and_a_splat_the_rest(source: str, url: str, found: dict[str, str] | None) -> None:
    compiled = compiled_pattern(source)
    assert compiled is not None
    pattern, has_host = compiled
    assert has_host == source.startswith("https://")
    host, slash, path = url.partition("/")
    assert match_pattern(pattern, has_host, host, slash + path) == found


@pytest.mark.parametrize("source", ["a", "http://x.example/", "/:a-:b", "/:a/:a", "/*/*", "/*-*"])
def test_what_could_take_long_tomatch_pattern_or_is_no_path_is_no_pattern(source: str) -> None:
    assert compiled_pattern(source) is None


async def test_so_many_redirects_count(wire: Wire, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "_redirects").write_text("".join(f"/{n} /about\n" for n in range(MAX_REDIRECTS + 1)))
    assets = (await wire(("assets", "ASSETS", {"directory": str(folder)}))).env["ASSETS"]
    assert [(await answered(assets, f"/{n}", redirect="manual"))[0] for n in (0, MAX_REDIRECTS - 1, MAX_REDIRECTS)] == [
        302,
        302,
        404,
    ]
    assert f"is beyond the {MAX_REDIRECTS} redirects that count" in caplog.text


@pytest.mark.parametrize("option", ["html_handling", "not_found_handling"])
async def test_a_handling_that_is_not_known_is_named(wire: Wire, folder: Path, option: str) -> None:
    with pytest.raises(BindingError, match=f"ASSETS: {option} is one of .*, not 'other'"):
        await wire(("assets", "ASSETS", {"directory": str(folder), option: "other"}))


async def test_what_is_not_offered_is_named_with_what_is(wire: Wire) -> None:
    with pytest.raises(BindingError, match="of the kind 'browser' are not offered; offered are ai, kv, "):
        await wire(("browser", "B", {}))
    with pytest.raises(BindingError, match="M: the site has no models"):
        await wire(("service", "M", {"service": "@cf/m"}))


async def test_headers_are_said_along_with_the_files_that_their_paths_name(wire: Wire, folder: Path) -> None:
    (folder / "_headers").write_text(HEADERS)
    assets = (await wire(("assets", "ASSETS", {"directory": str(folder)}))).env["ASSETS"]
    about, docs = await assets.fetch("http://site/about"), await assets.fetch("http://site/docs/")
    assert (about.headers["x-all"], about.headers["cache-control"]) == ("yes", "max-age=60")
    assert (docs.headers["x-all"], docs.headers["x-splat"]) == ("yes, docs", "in")
    assert "etag" in about.headers
    assert "etag" not in docs.headers
    assert "x-other" not in about.headers
    assert (await assets.fetch("http://other.example/about")).headers["x-other"] == "yes"


@pytest.mark.parametrize(
    ("wanted", "status", "body", "said"),
    [
        ("bytes=1-3", 206, "app", "bytes 1-3/8"),
        ("bytes=4-", 206, ".js>", "bytes 4-7/8"),
        ("bytes=-2", 206, "s>", "bytes 6-7/8"),
        ("bytes=0-99", 200, "<app.js>", None),
        ("bytes=8-", 416, "", "bytes */8"),
        ("bytes=0-1,3-4", 200, "<app.js>", None),
        ("lines=1-2", 200, "<app.js>", None),
    ],
)
async def test_a_part_of_a_file_can_be_asked_for(
    wire: Wire, folder: Path, wanted: str, status: int, body: str, said: str | None
) -> None:
    assets = (await wire(("assets", "ASSETS", {"directory": str(folder)}))).env["ASSETS"]
    answer = await assets.fetch("http://site/app.js", headers={"range": wanted})
    assert (answer.status, await answer.text(), answer.headers.get("content-range")) == (status, body, said)
    stale = await assets.fetch("http://site/app.js", headers={"range": wanted, "if-range": '"other"'})
    assert stale.status == 200


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/a%20b.html", "/a%20b"),
        ("/%C3%B6", "/%C3%B6/"),
        ("/%C3%B6/index.html?q=%20", "/%C3%B6/?q=%20"),
        ("/a%2520.html", "/a%2520"),
    ],
)
async def test_the_way_to_a_page_is_encoded_once_and_leads_there(
    wire: Wire, tmp_path: Path, path: str, location: str
) -> None:
    (tmp_path / "ö").mkdir()
    for file in ("a b.html", "ö/index.html", "a%20.html"):
        (tmp_path / file).write_text("page")
    assets = (await wire(("assets", "ASSETS", {"directory": str(tmp_path)}))).env["ASSETS"]
    answer = await assets.fetch(f"http://x{path}")
    assert (answer.status, answer.headers["location"]) == (307, location)
    assert await (await assets.fetch(f"http://x{location}")).text() == "page"


async def test_rules_hold_for_encoded_addresses_however_they_are_written(wire: Wire, tmp_path: Path) -> None:
    (tmp_path / "a b.html").write_text("page")
    (tmp_path / "_redirects").write_text(
        "/old/:name /new/:name 301\n/ä /ö 302\n/%C3%BC /%20 302\n/shown/:name /:name 200\n"
    )
    assets = (await wire(("assets", "ASSETS", {"directory": str(tmp_path)}))).env["ASSETS"]
    ways = {"/old/a%20b": "/new/a%20b", "/old/%C3%B6": "/new/%C3%B6", "/%C3%A4": "/%C3%B6", "/%C3%BC": "/%20"}
    for path, location in ways.items():
        answer = await assets.fetch(f"http://x{path}")
        assert (answer.headers["location"], answer.status in (301, 302)) == (location, True)
    assert await (await assets.fetch("http://x/shown/a%20b.html")).text() == "page"

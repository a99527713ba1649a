"""R2 at an S3 endpoint: signatures equal to botocore's, interoperability with other tools, and failures of the endpoint."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from pilotlight.functions.bindings.storage import r2_s3, s3
from pilotlight.functions.bindings.storage.r2_objects import Conditions, Details, R2Error
from pilotlight.functions.bindings.storage.s3 import Credentials, S3Place, canonical_query, sign
from pilotlight.functions.channel.failure import Failure
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.site import FunctionsConfig
from tests.functions.bindings.conftest import Wire
from tests.functions.bindings.s3_server import s3_endpoint, s3_place
from workers.bindings.r2 import R2Bucket, R2ObjectBody

pytestmark = pytest.mark.process

__all__ = ["s3_endpoint", "s3_place"]
R2 = ("r2", "BUCKET", {"bucket_name": "photos"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "site")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very secret")


@pytest.mark.parametrize("key", ["plain", "a b/c+d=é~", "x/y//z", "%41&?#"])
@pytest.mark.parametrize("query", [{}, {"list-type": "2", "prefix": "a/b c", "delete": ""}])
def test_a_signature_is_the_one_that_botocore_makes(key: str, query: dict[str, str]) -> None:
    auth, awsrequest = pytest.importorskip("botocore.auth"), pytest.importorskip("botocore.awsrequest")
    credentials = pytest.importorskip("botocore.credentials").Credentials("AKID", "sec/ret", "token")
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    path = "/bucket/" + s3.percent_encoded(key, safe="/")
    sha256 = hashlib.sha256(b"body").hexdigest()
    url = f"https://s3.example.com{path}" + (f"?{canonical_query(query)}" if query else "")
    theirs = awsrequest.AWSRequest("PUT", url, {"x-amz-meta-a": "b  c", "x-amz-content-sha256": sha256}, b"body")
    theirs.context["timestamp"] = at.strftime("%Y%m%dT%H%M%SZ")
    signer = auth.S3SigV4Auth(credentials, "s3", "eu-west-1")
    theirs.headers["X-Amz-Date"] = theirs.context["timestamp"]
    theirs.headers["X-Amz-Security-Token"] = "token"
    wanted = signer.signature(signer.string_to_sign(theirs, signer.canonical_request(theirs)), theirs)
    ours = sign(
        "PUT", path, query, {"host": "s3.example.com", "x-amz-meta-a": "b  c"}, sha256,
        Credentials("AKID", "sec/ret", "token"), "eu-west-1", at,
    )  # fmt: skip
    assert ours["authorization"].endswith(f"Signature={wanted}")


async def test_other_tools_see_what_functions_write_and_functions_what_those_write(
    wire: Wire, s3_place: S3Place
) -> None:
    bucket: R2Bucket = (await wire(R2, r2={"photos": s3_place})).env["BUCKET"]
    await bucket.put("a/b c", b"data", httpMetadata={"contentType": "text/x"}, customMetadata={"who": "me"})
    await bucket.put("odd", b"data", customMetadata={"Ünlike": " spaces "}, sha256=hashlib.sha256(b"data").hexdigest())
    others = pytest.importorskip("boto3").client(
        "s3", endpoint_url=s3_place.endpoint, region_name="us-east-1", aws_access_key_id="o", aws_secret_access_key="o"
    )
    seen = await asyncio.to_thread(others.get_object, Bucket=s3_place.bucket, Key="a/b c")
    assert (seen["Body"].read(), seen["ContentType"], seen["Metadata"]) == (b"data", "text/x", {"who": "me"})
    odd = await bucket.head("odd")
    assert odd is not None
    assert odd.customMetadata == {"Ünlike": " spaces "}
    assert odd.checksums.sha256 == hashlib.sha256(b"data").digest()
    foreign = {"Key": "foreign", "Body": b"theirs", "ContentType": "x/y", "Metadata": {"theirs": "yes"}}
    await asyncio.to_thread(lambda: others.put_object(Bucket=s3_place.bucket, **foreign))
    found = await bucket.get("foreign")
    assert isinstance(found, R2ObjectBody)
    assert (await found.text(), found.httpMetadata.contentType) == ("theirs", "x/y")
    assert found.customMetadata == {"theirs": "yes"}


async def test_what_was_not_said_of_an_object_is_not_made_up(wire: Wire, s3_place: S3Place) -> None:
    bucket: R2Bucket = (await wire(R2, r2={"photos": s3_place})).env["BUCKET"]
    await bucket.put("silent", b"x")
    await bucket.put("said", b"x", httpMetadata={"contentType": "application/octet-stream"})
    for key, kind in (("silent", None), ("said", "application/octet-stream")):
        found = await bucket.head(key)
        assert found is not None
        assert found.http_metadata.get("contentType") == kind


async def test_keys_that_could_lead_to_another_bucket_are_refused(wire: Wire, s3_place: S3Place) -> None:
    bucket: R2Bucket = (await wire(R2, r2={"photos": s3_place})).env["BUCKET"]
    for key in ("../other/key", "..", "a/./b"):
        with pytest.raises(Failure, match=r"\(10020\)"):
            await bucket.put(key, b"x")
        with pytest.raises(Failure, match=r"\(10020\)"):
            await bucket.get(key)
    for key in ("C:\\x", "x" * 1024, "~", "%2e%2e/", "a&b<c>", "ü" * 500):
        await bucket.put(key, key)
        found = await bucket.get(key)
        assert isinstance(found, R2ObjectBody)
        assert await found.text() == key
    listed = {each.key for each in (await bucket.list()).objects}
    assert {"C:\\x", "a&b<c>", "%2e%2e/"} <= listed
    await bucket.delete(sorted(listed))
    assert (await bucket.list()).objects == []


async def test_a_bucket_that_is_not_there_says_so(wire: Wire, s3_place: S3Place) -> None:
    bucket: R2Bucket = (await wire(R2, r2={"photos": replace(s3_place, bucket="nobodys")})).env["BUCKET"]
    for act in (bucket.put("k", b"x"), bucket.get("k"), bucket.head("k"), bucket.list()):
        with pytest.raises(Failure, match=r"bucket does not exist.*\(10006\)"):
            await act


# -- an endpoint that fails --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def store(handler: Handler) -> AsyncIterator[tuple[S3Place, list[web.Request]]]:
    """Start an S3 endpoint that answers by the handler; yield it and the received requests."""
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        await request.read()
        return await handler(request)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield S3Place(f"http://127.0.0.1:{runner.addresses[0][1]}", "photos"), seen
    finally:
        await runner.cleanup()


def error(status: int, code: str) -> web.Response:
    return web.Response(status=status, text=f"<Error><Code>{code}</Code><Message>because</Message></Error>")


async def test_an_endpoint_that_is_away_is_named(wire: Wire) -> None:
    bucket: R2Bucket = (await wire(R2, r2={"photos": S3Place("http://127.0.0.1:9", "photos")})).env["BUCKET"]
    with pytest.raises(
        Failure, match=r"http://127\.0\.0\.1:9 cannot be reached.*\(10043\)|\(store_unreachable\)"
    ) as failed:
        await bucket.put("k", b"x")
    assert (failed.value.code, failed.value.status) == ("store_unreachable", 502)


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "InvalidAccessKeyId", "AccessDenied"])
async def test_wrong_credentials_are_the_sites_fault_and_stay_secret(wire: Wire, code: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return error(403, code)

    async with store(handler) as (place, seen):
        bucket: R2Bucket = (await wire(R2, r2={"photos": place})).env["BUCKET"]
        for act in (bucket.put("k", b"x"), bucket.get("k"), bucket.list(), bucket.delete("k")):
            with pytest.raises(Failure, match="credentials") as failed:
                await act
            assert failed.value.code == "store_unauthorized"
            assert "very secret" not in str(failed.value)
        assert len(seen) == 4  # a refusal is not retried


async def test_a_busy_store_is_asked_again_and_the_body_is_sent_again(wire: Wire) -> None:
    bodies: list[bytes] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        md5 = hashlib.md5(bodies[-1]).hexdigest()
        return error(503, "SlowDown") if len(bodies) < 3 else web.Response(headers={"etag": f'"{md5}"'})

    async with store(handler) as (place, _):
        bucket: R2Bucket = (await wire(R2, r2={"photos": place})).env["BUCKET"]
        data = b"x" * 6_000_000
        put = await bucket.put("k", data)
        assert put is not None
        assert put.etag == hashlib.md5(data).hexdigest()
        assert bodies == [data] * 3


async def test_a_store_that_stays_busy_is_given_up(wire: Wire) -> None:
    async def handler(request: web.Request) -> web.Response:
        return error(503, "SlowDown")

    async with store(handler) as (place, seen):
        bucket: R2Bucket = (await wire(R2, r2={"photos": place})).env["BUCKET"]
        with pytest.raises(Failure, match=r"busy.*\(10058\)") as failed:
            await bucket.put("k", b"x")
        assert (failed.value.code, failed.value.status, len(seen)) == ("store_busy", 503, s3.TRIES)


def serving(data: bytes, sent: bytes, **headers: str) -> Handler:
    """Return a handler that announces `data` but sends `sent`."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"etag": f'"{hashlib.md5(data).hexdigest()}"', "content-length": str(len(data)), **headers}
        )
        await response.prepare(request)
        if request.method == "GET":
            await response.write(sent)
            if len(sent) < len(data):
                assert request.transport is not None
                request.transport.close()
        return response

    return handler


@pytest.mark.parametrize(
    ("sent", "sentence", "code"),
    [
        (b"x" * 50_000, "broke off", "store_broke_off"),
        (b"y" * 100_000, "differ from the stored object", "store_corrupt"),
    ],
)
async def test_a_body_that_is_cut_off_or_changed_is_no_object(
    wire: Wire, sent: bytes, sentence: str, code: str
) -> None:
    async with store(serving(b"x" * 100_000, sent)) as (place, _):
        bucket: R2Bucket = (await wire(R2, r2={"photos": place})).env["BUCKET"]
        found = await bucket.get("k")
        assert isinstance(found, R2ObjectBody)
        with pytest.raises(Failure, match=sentence) as failed:
            await found.bytes()
        assert failed.value.code == code


async def test_a_store_that_received_something_else_says_so(wire: Wire) -> None:
    async def handler(request: web.Request) -> web.Response:
        return error(400, "XAmzContentSHA256Mismatch")

    async with store(handler) as (place, _):
        bucket: R2Bucket = (await wire(R2, r2={"photos": place})).env["BUCKET"]
        with pytest.raises(Failure, match=r"other bytes than were sent.*\(10037\)"):
            await bucket.put("k", b"x")


async def test_what_is_no_s3_at_all_is_named(wire: Wire) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome to nginx")

    async with store(handler) as (place, _):
        bucket: R2Bucket = (await wire(R2, r2={"photos": place})).env["BUCKET"]
        with pytest.raises(Failure, match="sent no XML"):
            await bucket.list()


async def test_credentials_come_from_a_file_that_may_change(wire: Wire, tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(headers={"etag": '"x"'})

    file = tmp_path / "credentials"
    async with store(handler) as (place, seen):
        bucket: R2Bucket = (
            await wire(R2, r2={"photos": replace(place, credentials_file=str(file), profile="mine")})
        ).env["BUCKET"]
        with pytest.raises(Failure, match=r"credentials cannot be read.*operator.*\(10002\)"):
            await bucket.put("k", b"x")
        for key in ("first", "second"):
            file.write_text(f"[mine]\naws_access_key_id = {key}\naws_secret_access_key = s%ecret\n")
            await bucket.put("k", b"x")
            assert f"Credential={key}/" in seen[-1].headers["authorization"]
        file.write_text("[other]\n")
        with pytest.raises(Failure, match="mine"):
            await bucket.put("k", b"x")


async def test_an_environment_without_credentials_is_named(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    bucket: R2Bucket = (await wire(R2, r2={"photos": S3Place("http://127.0.0.1:9", "photos")})).env["BUCKET"]
    with pytest.raises(Failure, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        await bucket.put("k", b"x")


def test_the_site_file_names_stores() -> None:
    from pilotlight.functions.site_file import r2_stores

    table: Any = {"r2": {"photos": {"endpoint": "https://s3.example.com", "region": "eu", "bucket": "b-1"}}}
    stores = r2_stores(parse(FunctionsConfig, table, "ams1.toml"))
    assert stores == {"photos": S3Place("https://s3.example.com", "b-1", "eu")}
    with pytest.raises(ConfigError, match=r"r2.photos.endpoint: must be http"):
        parse(FunctionsConfig, {"r2": {"photos": {"endpoint": "s3.example.com"}}}, "ams1.toml")


async def test_a_client_that_leaves_during_an_upload_leaves_nothing_at_the_store(wire: Wire, s3_place: S3Place) -> None:
    bucket: R2Bucket = (await wire(R2, r2={"photos": s3_place})).env["BUCKET"]

    is_read = asyncio.Event()

    async def never_ends() -> AsyncIterator[bytes]:
        yield b"some"
        is_read.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(bucket.put("k", never_ends()))
    await asyncio.wait_for(is_read.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await bucket.head("k") is None


@pytest.mark.parametrize(
    ("code", "status", "number", "told", "word"),
    [
        ("InvalidAccessKeyId", 400, 10003, 502, "store_unauthorized"),
        ("AccessDenied", 403, 10003, 502, "store_unauthorized"),
        ("Odd", 401, 10003, 502, "store_unauthorized"),
        ("NoSuchBucket", 404, 10006, 404, ""),
        ("NoSuchUpload", 404, 10024, 404, ""),
        ("InvalidPart", 400, 10025, 400, ""),
        ("InvalidPartOrder", 400, 10025, 400, ""),
        ("EntityTooSmall", 400, 10011, 400, ""),
        ("EntityTooLarge", 400, 100100, 400, ""),
        ("MaxMessageLengthExceeded", 400, 100100, 400, ""),
        ("MetadataTooLarge", 400, 10012, 400, ""),
        ("BadDigest", 400, 10037, 502, "store_corrupt"),
        ("SlowDown", 503, 10058, 503, "store_busy"),
        ("Odd", 429, 10058, 503, "store_busy"),
        ("Odd", 500, 10001, 502, "store_failed"),
    ],
)
async def test_a_stores_refusal_has_the_platforms_number(
    code: str, status: int, number: int, told: int, word: str
) -> None:
    async def ask(*asked: Any) -> None:
        raise s3.S3Error(code, "so it is", status)

    with pytest.raises(R2Error) as refused:
        await r2_s3.S3Store(cast("Any", SimpleNamespace(ask=ask))).abort_upload("k", "upload")
    assert (refused.value.number, refused.value.status, refused.value.word) == (number, told, word)


class Taken:
    """A response whose body the test does not read."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    def __aiter__(self) -> AsyncIterator[bytes]:
        return no_bytes()

    def close(self) -> None: ...


class Racing:
    """An S3 endpoint where another client writes first, `times` times; then it accepts."""

    def __init__(self, times: int, status: int = 412) -> None:
        self.left, self.status = times, status
        self.asked: list[tuple[str, dict[str, str]]] = []

    async def ask(self, method: str, key: str = "", query: Any = None, headers: Any = None, body: Any = None) -> Any:
        self.asked.append((method, dict(headers or {})))
        if method != "HEAD" and self.left:
            self.left -= 1
            raise s3.S3Error("PreconditionFailed", "", self.status)
        found = {"etag": '"e1"', "content-length": "3", "last-modified": "Thu, 26 Nov 2026 00:00:00 GMT"}
        return Taken(found)


async def no_bytes() -> AsyncIterator[bytes]:
    yield b"new"


@pytest.mark.parametrize("status", [404, 409, 412])
async def test_an_overtaken_waiter_looks_at_the_condition_again_and_gives_up_after_a_while(status: int) -> None:
    for times in (1, r2_s3.MAX_RACES):
        racing = Racing(times, status)
        store = r2_s3.S3Store(cast("Any", racing))
        putting = store.put("k", no_bytes(), Details(), Conditions(etag_matches=["e1"]), None)
        if times == 1:
            head = await putting
            assert head is not None
            assert head.size == 3
            puts = [headers for method, headers in racing.asked if method == "PUT"]
            assert [headers["if-match"] for headers in puts] == ['"e1"', '"e1"']
            assert [method for method, _ in racing.asked] == ["HEAD", "PUT"] * 2
        else:
            with pytest.raises(R2Error, match="others keep replacing 'k': try again"):
                await putting
    store = r2_s3.S3Store(cast("Any", racing := Racing(1, status)))
    if status == 409:
        with pytest.raises(R2Error, match="the store answered 409"):
            await store.open("k", None, None)
    else:
        found = await store.open("k", None, None)
        assert found is not None
        assert [headers.get("if-match") for method, headers in racing.asked if method == "GET"] == ['"e1"', '"e1"']


@pytest.mark.parametrize("cursor", ["x", "AAAA", base64.urlsafe_b64encode(b"other").decode()])
async def test_an_unknown_cursor_is_refused(cursor: str) -> None:
    store = r2_s3.S3Store(cast("Any", None))
    with pytest.raises(R2Error, match="the cursor does not come from a list"):
        await store.listing("", 10, cursor, "", "", with_metadata=False)

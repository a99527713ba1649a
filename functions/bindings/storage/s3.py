"""The part of S3's protocol that buckets need: signed requests (AWS Signature 4), responses, retries.

It uses the HTTP client that a site has anyway. The usual library, botocore, has 31 MiB, takes 140 ms to create a client, and blocks the event
loop during requests. Each body is sent with its hash signed, so the store refuses a body that was damaged on the way. This module is independent of
R2 and functions.
"""

import asyncio
import hashlib
import hmac
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import aiohttp
from yarl import URL

TRIES = 4
CONNECT_S = 5.0
SILENCE_S = 30.0  # longest pause within a response
MAX_ERROR_BYTES = 64 << 10
CHUNK_BYTES = 256 << 10
TRANSIENT = frozenset({429, 500, 502, 503, 504})
CREDENTIALS_ARE_WRONG = frozenset(
    {
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "TokenRefreshRequired",
    }
)


class S3Error(Exception):
    """The store refused a request; `code` is S3's error code."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.status = status


class S3Unreachable(Exception):
    """The store could not be reached, or its response broke off."""


class S3CredentialsError(Exception):
    """The file or the environment variables that the site file names hold no credentials."""


@dataclass(frozen=True)
class Credentials:
    access_key_id: str
    secret_access_key: str
    session_token: str | None = None


@dataclass(frozen=True)
class S3Place:
    """One bucket at one endpoint, and where its credentials are."""

    endpoint: str
    bucket: str
    region: str = "auto"
    path_style: bool = True
    access_key_id_env: str = "AWS_ACCESS_KEY_ID"
    secret_access_key_env: str = "AWS_SECRET_ACCESS_KEY"
    session_token_env: str = "AWS_SESSION_TOKEN"
    credentials_file: str | None = None
    profile: str = "default"
    # before the first retry; doubled for each further one, and the actual pause is random, at least half of this
    first_pause_s: float = 0.1

    def credentials(self) -> Credentials:
        """Load the credentials; called per request, so that rotated files need no restart.
        Raises S3CredentialsError."""
        if self.credentials_file is not None:
            return _from_file(Path(self.credentials_file).expanduser(), self.profile)
        found = [os.environ.get(name) for name in (self.access_key_id_env, self.secret_access_key_env)]
        if not all(found):
            names = f"{self.access_key_id_env} and {self.secret_access_key_env}"
            raise S3CredentialsError(f"the site's environment has no {names} for the bucket {self.bucket!r}")
        return Credentials(str(found[0]), str(found[1]), os.environ.get(self.session_token_env) or None)


class S3Client:
    """A client for one bucket; call `close` at the end."""

    def __init__(self, place: S3Place, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.place = place
        self._now = now
        self._session: aiohttp.ClientSession | None = None
        parts = urlsplit(place.endpoint)
        host = parts.netloc if place.path_style else f"{place.bucket}.{parts.netloc}"
        self._base = f"{parts.scheme}://{host}"
        self._host = host
        self._root = parts.path.rstrip("/") + (f"/{percent_encoded(place.bucket)}" if place.path_style else "")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(
        self,
        method: str,
        key: str = "",
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: "bytes | Spooled" = b"",
    ) -> "S3Answer":
        """Send a request; retry while the store is busy or unreachable.
        The caller reads or closes the response. Raises S3Error, S3Unreachable, S3CredentialsError."""
        pause_s, tries = self.place.first_pause_s, TRIES
        while True:
            tries -= 1
            try:
                response = await self._once(method, key, query or {}, headers or {}, body)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if not tries:
                    reason = str(error) or type(error).__name__
                    raise S3Unreachable(f"the store at {self.place.endpoint} cannot be reached: {reason}") from None
            else:
                if response.status < 300:
                    return S3Answer(response, self.place.endpoint)
                failure = await _failure(response)
                if not tries or response.status not in TRANSIENT:
                    raise failure
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s *= 2

    async def _once(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: "bytes | Spooled"
    ) -> aiohttp.ClientResponse:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
            self._session = aiohttp.ClientSession(
                timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        path = self._root + ("/" + percent_encoded(key, safe="/") if key else "/")
        sha256 = body.sha256 if isinstance(body, Spooled) else hashlib.sha256(body).hexdigest()
        size = body.size if isinstance(body, Spooled) else len(body)
        sent = {**{name.lower(): value for name, value in headers.items()}, "host": self._host}
        signed = sign(method, path, query, sent, sha256, self.place.credentials(), self.place.region, self._now())
        signed["accept-encoding"] = "identity"
        if size or method in ("PUT", "POST"):
            signed["content-length"] = str(size)
        data: Any = body.chunks() if isinstance(body, Spooled) and size else (body or None)
        if isinstance(data, Spooled):
            data = None
        target = self._base + path + (f"?{canonical_query(query)}" if query else "")
        return await self._session.request(
            method, URL(target, encoded=True), headers=signed, data=data, allow_redirects=False,
            skip_auto_headers=("user-agent", "accept", "content-type"),
        )  # fmt: skip


class S3Answer:
    def __init__(self, response: aiohttp.ClientResponse, endpoint: str) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self._response = response
        self._endpoint = endpoint

    async def read(self) -> bytes:
        """Read the whole body. Raises S3Unreachable."""
        return b"".join([chunk async for chunk in self])

    async def xml(self) -> ElementTree.Element:
        """Parse the body.
        Raises S3Error if it is an error despite its status, which S3 allows for long operations."""
        try:
            root = ElementTree.fromstring(await self.read())
        except ElementTree.ParseError as error:
            raise S3Unreachable(f"the store at {self._endpoint} sent no XML: {error}") from None
        if local(root) == "Error":
            raise _as_error(root, self.status)
        return root

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.content.iter_chunked(CHUNK_BYTES):
                yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise S3Unreachable(f"the answer of the store at {self._endpoint} broke off: {reason}") from None
        finally:
            self._response.close()

    def close(self) -> None:
        """Release the connection; it can be reused if the body was read."""
        self._response.release()


class Spooled:
    """A complete, hashed body that can be sent again."""

    def __init__(self, file: IO[bytes], size: int, sha256: str) -> None:
        self.size = size
        self.sha256 = sha256
        self._file = file

    async def chunks(self) -> AsyncIterator[bytes]:
        await asyncio.to_thread(self._file.seek, 0)
        while chunk := await asyncio.to_thread(self._file.read, CHUNK_BYTES):
            yield chunk


def sign(
    method: str,
    path: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    sha256: str,
    credentials: Credentials,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """Return all headers with the signature added.
    `path` must be encoded; header names are lower case and include `host`."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    signed = {**headers, "x-amz-date": stamp, "x-amz-content-sha256": sha256}
    if credentials.session_token is not None:
        signed["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(signed))
    lines = "".join(f"{name}:{' '.join(signed[name].split())}\n" for name in sorted(signed))
    request = "\n".join((method, path, canonical_query(query), lines, names, sha256))
    to_sign = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{credentials.secret_access_key}".encode()
    for part in (stamp[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def canonical_query(query: Mapping[str, str]) -> str:
    return "&".join(f"{percent_encoded(name)}={percent_encoded(query[name])}" for name in sorted(query))


def local(element: ElementTree.Element) -> str:
    """Return the tag without its namespace, which some stores omit."""
    return element.tag.rpartition("}")[2]


def text_of(element: ElementTree.Element, name: str, default: str = "") -> str:
    for child in element:
        if local(child) == name:
            return child.text or default
    return default


def percent_encoded(text: str, safe: str = "") -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe=f"{safe}-_.~")


async def _failure(response: aiohttp.ClientResponse) -> S3Error:
    try:
        body = await response.content.read(MAX_ERROR_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError):
        body = b""
    finally:
        response.close()
    try:
        return _as_error(ElementTree.fromstring(body), response.status)
    except ElementTree.ParseError:  # no XML: the response to a HEAD, or the response of a proxy
        return S3Error(
            _BY_STATUS.get(response.status, f"HTTP{response.status}"), response.reason or "", response.status
        )


_BY_STATUS = {
    304: "NotModified", 403: "AccessDenied", 404: "NotFound", 412: "PreconditionFailed", 416: "InvalidRange", 503: "SlowDown",
}  # fmt: skip


def _as_error(root: ElementTree.Element, status: int) -> S3Error:
    return S3Error(text_of(root, "Code", f"HTTP{status}"), text_of(root, "Message")[:500], status)


def _from_file(path: Path, profile: str) -> Credentials:
    """Load credentials from an AWS file: sections with aws_access_key_id and aws_secret_access_key."""
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text())
        section = parser[profile]
        return Credentials(
            section["aws_access_key_id"], section["aws_secret_access_key"], section.get("aws_session_token")
        )
    except OSError as error:
        raise S3CredentialsError(f"the credentials file {path} cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise S3CredentialsError(f"the credentials file {path} has no {error} in [{profile}]") from None
    except (ConfigParserError, UnicodeDecodeError) as error:
        raise S3CredentialsError(f"the credentials file {path} cannot be read: {type(error).__name__}") from None

"""Api: the command line's HTTP client.

It is synchronous and uses only the standard library, so that commands start fast. It sends requests, decodes streams of events, and turns refusals
into sentences. Independent of terminals.
"""

import http.client
import json
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.wire.sse import Event, EventDecoder

JSON = "application/json"
DEFAULT_URL = "http://127.0.0.1:8787"
API_KEY_ENV = "PILOTLIGHT_API_KEY"


class Api:
    """A client for one server, given by its base URL."""

    def __init__(self, url: str, timeout_s: float = 600.0, key: str | None = None) -> None:
        """`key` defaults to the key in the environment."""
        self._key = os.environ.get(API_KEY_ENV, "") if key is None else key
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # raises UnicodeError, as the resolver would, if the host is invalid
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            raise CliError(f"{url!r} is not a URL like {DEFAULT_URL}.")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def probe(self, path: str) -> tuple[int, bytes] | None:
        """Send a GET request. Return its status and body, or None if the server cannot be reached."""
        try:
            with self._answer("GET", path) as answer:
                return answer.status, answer.read()
        except CliError:
            return None

    def get_json(self, path: str) -> Any:
        return self.send("GET", path, None, "")

    def get_text(self, path: str) -> str:
        """Return the text of a response that is not JSON. Raises CliError."""
        with self._answer("GET", path) as answer:
            return _accepted(answer).read().decode()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the JSON of each event.

        Raises CliError for a refusal, an error event or an interrupted stream."""
        with self._answer("POST", path, json.dumps(body).encode()) as answer:
            for event in _events(answer):
                if event.is_done:
                    return
                if event.data is not None:
                    message = json.loads(event.data)
                    if "error" in message:
                        raise CliError(_message_of(message))
                    yield message
        raise CliError("The stream was cut before its end.")

    def send(self, method: str, path: str, body: bytes | None, token: str, content_type: str = JSON) -> Any:
        """Send a request with the bearer token and return the response's JSON.
        Raises CliError for a refusal, or if the server cannot be reached."""
        with self._answer(method, path, body, token, content_type) as answer:
            return _json_of(answer)

    def follow(self, path: str, token: str) -> Iterator[dict[str, Any]]:
        """Yield the JSON of events until the server ends the stream."""
        with self._answer("GET", path, None, token) as answer:
            yield from (json.loads(event.data) for event in _events(answer) if event.data is not None)

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None = None, token: str = "", content_type: str = JSON
    ) -> Iterator[http.client.HTTPResponse]:
        """Open the scope of a request's response.

        Raises CliError if the server cannot be reached, or leaves meanwhile."""
        headers = {"content-type": content_type, "connection": "close"}
        if bearer := token or self._key:
            headers["authorization"] = f"Bearer {bearer}"
        try:
            connection = self._connection(self._host, self._port, timeout=self._timeout_s)
            with closing(connection):
                connection.request(method, path, body, headers)
                with connection.getresponse() as answer:
                    yield answer
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> CliError:
        if isinstance(error, ConnectionRefusedError):
            return CliError(
                f"Nothing answers at {self.url}: start it with `pilotlight up`, or name another with --url."
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return CliError(
                f"{self.url} has a certificate that is not trusted here ({error.verify_message}): if it is of `pilotlight network init`, set "
                "SSL_CERT_FILE to the network's authority.pem."
            )
        if isinstance(error, socket.gaierror):
            return CliError(f"{self.url} cannot be found ({error.strerror}): check its name.")
        return CliError(f"{self.url} broke off: {error or type(error).__name__}.")


def _events(answer: http.client.HTTPResponse) -> Iterator[Event]:
    decoder = EventDecoder()
    _accepted(answer)
    while chunk := answer.read1(65536):
        yield from decoder.feed(chunk)


def _accepted(answer: http.client.HTTPResponse) -> http.client.HTTPResponse:
    """Return the response. Raises CliError unless its status is 200."""
    if answer.status != 200:
        _json_of(answer)
    return answer


def _json_of(answer: http.client.HTTPResponse) -> Any:
    body = answer.read()
    try:
        parsed = json.loads(body)
    except ValueError:
        raise CliError(f"The server answered {answer.status} without JSON: is this a Pilotlight server?") from None
    if answer.status >= 400:
        hint = f" ({API_KEY_ENV} has the key that this command sends)" if answer.status == 401 else ""
        raise CliError(f"{_message_of(parsed)}{hint}")
    return parsed


def _message_of(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(body)

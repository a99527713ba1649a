"""The network's deployed functions: versions, shares of traffic, and the routes that change them.

Deployments are off without a deploy token or keys.

A function belongs permanently to the account that deployed it first, together with its stores, so no other account can deploy, read or follow it. The
deploy token and admin keys belong to the operator and give access to all functions.

A new version takes traffic only after the sites have started it and its health call has succeeded there. Of two simultaneous changes the later one is
refused: each names the revision that it was made for. A change is on the disk before it is answered. Sites fetch the deployments, and are notified of
changes: a change is answered when all sites serve it, or with the names of those that do not confirm in time.
"""

import asyncio
import hmac
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from msgspec.structs import asdict, replace
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.backends.site_sessions import connector
from pilotlight.edge_router.requests.function_hosts import FunctionHosts
from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.edge_router.services.bundles import BundleStore
from pilotlight.edge_router.services.function_homes import home_of, with_callers
from pilotlight.edge_router.services.function_logs import log_query, merged_logs
from pilotlight.edge_router.services.function_secrets import FunctionSecrets
from pilotlight.sites.config import ConfigError
from pilotlight.support import atomic_files
from pilotlight.wire.credentials import Access, Account, bearer_token
from pilotlight.wire.errors import ApiError, message_of
from pilotlight.wire.hop.bundles import BundleError
from pilotlight.wire.hop.deployments import (
    MAX_VERSIONS,
    PATH,
    SERVE_PATH,
    TAIL_PATH,
    TRY_PATH,
    Changed,
    Deployment,
    NewVersion,
    Removal,
    Rollback,
    Serve,
    Share,
    Tried,
    Try,
    Version,
    decode_deployments,
    encode,
)
from pilotlight.wire.hop.function_logs import LOGS_PATH, LoggedInvocation
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV, FOR_ROUTERS, HOP, REQUEST_ID, Hop, hop_is_genuine, sign_hop
from pilotlight.wire.hop.status import FunctionsStatus
from pilotlight.wire.http.asgi import read_body

MAX_BODY = 64 << 10
TRY_TIMEOUT_S = 360.0  # time for a site to try a version: it installs packages for up to 300 s, then calls the version
LOGS_TIMEOUT_S = 15.0
SERVE_TIMEOUT_S = 10.0  # time for a site to serve a version that it has tried: it may start a process
JSON = "application/json"
NO_STORE = {"cache-control": "no-store"}
RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class DeployGuard:
    """Authorizes authors by the deploy token or a key with the scope `deploy`, and sites by a signature."""

    token: str
    secret: str
    access: Access
    clocks: SiteClocks

    def author(self, request: Request) -> Account | None:
        """Return the account of a request; None for the operator. Raises ApiError."""
        authorization = request.headers.get("authorization")
        given = bearer_token(authorization)
        if self.token and hmac.compare_digest(given.encode(), self.token.encode()):
            return None
        if any(key.opens("deploy") for key in self.access.keys.values()):
            key = self.access.key(authorization, "deploy")
            return None if key.is_admin else key.account
        if not self.token:
            raise ApiError(
                "not_found",
                f"this router accepts no deployments; set {DEPLOY_TOKEN_ENV} where the router is started, or start `pilotlight up --functions`",
            )
        if given:
            sentence = (
                f"the deploy token is wrong; {DEPLOY_TOKEN_ENV} must have the value that the router was started with"
            )
            raise ApiError("forbidden", sentence)
        raise ApiError("forbidden", f"deploying needs the router's token; set {DEPLOY_TOKEN_ENV}")

    def author_or_site(self, request: Request) -> Account | None:
        """Return the account of a request; None for the operator or a site. Raises ApiError."""
        return None if self.is_from_site(request) else self.author(request)

    def is_from_site(self, request: Request) -> bool:
        signature, id = request.headers.get(HOP, ""), request.headers.get(REQUEST_ID, "")
        hop = Hop(request.method, request.url.path, id, FOR_ROUTERS, request.url.query)
        times_s = self.clocks.times_s()  # one for each site's clock, because the site does not send its name
        return bool(self.key) and any(hop_is_genuine(signature, self.key, now_s, hop) for now_s in times_s)

    def signed(self, method: str, path: str, site: str, body: bytes = b"") -> dict[str, str]:
        """Return headers with which a site recognises this router. The token itself is never sent."""
        hop = Hop(method, path, uuid.uuid4().hex, site)
        now_s = self.clocks.now_s(site)
        return {REQUEST_ID: hop.request_id, HOP: sign_hop(self.key, now_s, hop, body)} if self.key else {}

    @property
    def key(self) -> str:
        """Return the key that signs. A network without a secret, on one machine, signs with the token."""
        return self.secret or self.token


class Deployments:
    """The known deployments, in memory and in one file."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "deployments.json"
        self.known: dict[str, Deployment] = {}
        self.read()

    def read(self) -> None:
        """Read the file. Raises ConfigError."""
        if self._path.is_file():
            try:
                self.known = decode_deployments(self._path.read_bytes())
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{self._path} is damaged ({error}); restore it, or remove it and deploy again"
                ) from None

    def get(self, name: str, author: Account | None) -> Deployment:
        """Return a deployment; an empty one, not stored, for an unknown name.
        Raises ApiError for another account's function, or a new name that the account may not use."""
        deployment = self.known.get(name)
        if deployment is None:
            if author is not None:
                author.check_function(name)
            return Deployment(name, 0, account="" if author is None else author.name)
        if author is not None and author.name != deployment.account:
            raise ApiError("forbidden", f"the function {name} belongs to another account than {author.name}")
        return deployment

    def expected(self, name: str, revision: int, author: Account | None) -> Deployment:
        """Return the deployment to change.
        Raises ApiError if it has another revision, or belongs to another account."""
        deployment = self.get(name, author)
        if deployment.revision != revision:
            sentence = (
                f"{name} is at revision {deployment.revision} and not at {revision}: another deployment came first; "
                "read the present state and deploy again"
            )
            raise ApiError("conflict", sentence)
        return deployment

    def change(self, deployment: Deployment) -> None:
        """Apply and store a change. It has no await, so no other change comes after the check of its revision."""
        changed = with_callers({**self.known, deployment.name: deployment})
        atomic_files.write(self._path, encode(list(changed.values())))
        self.known = changed


def may_see(author: Account | None, deployment: Deployment) -> bool:
    return author is None or author.name == deployment.account


def with_version(deployment: Deployment, new: Version, percent: float) -> Deployment:
    """Return the deployment with the new version's share; at most one other version gets the rest."""
    others = [share for share in deployment.shares if share.number != new.number]
    total = sum(share.percent for share in others)
    shares = [Share(new.number, 100.0 if not others else percent)]
    if others and percent < 100:
        # Only the other version with the most traffic is kept, because a third version would make a rollback ambiguous.
        stable = max(others, key=lambda share: share.percent)
        assert total > 0
        shares.append(Share(stable.number, 100.0 - percent))
    versions = [version for version in deployment.versions if version.number != new.number]
    used = {share.number for share in shares}
    versions = [version for version in versions if version.number in used] + versions[-MAX_VERSIONS:]
    kept = sorted({version.number: version for version in [*versions, new]}.values(), key=lambda v: v.number)
    return replace(deployment, revision=deployment.revision + 1, versions=tuple(kept), shares=tuple(shares))


def rolled_back(deployment: Deployment, number: int | None) -> Deployment:
    """Return the deployment with an earlier version. Raises ApiError if there is no such version."""
    if number is None:
        number = deployment.shares[1].number if len(deployment.shares) > 1 else _before(deployment)
    if deployment.versions and not deployment.shares and not number:
        newest = deployment.versions[-1].number
        sentence = f"{deployment.name} was deleted, so there is no previous version: use --version {newest}, its newest, or an earlier one"
        raise ApiError("not_found", sentence)
    if deployment.version(number) is None:
        known = ", ".join(str(version.number) for version in deployment.versions) or "none"
        raise ApiError("not_found", f"{deployment.name} has no version {number or 'before this one'}; it has {known}")
    return replace(deployment, revision=deployment.revision + 1, shares=(Share(number, 100.0),))


def _before(deployment: Deployment) -> int:
    """Return the number of the previous version; 0 without an earlier version.
    It may not be the next lower number, because that one may have been rolled back."""
    current = deployment.version(deployment.shares[0].number) if deployment.shares else None
    if current is None:
        return 0
    if current.replaced is not None:
        return current.replaced
    return max((version.number for version in deployment.versions if version.number < current.number), default=0)


class DeploymentApi:
    def __init__(
        self,
        backends: Mapping[str, Backend],
        guard: DeployGuard,
        places: DataPlaces,
        hosts: FunctionHosts,
        directory: Path,
        tls: ssl.SSLContext | None = None,
        on_change: Callable[[], None] = lambda: None,
        is_limited: Callable[[str], bool] = lambda account: False,
        serve_timeout_s: float = SERVE_TIMEOUT_S,
    ) -> None:
        """`is_limited` tells whether an account has limits, which its functions must not pass by."""
        self._backends = backends
        self._places = places
        self._hosts = hosts
        self._guard = guard
        self._tls = tls
        self._on_change = on_change
        self._is_limited = is_limited
        self._serve_timeout_s = serve_timeout_s
        self._deployments = Deployments(directory)
        hosts.serve(self._deployments.known)
        self._bundles = BundleStore(directory / "bundles")
        self._secrets = FunctionSecrets(directory, guard.key)

    def read_again(self) -> None:
        """Apply deployments by another worker, and their hosts."""
        self._deployments.read()
        self._hosts.serve(self._deployments.known)

    def routes(self) -> list[BaseRoute]:
        return [
            Route(PATH, self.all, methods=["GET"]),
            Route(PATH + "/bundles/{digest}", self.bundle, methods=["GET", "PUT"]),
            Route(PATH + "/{name}", self.one, methods=["GET", "POST"]),
            Route(PATH + "/{name}", self.remove, methods=["DELETE"]),
            Route(PATH + "/{name}/rollback", self.rollback, methods=["POST"]),
            Route(PATH + "/{name}/tail", self.tail, methods=["GET"]),
            Route(PATH + "/{name}/logs", self.logs, methods=["GET"]),
            Route(PATH + "/{name}/secrets", self.secrets, methods=["GET"]),
            Route(PATH + "/{name}/secrets/{secret}", self.secret, methods=["PUT", "DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        author = self._guard.author_or_site(request)
        seen = [deployment for deployment in self._deployments.known.values() if may_see(author, deployment)]
        found = [replace(each, is_limited=self._is_limited(each.account)) for each in seen]
        return Response(encode(found), media_type=JSON)

    async def bundle(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        if request.method == "PUT":
            self._guard.author(request)
            if not self._bundles.renew(digest):
                try:
                    await self._bundles.put(digest, request.stream())
                except BundleError as error:
                    raise ApiError("invalid_request", str(error)) from None
            return Response(encode({"digest": digest}), 201, media_type=JSON)
        author = self._guard.author_or_site(request)
        is_theirs = author is None or any(
            version.digest == digest
            for deployment in self._deployments.known.values()
            if may_see(author, deployment)
            for version in deployment.versions
        )
        data = await self._bundles.get(digest) if is_theirs else None
        if data is None:
            raise ApiError("not_found", f"there is no bundle {digest[:64]}")
        return Response(data, media_type="application/x-tar")

    async def one(self, request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "GET":
            author = self._guard.author_or_site(request)
            return Response(encode(self._deployments.get(name, author)), media_type=JSON)
        author = self._guard.author(request)
        new = await _parsed(request, NewVersion)
        _named(name)
        deployment = self._deployments.expected(name, new.expected_revision, author)
        if not self._bundles.renew(new.digest):
            raise ApiError("invalid_request", f"there is no bundle {new.digest}; upload it first")
        self._hosts.check(name, new.routes, author, deployment.account)
        number = max((version.number for version in deployment.versions), default=0) + 1
        stable = max(deployment.shares, key=lambda share: share.percent, default=None)
        replaced = 0 if stable is None else stable.number
        version = Version(
            number,
            new.digest,
            time.time(),
            new.message,
            new.environment,
            new.health_path,
            replaced,
            new.services,
            new.routes,
            new.has_subdomain,
        )
        home = home_of(deployment, new, self._deployments.known, self._homes(deployment.account))
        moves = await self._try_everywhere(replace(deployment, home=home), version)
        if moves and deployment.shares and new.percent < 100:
            sentence = (
                f"the migration {moves[0]} of version {version.number} of {name} renames or deletes classes of Durable Objects, which affects "
                "all clients at once: deploy it without --percent"
            )
            raise ApiError("invalid_request", sentence)
        before = replace(self._deployments.expected(name, new.expected_revision, author), home=home)
        changed = with_version(before, version, new.percent)
        self._hosts.check(name, new.routes, author, before.account)
        self._change(changed)
        self._forget_bundles()
        return await self._served_everywhere(changed, 201)

    async def rollback(self, request: Request) -> Response:
        author = self._guard.author(request)
        wanted = await _parsed(request, Rollback)
        name = request.path_params["name"]
        deployment = self._deployments.expected(name, wanted.expected_revision, author)
        changed = rolled_back(deployment, wanted.number)
        await self._check_fits(changed)
        self._deployments.expected(name, wanted.expected_revision, author)
        version = changed.version(changed.shares[0].number)
        assert version is not None
        self._hosts.check(name, version.routes, author, changed.account)
        self._change(changed)
        return await self._served_everywhere(changed, 200)

    async def remove(self, request: Request) -> Response:
        """Stop serving a function everywhere. A rollback restores one of its versions."""
        author = self._guard.author(request)
        wanted = await _parsed(request, Removal)
        name = request.path_params["name"]
        deployment = self._deployments.expected(name, wanted.expected_revision, author)
        if not deployment.shares:
            raise ApiError("not_found", f"no function named {name[:64]!r} is deployed")
        changed = replace(deployment, revision=deployment.revision + 1, shares=())
        self._change(changed)
        return await self._served_everywhere(changed, 200)

    async def tail(self, request: Request) -> Response:
        """Stream what the function prints at every site, as events, until the reader disconnects."""
        name = self._readable(request)
        return StreamingResponse(self.lines(name), media_type="text/event-stream", headers=NO_STORE)

    async def logs(self, request: Request) -> Response:
        """Return the invocations that were kept at every site that can be asked now."""
        found = await self.invocations(self._readable(request), request.query_params)
        return Response(found, media_type=JSON, headers=NO_STORE)

    async def secrets(self, request: Request) -> Response:
        """Return the names of a function's secrets to its author, and the encrypted values to sites."""
        name = _named(request.path_params["name"])
        if self._guard.is_from_site(request):
            return Response(encode(self._secrets.of(name)), media_type=JSON)
        self._deployments.get(name, self._guard.author(request))
        return Response(encode(sorted(self._secrets.of(name))), media_type=JSON)

    async def secret(self, request: Request) -> Response:
        """Store or delete a secret; the function's sites then fetch it."""
        author = self._guard.author(request)
        name, secret = _named(request.path_params["name"]), request.path_params["secret"]
        body = await read_body(request.scope, request.receive, MAX_BODY)
        deployment = self._deployments.get(name, author)
        if request.method == "DELETE":
            word = self._secrets.delete(name, secret)
        else:
            try:
                word = self._secrets.put(name, secret, body.decode())
            except UnicodeDecodeError:
                raise ApiError("invalid_request", "a secret is text in UTF-8") from None
        changed = replace(deployment, secrets=word)
        self._change(changed)
        return await self._served_everywhere(changed, 200)

    def _readable(self, request: Request) -> str:
        """Return the name if the author may read the function's output.

        A function of a site's own file belongs to the operator. Raises ApiError.
        """
        author, name = self._guard.author(request), _named(request.path_params["name"])
        self._deployments.get(name, author)
        if author is not None and name not in self._deployments.known:
            raise ApiError("not_found", f"no function named {name} is deployed")
        return name

    def versions(self, *, is_admin: bool) -> bytes:
        """Return the deployments as JSON; for admins with their accounts and the names of their secrets."""
        return encode([self._described(each, is_admin) for each in self._deployments.known.values()])

    def _described(self, deployment: Deployment, is_admin: bool) -> dict[str, Any]:
        found = {name: getattr(deployment, name) for name in ("name", "revision", "versions", "shares", "home")}
        private = {"account": deployment.account, "secret_names": sorted(self._secrets.of(deployment.name))}
        return found | private if is_admin else found

    async def invocations(self, name: str, asked: QueryParams) -> bytes:
        """Return the kept invocations of a function at the sites that can be asked now, as JSON.

        Raises ApiError."""
        query, after = log_query(_named(name), asked)

        def body(site: Backend) -> bytes:
            return encode(replace(query, after=after.get(site.name, 0)))

        sites = self._followed(query.function)
        answers = await self._ask(sites, LOGS_PATH, body, list[LoggedInvocation], LOGS_TIMEOUT_S)
        return encode(merged_logs(answers, query, after))

    def lines(self, name: str) -> AsyncGenerator[bytes, None]:
        """Iterate over a function's output at the reachable sites. Raises ApiError."""
        return self._lines(_named(name), self._followed(name))

    def _followed(self, name: str) -> list[Backend]:
        """Return the healthy sites at which the function may have run."""
        home = "" if (deployment := self._deployments.known.get(name)) is None else deployment.home
        healthy = [backend for backend in self._backends.values() if _functions_of(backend) is not None]
        return [backend for backend in healthy if home in ("", backend.name)]

    async def _lines(self, name: str, sites: list[Backend]) -> AsyncGenerator[bytes, None]:
        queue: asyncio.Queue[bytes] = asyncio.Queue(100)

        async def follow(session: aiohttp.ClientSession, backend: Backend) -> None:
            path = f"{TAIL_PATH}/{name}"
            try:
                async with session.get(
                    backend.url + path, headers=self._guard.signed("GET", path, backend.name)
                ) as answer:
                    async for line in answer.content:
                        if line.startswith(b"data:"):
                            await queue.put(line.rstrip() + b"\n\n")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                sentence = {"site": backend.name, "line": f"the site cannot be followed: {error}"}
                await queue.put(b"data: " + msgspec.json.encode(sentence) + b"\n\n")

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector(self._tls)) as session:
            tasks = [asyncio.create_task(follow(session, backend)) for backend in sites]
            try:
                yield b": following\n\n"
                while True:
                    yield await queue.get()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_fits(self, deployment: Deployment) -> None:
        """Raise ApiError if a site reports that a version must not get traffic again.

        That is so if classes of its objects were renamed or deleted since. A version that fails, or a site that does not answer in time, does not
        prevent a rollback.
        """
        version = deployment.version(deployment.shares[0].number)
        assert version is not None
        body = self._try(deployment, version)
        for site, tried in (await self._ask_sites(deployment.home, TRY_PATH, body, self._serve_timeout_s)).items():
            if tried.misfits:
                raise ApiError("unhealthy_version", f"nothing was changed: at {site} {tried.detail}")

    def _try(self, deployment: Deployment, version: Version) -> bytes:
        return encode(Try(deployment.name, version, deployment.account, self._is_limited(deployment.account)))

    async def _try_everywhere(self, deployment: Deployment, version: Version) -> list[str]:
        """Try a version at all sites where it runs; return the migrations that it will carry out.
        Raises ApiError unless each of these sites that can be asked has started the version and found it healthy."""
        name, home = deployment.name, deployment.home
        results = await self._ask_sites(home, TRY_PATH, self._try(deployment, version), TRY_TIMEOUT_S)
        if not results and home:
            sentence = (
                f"{name} runs only at {home}, because its data is there, and that site is not healthy or accepts no deployed functions; "
                "use --home to name another site, where it starts without its data"
            )
            raise ApiError("no_site_available", sentence)
        if not results:
            sentence = "no healthy site of this network accepts deployed functions; set functions.deployments in a site's file to the router's URL"
            raise ApiError("no_site_available", sentence)
        for site, tried in results.items():
            if not tried.healthy:
                sentence = f"version {version.number} of {name} takes no traffic: at {site} {tried.detail}"
                raise ApiError("unhealthy_version", sentence)
        return sorted({tag for tried in results.values() for tag in tried.moves})

    async def _served_everywhere(self, changed: Deployment, status: int) -> Response:
        """Notify all sites; respond with the names of those that do not confirm.
        Sites that do not run the function redirect callers, so they need the change, too."""
        results = await self._ask_sites(
            "", SERVE_PATH, encode(Serve(changed.name, changed.revision)), self._serve_timeout_s
        )
        unconfirmed = {}
        for site, tried in results.items():
            if not tried.healthy:
                unconfirmed[site] = tried.detail
            elif changed.shares and changed.runs_at(site):
                self._backends[site].published.serves(changed.name)
        made = Changed(**asdict(changed), unconfirmed=unconfirmed, addresses=self._hosts.addresses(changed))
        return Response(encode(made), status, media_type=JSON)

    def _change(self, deployment: Deployment) -> None:
        self._deployments.change(deployment)
        self._hosts.serve(self._deployments.known)
        self._on_change()

    def _sites(self, home: str = "") -> list[Backend]:
        """Return the healthy sites that accept deployed functions; with `home`, only that one."""
        taking = [
            site for site in self._backends.values() if (has := _functions_of(site)) is not None and has.takes_deployed
        ]
        return [site for site in taking if home in ("", site.name)]

    def _homes(self, account: str) -> list[str]:
        """Return the sites where an account's function may keep its data."""
        allowed = self._places.of(account, None, None)
        return [site.name for site in self._sites() if allowed is None or site.name in allowed.names]

    async def _ask_sites(self, home: str, path: str, body: bytes, timeout_s: float) -> dict[str, Tried]:
        """Return the answers of the healthy sites that accept deployed functions, by name."""
        answers = await self._ask(self._sites(home), path, lambda _: body, Tried, timeout_s)
        return {site: Tried(False, answer) if isinstance(answer, str) else answer for site, answer in answers.items()}

    async def _ask(
        self, sites: list[Backend], path: str, body: Callable[[Backend], bytes], kind: type[AnswerT], timeout_s: float
    ) -> dict[str, AnswerT | str]:
        """Ask sites at the same time; return their answers by site.
        A string is the reason why a site gave none."""

        async def ask(site: Backend) -> AnswerT | str:
            try:
                headers = self._guard.signed("POST", path, site.name, data := body(site))
                async with session.post(site.url + path, data=data, headers=headers) as answer:
                    said = await answer.read()
                    if answer.status != 200:
                        return f"the site refused it: {message_of(said)}"
                    return msgspec.json.decode(said, type=kind)
            except TimeoutError:
                return f"no answer within {timeout_s:g} s"
            except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
                return f"it could not be reached: {error}"

        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector(self._tls)) as session:
            answers = await asyncio.gather(*map(ask, sites))
        return {site.name: answer for site, answer in zip(sites, answers, strict=True)}

    def _forget_bundles(self) -> None:
        known = self._deployments.known.values()
        self._bundles.forget({version.digest for deployment in known for version in deployment.versions})


async def _parsed(request: Request, kind: type[RequestT]) -> RequestT:
    body = await read_body(request.scope, request.receive, MAX_BODY)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError("invalid_request", str(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError("malformed_json", f"the body is not valid JSON: {error}") from None


def _named(name: str) -> str:
    try:
        return msgspec.convert({"name": name, "revision": 0}, Deployment).name
    except msgspec.ValidationError:
        raise ApiError(
            "invalid_request", f"{name[:64]!r} is not a function's name: use a-z, 0-9, - and _, at most 63 characters"
        ) from None


def _functions_of(backend: Backend) -> FunctionsStatus | None:
    """Return the status of functions at a healthy site; None if it has none or is not healthy."""
    return backend.status.functions if backend.state == "healthy" and backend.status is not None else None

"""`pilotlight logs`: print a function's stored invocations from all sites, once or continuously."""

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from pilotlight.functions.cli.deploy import author_token
from pilotlight.functions.cli.state import moment_of
from pilotlight.runtime.cli.api import Api
from pilotlight.wire.hop.deployments import PATH

FOLLOW_S = 1.0


def logs(
    api: Api,
    name: str,
    *,
    since: str | None,
    grep: str,
    status: str | None,
    limit: int,
    follow: bool,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print invocations, oldest first; with `follow`, keep printing new ones until Ctrl-C."""
    asked: dict[str, Any] = {"limit": limit, "grep": grep}
    if since is not None:
        asked["since_s"] = moment_of(since)
    if status is not None:
        asked["status"] = status
    after: dict[str, int] = {}
    warned: set[str] = set()
    token = author_token(api)
    try:
        while True:
            pairs = [*asked.items(), *(("after", f"{site}:{seq}") for site, seq in after.items() if seq)]
            found = api.send("GET", f"{PATH}/{quote(name, safe='')}/logs?{urlencode(pairs)}", None, token)
            for site, why in found["unread"].items():
                if site not in warned:
                    print(f"{site} could not be reached: {why}", file=sys.stderr)
                warned.add(site)
            for invocation in found["invocations"]:
                print(json.dumps(invocation) if as_json else shown(invocation), flush=True)
            if not follow:
                if not found["invocations"]:
                    print(f"no site has stored invocations of {name} that match", file=sys.stderr)
                return
            after = found["after"]
            sleep(FOLLOW_S)
    except KeyboardInterrupt:
        sys.exit(130)


def shown(invocation: dict[str, Any]) -> str:
    """Format an invocation: a line for itself, then its output and its exception, indented."""
    at = datetime.fromtimestamp(invocation["at_s"]).isoformat(" ", "milliseconds")
    status = "" if invocation["status"] is None else f" {invocation['status']}"
    version = f"  {invocation['version']}" if invocation["version"] else ""
    head = f"{at}  {invocation['site']}  {invocation['trigger']} {invocation['what']}"
    if invocation["trigger"] != "process":
        times = f"{invocation['wall_ms']:.1f} ms, CPU {invocation['cpu_ms']:.1f} ms"
        head += f" ->{status} {invocation['outcome']}  {times}{version}"
    lines = [f"  {text}" for _, _, text in invocation["lines"]]
    failed = (invocation["detail"] or invocation["error"]).rstrip().splitlines()
    return "\n".join([head, *lines, *(f"  {line}" for line in failed)])

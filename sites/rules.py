"""Rules for single values of configuration files, beyond their types.

Each raises ValueError with a sentence that names the change to make.
"""

import re
from ipaddress import ip_address, ip_network

from msgspec import UNSET, UnsetType


def is_a_device(device: str | UnsetType) -> None:
    if device is not UNSET and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"{device!r} is not a device: use auto, cpu, cuda or cuda:N")


def can_stand_together(devices: tuple[str | tuple[str, ...], ...] | None) -> None:
    if devices is None:
        return
    groups = [(group,) if isinstance(group, str) else group for group in devices]
    named = [device for group in groups for device in group]
    for device in named:
        if not re.fullmatch(r"cpu|cuda:\d+|ray:cpu|ray:cuda", device):
            raise ValueError(
                f"{device!r} does not name one device: use cpu or cuda:N, or ray:cpu or ray:cuda for a device that Ray finds on another machine"
            )
        if device.startswith("cuda:") and named.count(device) > 1:
            raise ValueError(f"{device!r} is named twice, but a GPU belongs to one engine host: name each GPU once")
    if odd := [group[0] for group in groups if group[0].startswith("ray:")]:
        raise ValueError(
            f"{odd[0]!r} comes first in its brackets, but engine hosts run on the site's own machine: put one of its devices first"
        )
    if len({device.removeprefix("ray:").partition(":")[0] for device in named}) > 1:
        raise ValueError(
            "the layout of weights in host memory differs between CPUs and GPUs: name CPUs only or GPUs only"
        )


def is_a_speculation(words: str) -> None:
    names = words.split(",")
    for name in names:
        if words not in ("auto", "off") and not re.fullmatch("suffix|grammar|mtp|(draft|eagle3):.+", name):
            raise ValueError(
                f"{name!r} is not a drafter: use auto, off, or a comma-separated list of suffix, grammar, and at most one of draft:DIRECTORY, "
                "eagle3:DIRECTORY, mtp"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"{words!r} names a drafter twice")
    if len(set(names) - {"suffix", "grammar"}) > 1:
        raise ValueError(f"{words!r} names several drafters with weights, but only one can be loaded")


def is_http(url: str | None) -> None:
    if url is not None and not _is_at_server(url, "/?"):
        raise ValueError("must be http(s)://host[:port] without a path")


def is_http_place(url: str) -> None:
    """Raise ValueError unless `url` is an HTTP URL of a server, with or without a path."""
    if not _is_at_server(url, r"(?:/[^\s?#]*)?"):
        raise ValueError("must be http(s)://host[:port], with or without a path")


def _is_at_server(url: str, path: str) -> bool:
    found = re.fullmatch(rf"(?i:https?)://(?:[^\s/?#@:\[\]]+|\[[0-9a-fA-F:.]+\])(?::(\d{{1,5}}))?{path}", url)
    return found is not None and 0 < int(found[1] or 80) < 65536


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def are_host_names(hosts: tuple[str, ...]) -> None:
    for host in hosts:
        if not (re.fullmatch(r"[a-zA-Z0-9._-]+", host) or _is_address(host)):
            raise ValueError(f"{host!r} is not a host name: write app.example.com, without a scheme or a port")


def are_origins(origins: tuple[str, ...]) -> None:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,*]+", origin):
            raise ValueError(f"{origin!r} is not an origin: write https://app.example.com, without a path")


def are_networks(networks: tuple[str, ...]) -> None:
    for network in networks:
        try:
            ip_network(network)
        except ValueError as error:
            raise ValueError(f"{error}; write 10.1.0.0/16 or 2001:db8::/32") from None


def refuse_twice(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"the {what} {name!r} is used twice")
        seen.add(name)

"""`pilotlight manage`: names, options and help. The work is in manage.py, imported when it runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from pilotlight.runtime.cli.api import DEFAULT_URL, Api

if TYPE_CHECKING:
    from pilotlight.runtime.cli.manage.manage import Manager

manage = typer.Typer(
    help="Models, sites and keys of a running network, by the API that its page uses. Needs a key with the scope admin, where keys are required.",
    no_args_is_help=True,
)
UrlOption = Annotated[str, typer.Option("--url", envvar="PILOTLIGHT_URL", help="URL of a router or site.")]
SiteOption = Annotated[str | None, typer.Option("--site", help="Name of the site; not needed where there is only one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelArgument = Annotated[str, typer.Argument(help="Name of a model that the site serves.")]
SourceArgument = Annotated[str, typer.Argument(help="A source in the catalogue, or one that `serve` accepts.")]
SiteArgument = Annotated[str, typer.Argument(help="Name of the site.")]


def _manager(url: str) -> "Manager":
    from pilotlight.runtime.cli.manage.manage import Manager

    return Manager(Api(url))


@manage.command("catalogue")
def catalogue(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """List the models that each site serves or could serve, and whether they fit there."""
    _manager(url).print_catalogue(as_json)


@manage.command("search")
def search(
    words: Annotated[str, typer.Argument(help="Words of a model's name, such as an organisation or a family.")],
    site: SiteOption = None,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Search the Hugging Face hub from a site's machine."""
    _manager(url).search(words, site, as_json)


@manage.command("pull")
def pull(source: SourceArgument, site: SiteOption = None, url: UrlOption = DEFAULT_URL) -> None:
    """Download a model to a site, and show how far it is."""
    _manager(url).pull(source, site)


@manage.command("run")
def run(
    source: SourceArgument,
    site: SiteOption = None,
    name: Annotated[str, typer.Option(help="Name that requests use; by default the last part of the source.")] = "",
    residency: Annotated[str, typer.Option(help="Where its weights sleep: auto, host (memory) or disk.")] = "auto",
    lossless: Annotated[str, typer.Option(help="Keep bf16 weights in 12 bits: auto, off or always.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Type of the KV cache: auto or fp8.")] = "auto",
    context: Annotated[int | None, typer.Option(min=16, help="Maximum tokens of a prompt and its answer.")] = None,
    sleep_after_s: Annotated[float | None, typer.Option(help="Time without use after which the model sleeps.")] = None,
    max_devices: Annotated[int | None, typer.Option(min=1, help="Maximum devices that serve it at once.")] = None,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Add a model to a site. The site serves it after a restart too."""
    options = {"residency": residency, "lossless": lossless, "kv_dtype": kv_dtype}
    more = {"context_tokens": context, "sleep_after_s": sleep_after_s, "max_devices": max_devices}
    given = {key: value for key, value in more.items() if value is not None}
    _manager(url).run(site, {"source": source, "model": name, **options, **given})


@manage.command("remove")
def remove(model: ModelArgument, site: SiteOption = None, url: UrlOption = DEFAULT_URL) -> None:
    """Stop serving a model that was added; its files stay."""
    _manager(url).change(site, "remove", model)


@manage.command("wake")
def wake(model: ModelArgument, site: SiteOption = None, url: UrlOption = DEFAULT_URL) -> None:
    """Load a model's weights before its next request."""
    _manager(url).change(site, "wake", model)


@manage.command("sleep")
def sleep(model: ModelArgument, site: SiteOption = None, url: UrlOption = DEFAULT_URL) -> None:
    """Unload a model's weights from its devices."""
    _manager(url).change(site, "sleep", model)


@manage.command("drain")
def drain(site: SiteArgument, url: UrlOption = DEFAULT_URL) -> None:
    """Drain a site until `resume`: send it no further requests; open ones finish."""
    _manager(url).change(site, "drain")


@manage.command("resume")
def resume(site: SiteArgument, url: UrlOption = DEFAULT_URL) -> None:
    """Send requests to a drained site again."""
    _manager(url).change(site, "resume")


@manage.command("create-key")
def create_key(
    name: Annotated[str, typer.Argument(help="Name of the key, shown in usage and logs.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="models (the default), deploy, metrics, admin. Repeatable.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Account of the key; by default one with the key's name.")] = None,
    expires_days: Annotated[float | None, typer.Option(help="Days until the key expires.")] = None,
    requests_per_min: Annotated[float | None, typer.Option(help="Limit of a new account.")] = None,
    tokens_per_min: Annotated[float | None, typer.Option(help="Limit of a new account.")] = None,
    tokens_per_day: Annotated[int | None, typer.Option(help="Limit of a new account.")] = None,
    cost_per_day: Annotated[float | None, typer.Option(help="Limit of a new account.")] = None,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Make a key that is valid at once, and print it. It is shown only now."""
    fields = {
        "account": account, "expires_days": expires_days, "requests_per_min": requests_per_min,
        "tokens_per_min": tokens_per_min, "tokens_per_day": tokens_per_day, "cost_per_day": cost_per_day,
    }  # fmt: skip
    given = {key: value for key, value in fields.items() if value is not None}
    _manager(url).create_key({"name": name, "scopes": scope or ["models"], **given})


@manage.command("revoke-key")
def revoke_key(name: Annotated[str, typer.Argument(help="Name of the key.")], url: UrlOption = DEFAULT_URL) -> None:
    """Revoke a key that `create-key` or the page has made. It is refused at once."""
    _manager(url).revoke_key(name)


@manage.command("join-line")
def join_line(
    minutes: Annotated[float, typer.Option(min=1, max=1440, help="Time in which the token can be used, once.")] = 60.0,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Print a command line with which one more machine joins the network."""
    _manager(url).print_join_line(minutes)


@manage.command("stores")
def stores(url: UrlOption = DEFAULT_URL) -> None:
    """List the D1 databases and KV namespaces of functions."""
    _manager(url).print_stores()


@manage.command("read")
def read(
    kind: Annotated[str, typer.Argument(help="d1 or kv.")],
    name: Annotated[str, typer.Argument(help="Name of the store, as `stores` prints it.")],
    site: SiteOption = None,
    table: Annotated[str, typer.Option(help="A table of the database; by default its first.")] = "",
    prefix: Annotated[str, typer.Option(help="Beginning of the keys of a namespace.")] = "",
    after: Annotated[str, typer.Option(help="Where to continue, as the previous page printed it.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="Rows.")] = 50,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Print a page of a database's table, or of the keys in a namespace."""
    query = {"kind": kind, "name": name, "table": table, "prefix": prefix, "after": after, "limit": limit}
    _manager(url).print_page(site, query, as_json)

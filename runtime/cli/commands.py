"""The `pilotlight` command: names, options and help.

The module that does a command's work is imported when the command runs."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pilotlight.functions.cli import analytics_command, d1_commands, exports, state
from pilotlight.runtime.cli.api import API_KEY_ENV, DEFAULT_URL, Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.keys.key_commands import keys
from pilotlight.runtime.cli.manage.manage_commands import manage
from pilotlight.runtime.cli.models.adapter_commands import adapters
from pilotlight.runtime.cli.network.network_commands import network as network_commands
from pilotlight.sites.config import SERVER_ENV, ConfigError
from pilotlight.sites.network import NETWORK_FILE
from pilotlight.sites.site import LOCAL
from pilotlight.support.disk_errors import is_disk_full

app = typer.Typer(
    help="Serverless LLM inference for a network of sites.",
    invoke_without_command=True,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


UrlOption = Annotated[
    str, typer.Option("--url", envvar="PILOTLIGHT_URL", help="URL of a router, or of a site without one.")
]
OpenOption = Annotated[
    bool, typer.Option("--open-to-all", help="Serve every client without a key, also from other machines.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
INFERENCE, FUNCTIONS, OPERATIONS = "Inference", "Functions", "Operations"  # headings of --help

app.add_typer(keys, name="keys", rich_help_panel=OPERATIONS)
app.add_typer(network_commands, name="network", rich_help_panel=OPERATIONS)
app.add_typer(manage, name="manage", rich_help_panel=OPERATIONS)
app.add_typer(adapters, name="adapters", rich_help_panel=INFERENCE)
for name, commands in (
    ("secret", state.secret),
    ("kv", state.kv),
    ("d1", d1_commands.d1),
    ("r2", exports.r2),
    ("queues", state.queues),
    ("analytics", analytics_command.analytics),
):
    app.add_typer(commands, name=name, rich_help_panel=FUNCTIONS)


@app.callback()
def pilotlight(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"pilotlight {installed('pilotlight-inference')}")
        raise typer.Exit


ServerOption = Annotated[
    str | None,
    typer.Option("--server", help="HTTP server: own or hypercorn; overrides door.server of the files."),
]


@app.command(rich_help_panel=OPERATIONS)
def up(
    network: Annotated[Path, typer.Option(help="The router's file.")] = NETWORK_FILE,
    sites: Annotated[Path, typer.Option(help="A folder with one NAME.toml per site of the network.")] = LOCAL,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The router's port; overrides the file's.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the logs of the processes.")] = False,
    server: ServerOption = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Model that all sites serve instead of those in their files; a value as for `serve`."),
    ] = None,
    functions: Annotated[
        bool, typer.Option("--functions", help="Serve functions that `pilotlight deploy` uploads from this machine.")
    ] = False,
) -> None:
    """Start a router and its sites on this machine; Ctrl-C stops them all."""
    from pilotlight.runtime.cli.up import up as run

    _serve_by(server)
    run(network, sites, port, verbose, open_page=open_page, model=model, functions=functions)


@app.command(rich_help_panel=OPERATIONS)
def site(
    file: Annotated[Path, typer.Argument(help="A site file, such as sites/local/ams1.toml.")],
    server: ServerOption = None,
) -> None:
    """Run one site: its HTTP server and its engine."""
    _serve_by(server)
    _become("pilotlight.runtime", str(file))


@app.command(rich_help_panel=OPERATIONS)
def router(
    file: Annotated[Path, typer.Argument(help="A router's file, such as sites/network.toml.")] = NETWORK_FILE,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; overrides the file's.")] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that share the port; each uses up to one core.")
    ] = 1,
    server: ServerOption = None,
) -> None:
    """Run an edge router."""
    _serve_by(server)
    given = {"--port": port, "--workers": workers if workers > 1 else None}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    _become("pilotlight.edge_router", str(file), *options)


@app.command(rich_help_panel=OPERATIONS)
def store(
    address: Annotated[str, typer.Option(help="HOST:PORT where Mooncake's master listens.")] = "127.0.0.1:50051",
    gib: Annotated[float, typer.Option(min=0.01, help="Memory for KV blocks of all models, in GiB.")] = 4.0,
) -> None:
    """Run a store of KV blocks for all sites that name it; its blocks survive their restarts."""
    _become("pilotlight.engine.kv.store.store_node", "--address", address, "--gib", str(gib))


def _serve_by(server: str | None) -> None:
    """Set the HTTP server of this process and its children."""
    if server is not None:
        os.environ[SERVER_ENV] = server


@app.command(rich_help_panel=INFERENCE)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's directory, a GGUF file, the URL of a packed model, a Hugging Face id, or smollm2 or ember, which need no download."
        ),
    ],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", "--served-model-name", help="Name of the model in requests; by default the last part of its path."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of one operation; by default PyTorch's choice.")
    ] = None,
    kv_gib: Annotated[
        float | None,
        typer.Option(help="KV cache of each device, in GiB; by default 1 on a CPU and the free memory of a GPU."),
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            help="Format of the model's tool calls, such as hermes; by default detected from its chat template."
        ),
    ] = None,
    prefill: Annotated[
        int, typer.Option(min=0, help="Number of engine hosts that compute prompts for the others (with --decode).")
    ] = 0,
    decode: Annotated[
        int, typer.Option(min=0, help="Number of engine hosts that generate answers (with --prefill).")
    ] = 0,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=16, help="Maximum tokens of a prompt and its answer together; by default the model's."),
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            min=1, help="Tensor parallelism: number of devices (on a CPU, processes) that share every matrix."
        ),
    ] = 1,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIRECTORY", help="A low-rank adapter, requested as MODEL:NAME. Repeatable."),
    ] = None,
    lossless: Annotated[
        str,
        typer.Option(
            help="Keep bf16 weights in 12 bits, with the same answers: auto (on a CPU, if faster), off, always."
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache: auto (as the model computes) or fp8 (half the bytes of bf16).")
    ] = "auto",
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallelism: number of stages, of --tp devices each.")] = 1,
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel",
            help="Give each device of --tp or --dp whole experts, instead of a part of every expert.",
        ),
    ] = False,
    redundant_experts: Annotated[
        int, typer.Option(min=0, help="With --expert-parallel: number of extra copies of each layer's busiest experts.")
    ] = 0,
    dp: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --expert-parallel: number of copies of the attention, each on --tp devices, with its own sequences and KV cache.",
        ),
    ] = 1,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding, with the same answers: auto, off, or drafters (suffix,grammar,draft:DIR)."
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Use devices of a Ray cluster for --tp and --pp: its HOST:PORT, or auto for the cluster of this machine.",
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY_ENV, help="Serve only clients with this key.", show_envvar=True)
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Serve only clients with a key of this file (`pilotlight keys create`).")
    ] = None,
    open_to_all: OpenOption = False,
) -> None:
    """Serve one model from one site, without a router."""
    from pilotlight.runtime.cli.serve_command import Clients, Served
    from pilotlight.runtime.cli.serve_command import serve as run
    from pilotlight.runtime.serve import run as run_site

    clients = Clients(api_key, keys, open_to_all)
    if bool(prefill) != bool(decode):
        raise CliError("--prefill and --decode belong together: use both, or neither.")
    served = Served(
        model,
        host,
        port,
        name=name,
        dtype=dtype,
        device=device,
        threads=threads,
        kv_gib=kv_gib,
        num_prefill=prefill,
        num_decode=decode,
        tool_format=tool_format,
        max_model_len=max_model_len,
        tp=tp,
        lossless=lossless,
        kv_dtype=kv_dtype,
        pp=pp,
        adapters=tuple(adapter or ()),
        expert_parallel=expert_parallel,
        redundant_experts=redundant_experts,
        dp=dp,
        speculate=speculate,
        ray=ray,
    )
    raise typer.Exit(run(served, clients, run_site))


@app.command(rich_help_panel=INFERENCE)
def plan(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint's directory, a config.json, or a Hugging Face id; weights are not needed."),
    ],
    devices: Annotated[
        str, typer.Option(help="Devices, such as 8xh100, 2xh200, cpu, or this-machine.")
    ] = "this-machine",
    context: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; by default the model's context, up to 131,072.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallelism; by default all splits are tried.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    ep: Annotated[
        int | None, typer.Option(min=1, help="Expert parallelism: number of devices that share a layer's experts.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Type of the KV cache: auto (as dtype) or fp8.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode at once, for the predicted speed.")] = 64,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price of one device for an hour.")] = None,
    lossless: Annotated[bool, typer.Option("--lossless", help="Plan with bf16 matrices in 12 bits, on a CPU.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which devices a model fits on, and the predicted speed."""
    from pilotlight.runtime.cli.models.plan import PlanRequest
    from pilotlight.runtime.cli.models.plan import plan as run

    run(PlanRequest(model, devices, context, dtype, batch, price, tp, pp, ep, kv_dtype, lossless), as_json)


@app.command(rich_help_panel=FUNCTIONS)
def init(
    directory: Annotated[Path, typer.Argument(help="A folder; created if it does not exist.")] = Path("."),
    name: Annotated[str | None, typer.Option(help="Name of the function; by default the folder's.")] = None,
    template: Annotated[
        str,
        typer.Option(
            help="hello; chat (a history in D1), mcp (an MCP server), queue (work behind requests), rag (answers from documents, by Vectorize), "
            "room (WebSockets in a Durable Object)."
        ),
    ] = "hello",
) -> None:
    """Write a first function, with its tests, into a folder."""
    from pilotlight.runtime.cli.init import init as run

    run(directory, name, template)


@app.command(rich_help_panel=FUNCTIONS)
def dev(
    directory: Annotated[Path, typer.Argument(help="A folder with a wrangler.toml or wrangler.jsonc.")] = Path("."),
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8787,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    env: Annotated[str | None, typer.Option(help=r"An \[env.NAME] of the manifest.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model of AI bindings, as in `serve`, or NAME=MODEL for one name. Repeatable; by default ember."
        ),
    ] = None,
    egress_allow: Annotated[
        list[str] | None,
        typer.Option(help="HOST or HOST:PORT that functions may reach although its address is not public."),
    ] = None,
    open_to_all: OpenOption = False,
) -> None:
    """Serve a folder's function on this machine, with its bindings, and reload it at each change."""
    from pilotlight.functions.cli.dev import DevOptions
    from pilotlight.functions.cli.dev import dev as run

    run(directory, DevOptions(host, port, env, tuple(model or ()), tuple(egress_allow or ()), open_to_all))


@app.command(rich_help_panel=FUNCTIONS)
def types(
    directory: Annotated[Path, typer.Argument(help="A folder with a wrangler.toml or wrangler.jsonc.")] = Path("."),
    env: Annotated[str | None, typer.Option(help=r"An \[env.NAME] of the manifest.")] = None,
) -> None:
    """Print the manifest's bindings as an annotated class, for editors.

    Example: `pilotlight types > src/env_types.py`."""
    from pilotlight.functions.cli.types_command import types as run

    print(run(directory, env), end="")


@app.command(rich_help_panel=FUNCTIONS)
def deploy(
    directory: Annotated[Path, typer.Argument(help="A folder with a wrangler.toml or wrangler.jsonc.")] = Path("."),
    env: Annotated[str | None, typer.Option(help=r"An \[env.NAME] of the manifest.")] = None,
    percent: Annotated[
        float,
        typer.Option(
            min=0.01, max=100.0, help="Share of the clients in percent; the previous version keeps the others."
        ),
    ] = 100.0,
    message: Annotated[str, typer.Option("--message", "-m", help="A note, stored with the version.")] = "",
    health: Annotated[
        str,
        typer.Option(help="Path that is requested before the version takes traffic; a status below 500 is healthy."),
    ] = "/",
    home: Annotated[
        str | None,
        typer.Option(help="The only site where a function with data runs. Moving a function leaves its data behind."),
    ] = None,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="Run at every site, each with its own data.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Upload a folder's function as a new version that the network serves.

    It needs a key with the scope deploy in PILOTLIGHT_API_KEY, or the router's PILOTLIGHT_DEPLOY_TOKEN; with `pilotlight up --functions` neither."""
    from pilotlight.functions.cli.deploy import deploy as run

    if home is not None and everywhere:
        raise CliError("--home and --everywhere contradict each other: use one of them.")
    run(Api(url), directory, env, percent, message, health, "" if everywhere else home)


@app.command(rich_help_panel=FUNCTIONS)
def rollback(
    name: Annotated[str, typer.Argument(help="Name of the function.")],
    version: Annotated[int | None, typer.Option(help="A version's number; by default the previous one.")] = None,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Return all traffic of a deployed function to an earlier version."""
    from pilotlight.functions.cli.deploy import rollback as run

    run(Api(url), name, version)


@app.command(rich_help_panel=FUNCTIONS)
def delete(name: Annotated[str, typer.Argument(help="Name of the function.")], url: UrlOption = DEFAULT_URL) -> None:
    """Stop serving a deployed function. Its versions and its data are kept."""
    from pilotlight.functions.cli.deploy import delete as run

    run(Api(url), name)


@app.command(rich_help_panel=FUNCTIONS)
def versions(
    name: Annotated[str, typer.Argument(help="Name of the function.")],
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """List the versions of a deployed function, and their traffic."""
    from pilotlight.functions.cli.deploy import versions as run

    run(Api(url), name, as_json)


@app.command(rich_help_panel=FUNCTIONS)
def tail(
    name: Annotated[str, typer.Argument(help="Name of the function.")],
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Follow a function's output and errors, at every site."""
    from pilotlight.functions.cli.deploy import tail as run

    run(Api(url), name, as_json)


@app.command(rich_help_panel=FUNCTIONS)
def logs(
    name: Annotated[str, typer.Argument(help="Name of the function.")],
    since: Annotated[
        str | None, typer.Option(help="An age (10m, 2h, 7d) or a time; all that is kept by default.")
    ] = None,
    grep: Annotated[str, typer.Option(help="Text in a line, an exception or a path.")] = "",
    status: Annotated[
        str | None,
        typer.Option(
            help="An HTTP status (404, 5xx), an outcome (ok, exception, exceededCpu, exceededMemory, canceled), or error."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of invocations; the newest are printed.")
    ] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow: print new invocations until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Print a function's stored invocations at every site: outcome, duration, CPU time, output."""
    from pilotlight.functions.cli.logs_command import logs as run

    run(Api(url), name, since=since, grep=grep, status=status, limit=limit, follow=follow, as_json=as_json)


@app.command(rich_help_panel=INFERENCE)
def pack(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's directory, a Hugging Face hub id, embedded:ember, or a directory packed with --lossless."
        ),
    ],
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="The directory to create; by default NAME.packed here. Use it as a model's source."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Create nothing; check every byte of a packed directory.")
    ] = False,
    lossless: Annotated[
        bool,
        typer.Option(
            "--lossless",
            help="Store bf16 a third smaller and decode it at each load. Packing the result without this option undoes this.",
        ),
    ] = False,
) -> None:
    """Write a model's weights in the engine's layout, so that loading maps one file."""
    from pilotlight.runtime.cli.models.pack import pack as run
    from pilotlight.runtime.cli.models.pack import verify as check

    check(model) if verify else run(model, dtype, out, lossless)


@app.command(rich_help_panel=INFERENCE)
def quantize(
    model: Annotated[str, typer.Argument(help="A checkpoint's directory, a Hugging Face hub id, or embedded:ember.")],
    to: Annotated[str, typer.Option(help="int8 or int4.")],
    group: Annotated[int, typer.Option(min=0, help="Columns with one scale, a multiple of 32; 0: a whole row.")] = 32,
    out: Annotated[Path | None, typer.Option(help="The directory to create; by default NAME.int4 here.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="A file of typical text, to which the rounding is fitted (GPTQ)."),
    ] = None,
) -> None:
    """Round a model's matrices to 8 or 4 bits, in a format that vLLM and transformers can read too."""
    from pilotlight.runtime.cli.models.quantize import quantize as run

    run(model, to, group, out, calibrate)


@app.command(rich_help_panel=INFERENCE)
def pull(
    model: Annotated[str, typer.Argument(help="A Hugging Face hub id, or a packed model's URL.")],
) -> None:
    """Download a model before its first use, and print its directory."""
    from pilotlight.runtime.cli.models.pull import pull as run

    run(model)


@app.command(rich_help_panel=INFERENCE)
def chat(
    prompt: Annotated[str | None, typer.Argument(help="A single prompt; without it, start a conversation.")] = None,
    model: Annotated[str | None, typer.Option(help="Model; by default the first one served.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Talk to a model on the terminal."""
    from pilotlight.runtime.cli.chat import chat as run

    options = {"max_tokens": max_tokens, "temperature": temperature}
    run(Api(url), prompt, model, system, {key: value for key, value in options.items() if value is not None})


@app.command(rich_help_panel=INFERENCE)
def models(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """List the models that are served."""
    from pilotlight.runtime.cli.status import print_models

    print_models(Api(url, timeout_s=10.0), as_json)


@app.command(rich_help_panel=OPERATIONS)
def usage(
    by: Annotated[
        str, typer.Option(help="Columns to group by: account, model, key, site, outcome, day, separated by commas.")
    ] = "account,model",
    since: Annotated[str | None, typer.Option("--from", help="Start: a date or a time.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="End: a date or a time, exclusive.")] = None,
    account: Annotated[str | None, typer.Option(help="Only this account.")] = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Show the usage of accounts, and its cost."""
    from pilotlight.runtime.cli.usage import print_usage

    asked = {"by": by, "from": since, "to": until, "account": account}
    print_usage(Api(url), {name: value for name, value in asked.items() if value is not None}, as_json, as_csv)


@app.command(rich_help_panel=OPERATIONS)
def slo(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """Show a router's objectives: burn rates, and the rest of the error budget."""
    from pilotlight.runtime.cli.usage import print_slo

    print_slo(Api(url, timeout_s=10.0), as_json)


@app.command(rich_help_panel=OPERATIONS)
def status(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """List every process: role, site, pid and URL."""
    from pilotlight.runtime.cli.status import print_status

    print_status(Api(url, timeout_s=10.0), as_json)


@app.command(rich_help_panel=OPERATIONS)
def join(
    url: Annotated[str, typer.Argument(help="URL of the network's router, such as https://router.example:8443.")],
    token: Annotated[str, typer.Argument(help="Token, as printed by `pilotlight network token`.")],
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for the site's file, its certificate and the secret.")
    ] = Path("~/.config/pilotlight"),
    name: Annotated[
        str | None, typer.Option(help="Name of the site; asked for interactively, by default the machine's.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Address at which routers reach this machine; detected by default.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8790,
    city: Annotated[
        str | None, typer.Option(help="Location of the site; asked for interactively, by default the router's.")
    ] = None,
    latitude: Annotated[float | None, typer.Option(min=-90, max=90)] = None,
    longitude: Annotated[float | None, typer.Option(min=-180, max=180)] = None,
    model: Annotated[
        str, typer.Option(help="Model to serve first: ember, a directory, or a Hugging Face hub id.")
    ] = "ember",
    starts: Annotated[bool, typer.Option("--start/--no-start", help="Serve at once.")] = True,
) -> None:
    """Make this machine a site of a network, by a token, and serve."""
    from pilotlight.runtime.cli.network.join import Wishes
    from pilotlight.runtime.cli.network.join import join as run

    path = run(url, token, folder, Wishes(name, address, port, city, latitude, longitude, model))
    if starts:
        _become("pilotlight.runtime", str(path))
    print(f"Start it: pilotlight site {path}")


NetworkOption = Annotated[
    Path | None, typer.Option("--network", help="A router's file; the files of `up` without --network and --site.")
]
SitesOption = Annotated[list[Path] | None, typer.Option("--site", help="A site's file. Repeatable.")]


@app.command(rich_help_panel=OPERATIONS)
def backup(
    folder: Annotated[Path, typer.Argument(help="Folder for backups. Protect it like the data itself.")],
    network: NetworkOption = None,
    site: SitesOption = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Number of newest backups to keep; all by default.")] = None,
) -> None:
    """Copy the state of this machine's router and sites while they run.

    That is deployments, data of functions, secrets, ledger and adapters."""
    from pilotlight.runtime.cli.operations.backup import backup as run
    from pilotlight.runtime.cli.operations.state_roots import load_files, state_roots

    print(run(folder, state_roots(*load_files(network, site)), keep))


@app.command(rich_help_panel=OPERATIONS)
def restore(
    folder: Annotated[Path, typer.Argument(help="Folder to which `backup` wrote.")],
    network: NetworkOption = None,
    site: SitesOption = None,
    snapshot: Annotated[str | None, typer.Option(help="Name of the backup; the newest by default.")] = None,
) -> None:
    """Restore a backup's state to the directories in the router's and sites' files, which must not run."""
    from pilotlight.runtime.cli.operations.backup import restore as run
    from pilotlight.runtime.cli.operations.state_roots import load_files, state_roots

    print(run(folder, state_roots(*load_files(network, site)), snapshot))


@app.command(rich_help_panel=OPERATIONS)
def doctor(
    network: NetworkOption = None,
    site: SitesOption = None,
    time_server: Annotated[str | None, typer.Option(help="NTP server with which the clock is compared.")] = None,
) -> None:
    """Check this machine for problems that would stop a router or site, and print how to fix them."""
    from pilotlight.runtime.cli.operations.doctor import doctor as run
    from pilotlight.runtime.cli.operations.state_roots import load_files, state_roots

    router, sites = load_files(network, site)
    listens = [config.listen for config in (router, *sites) if config is not None]
    if not run(listens, state_roots(router, sites), time_server):
        raise typer.Exit(1)


@app.command(hidden=True)
def run(
    model: Annotated[str, typer.Argument(help="A served model.")],
    prompt: Annotated[str | None, typer.Argument()] = None,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Talk to a model, as `chat --model`."""
    from pilotlight.runtime.cli.chat import chat as talk

    talk(Api(url), prompt, model, None, {})


app.command("list", hidden=True)(models)
app.command("ps", hidden=True)(status)


def _become(module: str, *arguments: str) -> None:
    """Replace this process by the server, so that no parent remains and signals reach the server directly.
    Ctrl-C waits until the server has started to import its modules."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line with `arguments`, those of the process by default."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack characters of a key
    try:
        app(arguments)
    except (CliError, ConfigError) as error:
        print(f"pilotlight: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of the pipe has left: prevent the error message at exit, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None and not is_disk_full(error):
            raise
        print(f"pilotlight: {error.filename or 'a file cannot be written'}: {error.strerror}.", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""`pilotlight network`: names, options and help.

The work is in network_folder.py, imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

network = typer.Typer(help="A network of machines that join by a token.", no_args_is_help=True)
FolderArgument = Annotated[Path, typer.Argument(help="The network's folder, which `network init` makes.")]


@network.command("init")
def init_network(
    folder: FolderArgument,
    host: Annotated[str, typer.Option(help="A name or address at which clients and other machines reach this one.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the router.")] = 8443,
    city: Annotated[str, typer.Option(help="City of this machine, as shown on the map.")] = "here",
    latitude: Annotated[float, typer.Option(min=-90, max=90)] = 0.0,
    longitude: Annotated[float, typer.Option(min=-180, max=180)] = 0.0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time in which the first token can be used.")] = 60.0,
) -> None:
    """Create a network.

    That is a router's file, a certificate authority, a secret, an admin key and a token for the next machine."""
    from pilotlight.runtime.cli.network.network_folder import init

    init(folder, host, port, (city, latitude, longitude), minutes)


@network.command("token")
def make_token(
    folder: FolderArgument,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time in which the token can be used, once.")] = 60.0,
) -> None:
    """Print a command line with which one more machine joins."""
    from pilotlight.runtime.cli.network.network_folder import token

    token(folder, minutes)


@network.command("revoke")
def revoke_token(
    folder: FolderArgument, id: Annotated[str, typer.Argument(help="Id of the token, from `network list`.")]
) -> None:
    """Refuse a token from now on."""
    from pilotlight.runtime.cli.network.network_folder import revoke

    revoke(folder, id)


@network.command("list")
def list_network(folder: FolderArgument) -> None:
    """List the network's sites and tokens."""
    from pilotlight.runtime.cli.network.network_folder import show

    show(folder)


@network.command("remove")
def remove_site(folder: FolderArgument, name: Annotated[str, typer.Argument(help="Name of the site.")]) -> None:
    """Remove a site from the router's file. Its open requests finish.

    The machine still has the network's secret: rotate that if the machine is lost."""
    from pilotlight.runtime.cli.network.network_folder import remove

    remove(folder, name)


@network.command("rotate-secret")
def rotate_secret(folder: FolderArgument) -> None:
    """Take the next of three steps that rotate the network's secret.
    At each step all processes accept each other."""
    from pilotlight.runtime.cli.network.network_folder import rotate

    rotate(folder)


@network.command("renew")
def renew_certificate(
    folder: FolderArgument,
    site: Annotated[str | None, typer.Option(help="For this site instead of the router.")] = None,
) -> None:
    """Make a new certificate for the router, which loads it by itself, or for a site."""
    from pilotlight.runtime.cli.network.network_folder import renew

    renew(folder, site)


@network.command("rotate-authority")
def rotate_authority(folder: FolderArgument) -> None:
    """Take the next of three steps that replace the network's certificate authority.
    At each step all processes trust each other."""
    from pilotlight.runtime.cli.network.network_folder import rotate_authority as run

    run(folder)

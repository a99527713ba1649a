"""`pilotlight chat`: a conversation in the terminal. Answers are printed while they are generated."""

import os
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from rich.console import Console

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.support.logs import printable

QUOTES = '"""'
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = (
    "/clear forgets the conversation, /system TEXT sets a system message, /image PATH shows an image with the next message, /bye ends; "
    f"{QUOTES} begins and ends a text of several lines; "
    "Ctrl-C stops an answer."
)


def chat(
    api: Api,
    prompt: str | None,
    model: str | None,
    system: str | None,
    options: dict[str, Any],
    console: Console | None = None,
) -> None:
    """Answer a prompt or piped standard input; without either, hold a conversation until Ctrl-D.
    The conversation is held at `console`, if it is given, instead of standard input."""
    model = first_model(api) if model is None else known_model(api, model)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if prompt is None and console is None and not sys.stdin.isatty():
        prompt = piped(sys.stdin.buffer)
    if prompt is not None:
        messages.append({"role": "user", "content": prompt})
        answer(api, {"model": model, "messages": messages, **options})
        return
    converse(api, model, messages, options, console or Console())


def piped(input: BinaryIO) -> str:
    """Return the prompt in piped input, whatever its encoding. Raises CliError if it is empty."""
    prompt = input.read().decode(errors="replace").strip()
    if not prompt:
        raise CliError('There is nothing to ask: pass a prompt, as in `pilotlight chat "Hello"`.')
    return prompt


def converse(api: Api, model: str, messages: list[dict[str, Any]], options: dict[str, Any], console: Console) -> None:
    """Hold a conversation.

    `messages` are the earlier messages; the new ones are appended to them."""
    images: list[dict[str, Any]] = []  # images for the next message
    console.print(
        f"Talking to {model} at {api.url}. /help lists the commands, Ctrl-D ends.", style="dim", highlight=False
    )
    while (line := read_turn(console)) not in (None, "/bye"):
        if not line:
            continue
        if line.startswith("/"):
            console.print(obey(line, messages, images), style="dim", highlight=False, markup=False)
            continue
        said = [*images, {"type": "text", "text": line}] if images else line
        asked = [*messages, {"role": "user", "content": said}]
        try:
            text = answer(api, {"model": model, "messages": asked, **options})
        except CliError as error:
            console.print(str(error), style="red", highlight=False, markup=False)
            continue
        except KeyboardInterrupt:
            console.print(" (stopped)", style="dim")
            continue
        messages[:] = [*asked, {"role": "assistant", "content": text}]
        images.clear()


def read_turn(console: Console) -> str | None:
    """Read the next turn: one line, or several between triple quotes; None at the end of input.

    Ctrl-C discards the text typed so far."""
    try:
        line = console.input("[bold]> [/bold]").strip()
        if not line.startswith(QUOTES):
            return line
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(console.input("[dim]. [/dim]"))
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip()
    except EOFError:
        console.print()
        return None
    except KeyboardInterrupt:
        console.print()
        return ""


def obey(command: str, messages: list[dict[str, Any]], images: list[dict[str, Any]]) -> str:
    """Run a command such as /clear and return the text to print.
    `images` are the image parts of the next message, to which /image adds one."""
    word, _, rest = command.partition(" ")
    system = [message for message in messages[:1] if message["role"] == "system"]
    match word:
        case "/clear":
            messages[:] = system
            images.clear()
            return "The conversation begins anew."
        case "/system":
            messages[: len(system)] = [{"role": "system", "content": rest.strip()}] if rest.strip() else []
            return "The system message is set." if rest.strip() else "The system message is removed."
        case "/image":
            try:
                images.append(image_part(Path(rest.strip()).expanduser()))
            except OSError as error:
                return f"That cannot be read: {error}"
            return f"The next message has {len(images)} image{'s' * (len(images) > 1)}."
        case "/help":
            return HELP
    return f"There is no {word}. {HELP}"


def image_part(path: Path) -> dict[str, Any]:
    """Return an image file as a part of a message. The site detects its type. Raises OSError."""
    data = b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}


def answer(api: Api, body: dict[str, Any], is_terminal: bool | None = None) -> str:
    """Print an answer while it arrives, and return its text.

    On a terminal reasoning is printed, too, and control characters are escaped. `is_terminal` is by default that of standard output.
    """
    text, is_thinking = "", False
    is_dim = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal

    def show(piece: str) -> None:
        sys.stdout.write(printable(piece, keep="\n\t") if is_terminal else piece)

    for chunk in api.stream("/v1/chat/completions", {**body, "stream": True}):
        for choice in chunk["choices"]:
            thought = choice["delta"].get("reasoning_content") or ""
            if thought and is_terminal:
                if is_dim and not is_thinking:
                    sys.stdout.write(DIM)
                show(thought)
                is_thinking = True
            piece = choice["delta"].get("content") or ""
            if is_thinking and (piece or choice["delta"].get("tool_calls") or choice.get("finish_reason")):
                sys.stdout.write(f"{PLAIN}\n" if is_dim else "\n")
                is_thinking = False
            text += piece
            show(piece)
            for call in choice["delta"].get("tool_calls") or ():
                function = call.get("function", {})
                show(f"{function.get('name') or ''}{function.get('arguments') or ''}")
        sys.stdout.flush()
    sys.stdout.write("\n")
    return text


def known_model(api: Api, name: str) -> str:
    """Return the name. Raises CliError if the model is not served, before any prompt is sent."""
    try:
        api.get_json(f"/v1/models/{quote(name)}")
    except CliError as error:
        served = ", ".join(str(model["id"]) for model in api.get_json("/v1/models")["data"])
        raise CliError(f"{str(error).removesuffix('.')}. Served are: {served or 'none'}.") from None
    return name


def first_model(api: Api) -> str:
    models = api.get_json("/v1/models")["data"]
    if not models:
        raise CliError(f"{api.url} serves no model: name some in its site files.")
    return str(models[0]["id"])

"""`pilotlight chat`: a conversation on the terminal, streamed token by token."""

import sys
from typing import Any

from rich.console import Console

from runtime.cli.api import Api
from runtime.cli.errors import CliError


def chat(api: Api, prompt: str | None, model: str | None, system: str | None, options: dict[str, Any]) -> None:
    """One answer for a prompt (or for piped standard input); without either, a conversation until Ctrl-D."""
    model = model or first_model(api)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise CliError('There is nothing to ask: pass a prompt, as in `pilotlight chat "Hello"`.')
    if prompt is not None:
        messages.append({"role": "user", "content": prompt})
        answer(api, {"model": model, "messages": messages, **options})
        return
    converse(api, model, messages, options)


def converse(api: Api, model: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    console = Console()
    console.print(f"Talking to {model} at {api.url}. Ctrl-D ends.", style="dim", highlight=False)
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not line:
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            text = answer(api, {"model": model, "messages": asked, **options})
        except CliError as error:
            console.print(str(error), style="red", highlight=False, markup=False)
            continue
        except KeyboardInterrupt:
            console.print(" (stopped)", style="dim")
            continue
        messages[:] = [*asked, {"role": "assistant", "content": text}]


def answer(api: Api, body: dict[str, Any]) -> str:
    """Prints what arrives, as it arrives; returns the whole."""
    text = ""
    for chunk in api.stream("/v1/chat/completions", {**body, "stream": True}):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            sys.stdout.write(piece)
            for call in choice["delta"].get("tool_calls") or ():
                function = call.get("function", {})
                sys.stdout.write(f"{function.get('name') or ''}{function.get('arguments') or ''}")
        sys.stdout.flush()
    sys.stdout.write("\n")
    return text


def first_model(api: Api) -> str:
    models = api.get_json("/v1/models")["data"]
    if not models:
        raise CliError(f"{api.url} serves no model: name some in its site files.")
    return str(models[0]["id"])

"""Tools of the type `custom`, whose input is free text.

The model sees each one as a function with one string parameter. If its format is a regular expression, the engine enforces it. A grammar in Lark's
notation is only described to the model, because inside a JSON string it would have to include JSON's escapes.
"""

import json
import re
from typing import Any

from pilotlight.dialects.body.bodies import CUSTOM_INPUT, FunctionBody
from pilotlight.dialects.body.invalid_values import ValidationError

_BEGINNING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
# Matches the complete characters of a JSON string. The first half of a surrogate pair is complete only with the second half.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*'
)


def function_of(name: str, description: str | None, format: Any) -> tuple[FunctionBody, bool]:
    """Return the function that represents a custom tool, and whether its format is enforced.

    Raises ValidationError."""
    schema: dict[str, Any] = {"type": "string"}
    match format:
        case None | {"type": "text"}:
            syntax = None
        case {"type": "grammar", "syntax": "regex" | "lark" as syntax, "definition": str(definition)} if definition:
            sentence = f"The input must match this {'regular expression' if syntax == 'regex' else 'grammar in Lark'}:\n{definition}"
            description = sentence if description is None else f"{description}\n\n{sentence}"
        case _:
            raise ValidationError(
                'must be {"type": "text"} or {"type": "grammar", "syntax": "regex" or "lark", "definition": "..."}'
            )
    if syntax == "regex":
        schema["pattern"] = f"^(?:{definition})$"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: schema},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    is_strict = True if syntax == "regex" else None
    return FunctionBody(name=name, description=description, parameters=parameters, strict=is_strict), syntax != "lark"


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call from its input in the history."""
    return {CUSTOM_INPUT: text}


class InputReader:
    """Extracts the input from a call's arguments, {"input": "..."}, while they arrive.

    `text` is the part that was extracted."""

    def __init__(self) -> None:
        self.text = ""
        self._is_open = False
        self._arguments = ""  # arguments that are not processed yet

    def push(self, arguments: str) -> str:
        """Process more of the arguments; return the part of the input that they contain."""
        self._arguments += arguments
        if not self._is_open:
            found = _BEGINNING.match(self._arguments)
            if found is None:
                return ""
            self._is_open, self._arguments = True, self._arguments[found.end() :]
        whole = _WHOLE.match(self._arguments)
        assert whole is not None, "it may be empty"
        self._arguments = self._arguments[whole.end() :]
        return self._grown(json.loads(f'"{whole[0]}"', strict=False))

    def finish(self) -> str:
        """Return the rest of the input. If the arguments have another form, they themselves are the input."""
        return "" if self._is_open else self._grown(self._arguments)

    def _grown(self, text: str) -> str:
        self.text += text
        return text


def input_of(arguments: str) -> str:
    """Return the input of a complete call."""
    reader = InputReader()
    reader.push(arguments)
    reader.finish()
    return reader.text

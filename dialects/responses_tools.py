"""The tools of Responses: functions, custom tools, and namespaces of both.

The model sees each as a function.

For the model, a function of a namespace is named NAMESPACE__name; the client's items contain name and namespace separately. Tools of other types,
such as `web_search`, run at OpenAI and are hidden from the model.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from pilotlight.dialects.body.bodies import (
    Body,
    FunctionBody,
    ToolBody,
    ToolChoice,
    at_most,
    not_deep,
    read_tool_choice,
)
from pilotlight.dialects.body.parsing import naming, refused
from pilotlight.dialects.custom_tools import function_of
from pilotlight.wire.chat import MAX_ITEMS

_FUNCTION, _CUSTOM, _NAMESPACE = "function", "custom", "namespace"


class ClientTool(Struct, frozen=True):
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def named(self) -> dict[str, str]:
        """Return the fields of an item that name the tool."""
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


def flat_name(name: str, namespace: Any) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


class InnerToolBody(Body, frozen=True, kw_only=True):
    """A tool of a namespace."""

    READERS: ClassVar = {"parameters": not_deep, "format": not_deep}

    type: str
    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None

    @classmethod
    def cleaned(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Keep only the type of a tool that another service runs."""
        is_ours = values.get("type") in (_FUNCTION, _CUSTOM, _NAMESPACE)
        return values if is_ours or "type" not in values else {"type": values["type"]}


class ResponsesToolBody(InnerToolBody, frozen=True, kw_only=True):
    READERS: ClassVar = {**InnerToolBody.READERS, "tools": at_most(MAX_ITEMS)}
    PARTS: ClassVar = {"tools": InnerToolBody}

    tools: list[InnerToolBody] | None = None


class ResponsesTools:
    """The tools of a request.

    `by_name` holds the tools whose name or form of call differs between model and client."""

    def __init__(self, given: list[ResponsesToolBody]) -> None:
        """Convert the tools of a request. Raises ApiError."""
        self.declared: list[ToolBody] = []
        self.by_name: dict[str, ClientTool] = {}
        self.left_out: list[str] = []  # types of omitted tools, and formats that are not enforced, with their positions
        self._left_out_types: set[str] = set()
        for tool, namespace, where in _flat(given):
            self._add(tool, namespace, where)

    def choice(self, asked: str | dict[str, Any] | None) -> ToolChoice | None:
        """Return `tool_choice` in the form of chat completions. Raises ApiError."""
        if asked is None:
            return None
        if isinstance(asked, dict) and asked.get("type") in self._left_out_types:
            sentence = f"the tool {str(asked['type'])[:50]!r} is not run here: force a function"
            raise refused(sentence, "tool_choice", "unsupported_parameter")
        if isinstance(asked, dict) and asked.get("namespace"):
            asked = {**asked, "name": flat_name(str(asked.get("name")), asked["namespace"])}
        with naming("tool_choice"):
            read: ToolChoice = msgspec.convert(read_tool_choice(asked), ToolChoice)
        return read

    def _add(self, tool: InnerToolBody, namespace: str | None, where: str) -> None:
        if tool.type not in (_FUNCTION, _CUSTOM):
            self.left_out.append(f"{where} {tool.type[:50]}")
            self._left_out_types.add(tool.type)
            return
        if tool.name is None:
            raise refused("is required", f"{where}.name")
        name = flat_name(tool.name, namespace)
        # OpenAI's tools are strict by default. With an explicit null the schema is not enforced.
        function = FunctionBody(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        if tool.type == _CUSTOM:
            with naming(f"{where}.format"):
                function, is_enforced = function_of(name, tool.description, tool.format)
            if not is_enforced:
                self.left_out.append(f"{where}.format")
        if tool.type == _CUSTOM or namespace is not None:
            self.by_name[name] = ClientTool(tool.name, namespace, tool.type == _CUSTOM)
        self.declared.append(ToolBody(type="function", function=function))


def _flat(given: list[ResponsesToolBody]) -> Iterator[tuple[InnerToolBody, str | None, str]]:
    for i, tool in enumerate(given):
        if tool.type != _NAMESPACE:
            yield tool, None, f"tools[{i}]"
            continue
        if tool.name is None:
            raise refused("is required", f"tools[{i}].name")
        for j, inner in enumerate(tool.tools or ()):
            yield inner, tool.name, f"tools[{i}].tools[{j}]"

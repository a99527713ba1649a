"""Calls of a listed tool with arguments in the user's words, answers from its result, or no call.

Names, descriptions and parameter names of a `Kind` of tool vary, and some consist of meaningless syllables, so the model must read them in the
prompt. Optional arguments that the user does not mention are omitted.
"""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from training.ember.corpus import words
from training.ember.corpus.conversation import (
    Conversation,
    Exchange,
    Expected,
    Lists,
    Message,
    Split,
    assistant,
    barred,
    user,
)
from training.ember.corpus.phrasing import blur, fill, say
from training.ember.corpus.tool_kinds import DONE, KINDS, UNSEEN_KINDS, Kind, Param


def tools(rng: random.Random, split: Split, other: Callable[[random.Random, Split], Exchange]) -> Conversation:
    """Return a prompt with one to four tools, and a request that one of them or none can fulfil.

    Names of tools and parameters are those of training in both splits; phrasings and values are those of `split`.
    """
    count = rng.choice((1, 1, 2, 2, 3, 3, 4))
    kinds = rng.sample(KINDS, count)
    listed = [_Tool(rng, split, kind) for kind in kinds]
    if rng.random() < (0.24 if split is Split.TRAIN else 0.1):
        listed[0] = _Tool(rng, split, None)
    definitions = tuple(tool.definition for tool in listed)
    if len({definition["function"]["name"] for definition in definitions}) < count:
        return tools(rng, split, other)
    draw = rng.random()
    if draw < 0.14:
        return _none_fits(rng, split, kinds, listed, definitions, other)
    called = listed[0]
    order = list(definitions)
    rng.shuffle(order)
    question, arguments = called.request(rng, split)
    call = {"name": called.name, "arguments": arguments}
    messages: list[Message] = [user(question), _calling(call)]
    expected = Expected(call=call)
    before = other(rng, split).messages if rng.random() < 0.12 else ()
    if draw < 0.5:
        result = _result(rng, split, called)
        messages += [{"role": "tool", "content": json.dumps(result, ensure_ascii=False)}, assistant(_report(result))]
        if split is Split.HELD_OUT:
            expected = Expected(holds=(_report(result),))
    if split is Split.TRAIN:
        messages += _more_requests(rng, listed, kinds)
    return Conversation("tools", (*before, *messages), tuple(order), expected)


def unseen_tools(rng: random.Random) -> Conversation:
    """Return a conversation for the evaluation: its kind of tool and all names are not in training."""
    names = Split.HELD_OUT
    called = _Tool(rng, Split.HELD_OUT, rng.choice(UNSEEN_KINDS) if rng.random() < 0.7 else None, names)
    listed = [called, *(_Tool(rng, Split.HELD_OUT, kind, names) for kind in rng.sample(KINDS, rng.choice((1, 2))))]
    rng.shuffle(listed)
    question, arguments = called.request(rng, Split.HELD_OUT)
    call = {"name": called.name, "arguments": arguments}
    definitions = tuple(tool.definition for tool in listed)
    return Conversation("unseen tools", (user(question), _calling(call)), definitions, Expected(call=call))


def _more_requests(rng: random.Random, listed: list["_Tool"], kinds: list[Kind]) -> list[Message]:
    """Return one to five more requests for the listed tools: the list costs more tokens than a call."""
    messages: list[Message] = []
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        if rng.random() < 0.2:
            messages += [user(_absent(rng, Split.TRAIN, kinds)), assistant(_NO_TOOL)]
            continue
        tool = rng.choice(listed)
        question, arguments = tool.request(rng, Split.TRAIN)
        messages += [user(question), _calling({"name": tool.name, "arguments": arguments})]
    return messages


def _absent(rng: random.Random, split: Split, kinds: list[Kind]) -> str:
    """Return a request for a tool whose kind is not among `kinds`."""
    listed = [kind.about[0].split()[:2] for kind in kinds]
    kind = rng.choice([kind for kind in KINDS if kind.about[0].split()[:2] not in listed])
    return _Tool(rng, split, kind).request(rng, split)[0]


def _calling(call: Mapping[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": dict(call)}]}


_NO_TOOL = "None of my tools can do that."


def _none_fits(
    rng: random.Random,
    split: Split,
    kinds: list[Kind],
    listed: list["_Tool"],
    definitions: tuple[Mapping[str, Any], ...],
    other: Callable[[random.Random, Split], Exchange],
) -> Conversation:
    if rng.random() < 0.5:
        rest = other(rng, split)
        return Conversation(
            "tools", rest.messages, definitions, Expected(rest.expected.holds, rest.expected.lacks, no_call=True)
        )
    more = _more_requests(rng, listed, kinds) if split is Split.TRAIN else []
    messages = (user(_absent(rng, split, kinds)), assistant(_NO_TOOL), *more)
    return Conversation("tools", messages, definitions, Expected(holds=("None of my tools",), no_call=True))


def _result(rng: random.Random, split: Split, tool: "_Tool") -> Mapping[str, Any]:
    if rng.random() < 0.12:
        return {
            "error": rng.choice(
                ("not found", "no connection", "not allowed", "try later", f"unknown {words.made_up(rng, split)}")
            )
        }
    if tool.kind is None or rng.random() < 0.3:
        keys = {
            words.made_up(rng, split): rng.choice(("word", "number", "proper", "code"))
            for _ in range(rng.choice((1, 2, 3)))
        }
        values = {key: words.value(rng, kind, split) for key, kind in keys.items()}
        return {key: int(text) if keys[key] == "number" else text for key, text in values.items()}
    return tool.kind.result(rng)


def _report(result: Mapping[str, Any]) -> str:
    """Return Ember's answer to a tool's result: done, the error, or each value with its name."""
    if "error" in result:
        return f"The tool failed: {result['error']}."
    if result in DONE:
        return "Done."
    parts = [f"{key.replace('_', ' ')} is {value}" for key, value in result.items()]
    return "The " + ", the ".join(parts) + "."


class _Tool:
    """A tool as it is listed in a prompt: a kind with chosen names, or a made-up tool if `kind` is None."""

    def __init__(self, rng: random.Random, split: Split, kind: Kind | None, names: Split = Split.TRAIN) -> None:
        self.kind = kind
        self._names = names
        self.params: list[tuple[str, Param]] = []
        if kind is None:
            self._make_up(rng, split)
        else:
            self._take(rng, split, kind)

    def _take(self, rng: random.Random, split: Split, kind: Kind) -> None:
        self.name = kind.names.pick(rng, self._names)
        if split is Split.TRAIN and rng.random() < 0.12:
            made_up = words.made_up(rng, split)
            self.name = rng.choice((f"{self.name}_{made_up}", f"{made_up}_{self.name}", words.identifier(rng, split)))
        for param in kind.params:
            if param.mention is not None and rng.random() < 0.4:
                continue
            name = param.names.pick(rng, self._names)
            if split is Split.TRAIN and rng.random() < 0.12:
                made_up = words.made_up(rng, split)
                name = rng.choice(
                    (f"{name}_{made_up}", f"{made_up}_{name}", f"the_{name}", words.identifier(rng, split))
                )
            if name not in [taken for taken, _ in self.params]:
                self.params.append((name, param))
            else:
                self.params.append((f"{name}_{param.slot}", param))
        self.definition = self._define(rng, rng.choice(kind.about))

    def _make_up(self, rng: random.Random, split: Split) -> None:
        self.name = rng.choice(
            (
                f"{words.made_up(rng, split)}_{words.made_up(rng, split)}",
                words.made_up(rng, split, 2),
                f"{rng.choice(('get', 'set', 'run', 'do', 'make', 'find'))}_{words.made_up(rng, split)}",
            )
        )
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            name = words.identifier(rng, split)
            kind = rng.choice(("word", "proper", "number", "code", "person", "city", "colour", "thing"))
            if name not in [taken for taken, _ in self.params]:
                integer = "integer" if kind == "number" else "string"
                self.params.append((name, Param(name, Lists((), ()), kind, "", integer)))
        self.definition = self._define(rng, rng.choice(("", "", "A tool", f"Run {self.name}")))

    def _define(self, rng: random.Random, about: str) -> Mapping[str, Any]:
        described = rng.random() < 0.5
        properties: dict[str, Any] = {}
        for name, param in self.params:
            properties[name] = {"type": param.json_type}
            if param.choices:
                properties[name]["enum"] = list(param.choices)
            if param.about and (described or param.slot.rstrip("s") not in name):
                properties[name]["description"] = param.about
        required = [name for name, param in self.params if param.mention is None]
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if required:
            parameters["required"] = required
        function: dict[str, Any] = {"name": self.name, "parameters": parameters}
        if about:
            function = {"name": self.name, "description": about, "parameters": parameters}
        return {"type": "function", "function": function}

    def request(self, rng: random.Random, split: Split) -> tuple[str, dict[str, Any]]:
        """Return the user's sentence, and its arguments in the order of the tool's parameters."""
        if self.kind is None:
            return self._explicit(rng, split)
        template = self.kind.asks.pick(rng, split)
        if split is Split.TRAIN:
            template = blur(rng, template, 0.06, keep=True)
        texts: dict[str, str] = {}
        arguments: dict[str, Any] = {}
        for name, param in self.params:
            mentioned = param.mention is not None and rng.random() < 0.5
            if param.mention is not None and not mentioned:
                continue
            if param.json_type == "boolean":
                arguments[name] = True
            else:
                texts[param.slot], arguments[name] = param.draw(rng, split)
            if param.mention is not None:
                ends = template[-1] if template[-1] in ".?!" else ""
                template = template[: len(template) - len(ends)] + param.mention.pick(rng, split) + ends
        if "origin" in texts and texts["origin"] == texts.get("goal"):
            return self.request(rng, split)
        return say(rng, split, template, texts), arguments

    def _explicit(self, rng: random.Random, split: Split) -> tuple[str, dict[str, Any]]:
        texts, arguments = {}, {}
        for name, param in self.params:
            texts[name], arguments[name] = param.draw(rng, split)
        style = EXPLICIT.pick(rng, split)
        joined = PAIR_JOIN.pick(rng, split)
        pair = PAIR.pick(rng, split)
        if split is Split.TRAIN:
            pair, style = blur(rng, pair, 0.1), blur(rng, style, 0.05)
        shuffled = list(texts.items())
        rng.shuffle(shuffled)
        pairs = joined.join(fill(pair, {"key": key, "value": text}) for key, text in shuffled)
        return fill(style, {"tool": self.name, "pairs": pairs}), arguments


EXPLICIT = barred(
    "Call {tool} with {pairs}.|Use {tool} with {pairs}.|Run {tool} with {pairs}.|{tool}: {pairs}"
    "|Please call {tool}, {pairs}.|Use the tool {tool} with {pairs}.|I want you to run {tool} with {pairs}."
    "|call {tool} with {pairs}|Do {tool} for {pairs}.|Execute {tool} with {pairs}.|Try {tool} using {pairs}."
    "|Start {tool} and give it {pairs}.|Can you use {tool} with {pairs}?|Let {tool} work with {pairs}."
    "|I need {tool} for {pairs}.|Apply {tool}, {pairs}.|Would you call {tool} with {pairs}?"
    "|Please run {tool} with {pairs}.|Please use the tool {tool}: {pairs}.|Invoke the tool {tool} for {pairs}."
    "|Could you use {tool} with {pairs}?|I would like you to call {tool} with {pairs}.",
    "Could you call {tool} with {pairs}?|Invoke {tool} with {pairs}.|Please use {tool} with {pairs}.",
)
PAIR = barred(
    "{key} {value}|{key} set to {value}|{key} = {value}|{key} as {value}|the {key} {value}|{key}: {value}"
    "|{value} as {key}|{key} to {value}|{key} at {value}|{value} for {key}|{value} in {key}|{key} of {value}"
    "|{key} filled with {value}|{key} given as {value}|a {key} named {value}|{key} equals {value}"
    "|{key} which is equal to {value}|{key} made equal to {value}|the {key} equal, as said, to {value}"
    "|{value} being the {key}|{key}, being {value}|the {key} now being {value}|{key} being set to {value}"
    "|{key} that is {value}|{key} equal, I think, to {value}|{key} to be {value}|{key} not being empty but {value}"
    "|{key} the same as {value}",
    "{key} being {value}|{key} equal to {value}",
)
PAIR_JOIN = barred(
    " and |, | and |, and |, also | as well as |; |, and also |; and also | and then also | and besides "
    "| and further | and, also, | plus ",
    " and also ",
)

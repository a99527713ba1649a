"""Questions with long, mostly predictable answers, typical of editors, extraction and agents.

They copy, edit or quote a text, list records as JSON, or call tools with many arguments. Ember's own answers have some twenty tokens, these a hundred
or more. A strict schema is defined as OpenAI does: every property required, no other allowed.
"""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from training.ember.corpus import words
from training.ember.corpus.conversation import Conversation, Message, Split, assistant, system, user

Ask = Callable[[random.Random, Split], Conversation]

_SENTENCES = (
    "{person} bought a {colour} {thing} in {city}.", "The {thing} of {person} is {colour}.", "On {day} {person} will {task}.",
    "{person} from {city} likes {hobby} and {food}.", "The {animal} of {person} is called {proper}.", "At {time} the {word} leaves {city}.",
    "{person} learns {language} with {full_name}.", "Every {job} in {city} has a {thing}.", "The code of the {word} is {code}.",
    "They had {food} with {food} on {day}.", "{full_name} works as a {job} in {city}.", "In {city} {number} people own a {animal}.",
    "{person} wrote to {email} about the {word}.", "Nobody saw the {colour} {animal} behind the {word}.",  # data
)  # fmt: skip
_HEADINGS = (
    "Arrival",
    "Budget",
    "Contacts",
    "Delivery",
    "Garden",
    "History",
    "Meeting",
    "Office",
    "Storage",
    "Travel",
    "Weather",
    "Workshop",
)


class _Field(NamedTuple):
    name: str
    kind: str  # the kind of value that words.value draws
    clause: str


_RECORD = (
    _Field("full_name", "full_name", "{value}"),
    _Field("occupation", "job", "works as a {value}"),
    _Field("home_town", "city", "lives in {value}"),
    _Field("favourite_colour", "colour", "prefers {value}"),
    _Field("email_address", "email", "reads {value}"),
    _Field("preferred_language", "language", "speaks {value}"),
    _Field("membership_number", "number", "has number {value}"),
)
_ORDER = (
    _Field("customer_name", "full_name", "for {value}"),
    _Field("shipping_city", "city", "to {value}"),
    _Field("product_description", "thing", "a {value}"),
    _Field("product_colour", "colour", "in {value}"),
    _Field("number_of_items", "small", "{value} of them"),
    _Field("delivery_day", "day", "on {value}"),
    _Field("contact_address", "email", "tell {value}"),
)


def copying(rng: random.Random, split: Split) -> Conversation:
    text = _text(rng, split, 6, 10)
    return Conversation("copying", (user(f"Copy this text:\n{text}"), assistant(text)))


def editing(rng: random.Random, split: Split) -> Conversation:
    """Draw a request to replace a word that occurs in several sentences, with its answer."""
    sentences = [_sentence(rng, split) for _ in range(rng.randrange(6, 10))]
    old, new = (words.value(rng, "proper", split) for _ in range(2))
    for place in rng.sample(range(len(sentences)), rng.randrange(2, 4)):
        sentences[place] = f"{old} says: {sentences[place]}"
    text = " ".join(sentences)
    messages = user(f"Replace {old} by {new}:\n{text}"), assistant(text.replace(old, new))
    return Conversation("editing", messages)


def quoting(rng: random.Random, split: Split) -> Conversation:
    """Draw a request to quote one of several sections word for word, with its answer."""
    sections = {heading: _text(rng, split, 3, 6) for heading in rng.sample(_HEADINGS, rng.randrange(3, 6))}
    document = "\n".join(f"{heading}: {text}" for heading, text in sections.items())
    heading = rng.choice(list(sections))
    return Conversation(
        "quoting", (user(f"{document}\nQuote what stands under {heading}."), assistant(f'"{sections[heading]}"'))
    )


def records(rng: random.Random, split: Split) -> Conversation:
    """Draw a request to list objects by a strict schema in the system message, with its answer."""
    fields = sorted(rng.sample(_RECORD[1:], rng.randrange(3, 6)), key=_RECORD.index)
    fields = [_RECORD[0], *fields]
    people = [_values(rng, split, fields) for _ in range(rng.randrange(2, 5))]
    text = " ".join(_told(fields, person) + "." for person in people)
    schema = strict({"members": {"type": "array", "items": strict({field.name: _type(field) for field in fields})}})
    messages: tuple[Message, ...] = (
        system(f"Reply with one JSON object that matches this schema:\n{json.dumps(schema)}"),
        user(text),
        assistant(json.dumps({"members": people}, ensure_ascii=False)),
    )
    return Conversation("records", messages)


def calls(rng: random.Random, split: Split) -> Conversation:
    """Draw a request to call a tool with all of an order's arguments, with its answer."""
    fields = [*_ORDER[:1], *sorted(rng.sample(_ORDER[1:], rng.randrange(4, 7)), key=_ORDER.index)]
    order = _values(rng, split, fields)
    function = {
        "name": "place_order_for_customer",
        "description": "Orders something.",
        "parameters": strict({field.name: _type(field) for field in fields}),
    }
    call = {"name": function["name"], "arguments": order}
    messages: tuple[Message, ...] = (
        user(f"Order {_told(fields, order)}."),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
    )
    return Conversation("calls", messages, ({"type": "function", "function": function},))


ASKS: dict[str, Ask] = {
    "copying": copying,
    "editing": editing,
    "quoting": quoting,
    "records": records,
    "calls": calls,
}


def strict(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _type(field: _Field) -> dict[str, Any]:
    return {"type": "integer" if field.kind in ("number", "small") else "string"}


def _values(rng: random.Random, split: Split, fields: list[_Field]) -> dict[str, Any]:
    found = {field.name: words.value(rng, field.kind, split) for field in fields}
    return {field.name: int(text) if _type(field)["type"] == "integer" else text for field in fields for text in [found[field.name]]}  # fmt: skip


def _told(fields: list[_Field], values: dict[str, Any]) -> str:
    return ", ".join(field.clause.replace("{value}", str(values[field.name])) for field in fields)


def _text(rng: random.Random, split: Split, least: int, most: int) -> str:
    return " ".join(_sentence(rng, split) for _ in range(rng.randrange(least, most)))


def _sentence(rng: random.Random, split: Split) -> str:
    text = rng.choice(_SENTENCES)
    while "{" in text:
        kind = text[text.index("{") + 1 : text.index("}")]
        text = text.replace(f"{{{kind}}}", words.value(rng, kind, split), 1)
    return text

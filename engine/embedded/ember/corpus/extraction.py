"""A short text in, one JSON object that matches a given schema out.

A `Field` is one thing a text can state: the names a schema may give it and the clauses that state it. A text holds the
clauses in any order; the object follows the order of the schema. A field the text does not state is left out.
"""

import json
import random
from typing import Any

from . import words
from .conversation import Conversation, Expected, Lists, Split, assistant, system, user
from .fields import DOMAINS, Field
from .phrasing import fill

INSTRUCTION = Lists(
    ("Reply with one JSON object that matches this schema:\n{schema}",) * 6
    + (
        "Answer with JSON that matches this schema:\n{schema}",
        "Extract a JSON object with this schema:\n{schema}",
        "Return only JSON for this schema:\n{schema}",
        "Output JSON. Schema:\n{schema}",
    ),
    ("Reply with one JSON object that matches this schema:\n{schema}",),
)
LEAD = Lists(
    (
        "",
        "",
        "",
        "",
        "Text: ",
        "Extract the data: ",
        "Please fill in the JSON: ",
        "Here is the text: ",
        "Input: ",
        "Turn this into JSON: ",
    ),
    ("", "", "Read this: ", "Make JSON of this: "),
)


def extraction(rng: random.Random, split: Split) -> Conversation:
    properties, sentences, result = _plain(rng, split) if rng.random() < 0.35 else _told(rng, split)
    names = list(properties)
    rng.shuffle(names)
    schema: dict[str, Any] = {"type": "object", "properties": {name: properties[name] for name in names}}
    required = [name for name in names if name in result]
    if rng.random() < 0.7:
        schema["required"] = required
    ordered = {name: result[name] for name in names if name in result}
    instruction = fill(INSTRUCTION.pick(rng, split), {"schema": json.dumps(schema, ensure_ascii=False)})
    text = LEAD.pick(rng, split) + " ".join(sentences)
    if split is Split.TRAIN and rng.random() < 0.12:
        opening = [user(f"{instruction}\n\n{text}")]
    else:
        opening = [system(instruction), user(text)]
    reply = assistant(json.dumps(ordered, ensure_ascii=False))
    return Conversation("json", (*opening, reply), expected=Expected(json=ordered))


_Parts = tuple[dict[str, Any], list[str], dict[str, Any]]


def _told(rng: random.Random, split: Split) -> _Parts:
    """Sentences about a person, an object or an event."""
    head_names, head_kind, fields, openings = rng.choice(DOMAINS)
    subject = words.value(rng, head_kind, split)
    chosen = rng.sample(fields, rng.choice((1, 2, 2, 3, 3, 4)))
    head = head_names.pick(rng, split)
    properties: dict[str, Any] = {head: {"type": "string"}}
    result: dict[str, Any] = {head: subject}
    sentences = []
    for field in chosen:
        name = field.names.pick(rng, split)
        if split is Split.TRAIN and rng.random() < 0.2:
            made_up = words.made_up(rng, split)
            name = rng.choice((f"{name}_{made_up}", f"{made_up}_{name}"))
        if name in properties:
            continue
        properties[name] = _schema(field)
        if rng.random() < 0.07:
            continue
        sentence, result[name] = _clause(rng, split, field)
        again = subject if head_kind != "person" else rng.choice((subject, subject, "He", "She"))
        sentences.append(sentence.replace("{s}", again))
    rng.shuffle(sentences)
    return properties, [fill(openings.pick(rng, split), {"v": subject}), *sentences], result


def _clause(rng: random.Random, split: Split, field: Field) -> tuple[str, Any]:
    if field.json_type == "boolean":
        yes, no = "|".join(field.clauses[split]).split("#")
        answer = rng.random() < 0.5
        return rng.choice((yes if answer else no).split("|")), answer
    template = field.clauses.pick(rng, split)
    if field.json_type == "array":
        values = list(dict.fromkeys(words.value(rng, field.kind, split) for _ in range(rng.choice((1, 2, 2, 3)))))
        text = values[0] if len(values) == 1 else ", ".join(values[:-1]) + " and " + values[-1]
        return template.replace("{v}", text), values
    text = rng.choice(field.choices) if field.choices else words.value(rng, field.kind, split)
    return template.replace("{v}", text), int(text) if field.json_type == "integer" else text


def _schema(field: Field) -> dict[str, Any]:
    if field.json_type == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": field.json_type, "enum": list(field.choices)} if field.choices else {"type": field.json_type}


PLAIN_CLAUSES = Lists(
    ("The {k} is {v}.", "{k}: {v}.", "Its {k} is {v}.", "{k} is {v}.", "We set the {k} to {v}.", "{v} is the {k}."),
    ("For {k} we have {v}.", "It has {v} as its {k}."),
)


def _plain(rng: random.Random, split: Split) -> _Parts:
    """Names that mean nothing, stated one by one: the names and values must be copied."""
    properties: dict[str, Any] = {}
    result: dict[str, Any] = {}
    sentences = []
    for _ in range(rng.choice((1, 2, 3, 3, 4))):
        name = words.identifier(rng, split)
        if name in properties:
            continue
        json_type = rng.choice(("string", "string", "integer"))
        properties[name] = {"type": json_type}
        text = words.value(
            rng,
            rng.choice(("number", "small"))
            if json_type == "integer"
            else rng.choice(("word", "proper", "city", "code", "person", "colour", "date")),
            split,
        )
        result[name] = int(text) if json_type == "integer" else text
        sentences.append(fill(PLAIN_CLAUSES.pick(rng, split), {"k": name, "v": text}))
    rng.shuffle(sentences)
    return properties, sentences, result

"""The task of answering a short text with a JSON object that matches a given schema.

A `Field` is one fact that a text can state: its possible names in a schema, and the clauses that state it. A text has the clauses in any order; the
object has the order of the schema, without the fields that the text does not state.
"""

import json
import random
from typing import Any, Protocol

from training.ember.corpus import words
from training.ember.corpus.conversation import (
    Conversation,
    Expected,
    Lists,
    Message,
    Split,
    assistant,
    barred,
    system,
    user,
)
from training.ember.corpus.fields import DOMAINS, Field
from training.ember.corpus.phrasing import blur, fill, framed

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
        *("",) * 12,
        "Text: ",
        "Extract the data: ",
        "Please fill in the JSON: ",
        "Here is the text: ",
        "Input: ",
        "Turn this into JSON: ",
        "Please read: ",
        "This is the text: ",
        "JSON for this: ",
        "Now this one: ",
        "Data: ",
        "Write JSON for this: ",
        "Look at this: ",
        "What about this: ",
        "Message: ",
        "The customer wrote: ",
    ),
    ("", "", "Read this: ", "Make JSON of this: "),
)


# Share of forms with meaningless keys, which teach copying. The evaluation tests them separately, as "unseen keys".
PLAIN_SHARE = {Split.TRAIN: 0.05, Split.HELD_OUT: 0.0}


# Share of fields that a text may leave unstated. To omit them in the answer is the hardest part, so training has more of them than the evaluation.
OPTIONAL_SHARE = {Split.TRAIN: 0.4, Split.HELD_OUT: 0.15}


def extraction(rng: random.Random, split: Split) -> Conversation:
    """Return a conversation with one schema and one text, in training often several texts.

    A schema has more tokens than its answers, so further texts are cheap. Keys are those of training in both splits; phrasings and values are those
    of `split`.
    """
    plain = rng.random() < PLAIN_SHARE[split]
    return _conversation(rng, split, "json", _PlainForm(rng, split) if plain else _TellingForm(rng, split, Split.TRAIN))


def unseen_keys(rng: random.Random) -> Conversation:
    """Return a conversation for the evaluation: its keys, some of them meaningless, are not in training."""
    split = Split.HELD_OUT
    form: _Form = _PlainForm(rng, split) if rng.random() < 0.35 else _TellingForm(rng, split, split)
    return _conversation(rng, split, "unseen keys", form)


def _conversation(rng: random.Random, split: Split, task: str, form: "_Form") -> Conversation:
    schema: dict[str, Any] = {"type": "object", "properties": form.properties}
    if form.required and rng.random() < 0.7:
        schema["required"] = form.required
    instruction = fill(INSTRUCTION.pick(rng, split), {"schema": json.dumps(schema, ensure_ascii=False)})
    turns = rng.choice((1, 2, 3, 4, 5, 6)) if split is Split.TRAIN else 1
    messages: list[Message] = []
    ordered: dict[str, Any] = {}
    for _ in range(turns):
        sentences, result = form.text(rng, split)
        ordered = {name: result[name] for name in form.properties if name in result}
        text = LEAD.pick(rng, split) + " ".join(sentences)
        messages += [user(text), assistant(json.dumps(ordered, ensure_ascii=False))]
    if split is Split.TRAIN and rng.random() < 0.12:
        messages[0] = user(f"{instruction}\n\n{messages[0]['content']}")
    else:
        messages.insert(0, system(instruction))
    return Conversation(task, tuple(messages), expected=Expected(json=ordered))


class _Form(Protocol):
    properties: dict[str, Any]  # in the order of the schema
    required: list[str]

    def text(self, rng: random.Random, split: Split) -> tuple[list[str], dict[str, Any]]:
        """Return the sentences of one text, and the values of the fields that they state."""


class _TellingForm:
    """A schema about a person, an object or an event, and sentences that state its fields."""

    def __init__(self, rng: random.Random, split: Split, keys: Split) -> None:
        head_names, self._kind, fields, self._openings = rng.choice(DOMAINS)
        self._head = head_names.pick(rng, keys)
        self._fields: dict[str, Field] = {}
        self._optional: set[str] = set()
        for field in rng.sample(fields, rng.choice((1, 2, 2, 3, 3, 4))):
            name = field.names.pick(rng, keys)
            if split is Split.TRAIN and rng.random() < 0.05:
                made_up = words.made_up(rng, split)
                name = rng.choice((f"{name}_{made_up}", f"{made_up}_{name}"))
            if name != self._head:
                self._fields[name] = field
                if rng.random() < OPTIONAL_SHARE[split]:
                    self._optional.add(name)
        names = [self._head, *self._fields]
        rng.shuffle(names)
        head = {"type": "string"}
        self.properties = {name: head if name == self._head else _schema(self._fields[name]) for name in names}
        self.required = [name for name in names if name not in self._optional]

    def text(self, rng: random.Random, split: Split) -> tuple[list[str], dict[str, Any]]:
        subject = words.value(rng, self._kind, split)
        result: dict[str, Any] = {self._head: subject}
        sentences = []
        for name, field in self._fields.items():
            if name in self._optional and rng.random() < 0.5:
                continue
            sentence, result[name] = _clause(rng, split, field)
            again = subject if self._kind != "person" else rng.choice((subject, subject, "He", "She"))
            sentences.append(sentence.replace("{s}", again))
        rng.shuffle(sentences)
        return [fill(_reworded(rng, split, self._openings), {"v": subject}), *sentences], result


class _PlainForm:
    """A schema of meaningless names, and sentences that state each: names and values must be copied."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        names = dict.fromkeys(words.identifier(rng, split) for _ in range(rng.choice((1, 2, 3, 3, 4))))
        self.properties = {name: {"type": rng.choice(("string", "string", "integer"))} for name in names}
        self.required = list(names)

    def text(self, rng: random.Random, split: Split) -> tuple[list[str], dict[str, Any]]:
        result: dict[str, Any] = {}
        sentences = []
        for name, schema in self.properties.items():
            integer = schema["type"] == "integer"
            kinds = ("number", "small") if integer else ("word", "proper", "city", "code", "person", "colour", "date")
            text = words.value(rng, rng.choice(kinds), split)
            result[name] = int(text) if integer else text
            sentences.append(fill(_reworded(rng, split, PLAIN_CLAUSES), {"k": name, "v": text}))
        rng.shuffle(sentences)
        return sentences, result


def _clause(rng: random.Random, split: Split, field: Field) -> tuple[str, Any]:
    if field.json_type == "boolean":
        yes, no = "|".join(field.clauses[split]).split("#")
        answer = rng.random() < 0.5
        clause = rng.choice((yes if answer else no).split("|"))
        return (framed(rng, clause, 0.2) if split is Split.TRAIN else clause), answer
    template = _reworded(rng, split, field.clauses)
    if field.json_type == "array":
        values = list(dict.fromkeys(words.value(rng, field.kind, split) for _ in range(rng.choice((1, 2, 2, 3)))))
        text = values[0] if len(values) == 1 else ", ".join(values[:-1]) + " and " + values[-1]
        return template.replace("{v}", text), values
    text = rng.choice(field.choices) if field.choices else words.value(rng, field.kind, split)
    return template.replace("{v}", text), int(text) if field.json_type == "integer" else text


def _reworded(rng: random.Random, split: Split, clauses: Lists) -> str:
    clause = clauses.pick(rng, split)
    if split is Split.HELD_OUT:
        return clause
    return blur(rng, framed(rng, clause, 0.2), 0.03)


def _schema(field: Field) -> dict[str, Any]:
    if field.json_type == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": field.json_type, "enum": list(field.choices)} if field.choices else {"type": field.json_type}


PLAIN_CLAUSES = barred(
    "The {k} is {v}.|{k}: {v}.|Its {k} is {v}.|{k} is {v}.|We set the {k} to {v}.|{v} is the {k}.|{k} = {v}."
    "|As {k} we chose {v}.|Use {v} for {k}.|{v} goes into {k}.|The value of {k} was {v}.|They gave {v} for the {k}."
    "|In {k} there is {v}.|Put {v} under {k}.|With {k} we mean {v}.|{k} should be {v}.|{v} was entered as {k}."
    "|You see {v} at {k}.",
    "For {k} we have {v}.|It has {v} as its {k}.",
)

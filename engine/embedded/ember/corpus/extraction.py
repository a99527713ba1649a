"""A short text in, one JSON object that matches a given schema out.

A `Field` is one thing a text can state: the names a schema may give it and the clauses that state it. A text holds the
clauses in any order; the object follows the order of the schema. A field the text does not state is left out.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from . import words
from .conversation import Conversation, Expected, Lists, Split, assistant, system, user
from .phrasing import fill

INSTRUCTION = Lists(
    ("Reply with one JSON object that matches this schema:\n{schema}",) * 6
    + ("Answer with JSON that matches this schema:\n{schema}", "Extract a JSON object with this schema:\n{schema}",
       "Return only JSON for this schema:\n{schema}", "Output JSON. Schema:\n{schema}"),
    ("Reply with one JSON object that matches this schema:\n{schema}",),
)
LEAD = Lists(
    ("", "", "", "", "Text: ", "Extract the data: ", "Please fill in the JSON: ", "Here is the text: ", "Input: ", "Turn this into JSON: "),
    ("", "", "Read this: ", "Make JSON of this: "),
)


@dataclass(frozen=True)
class Field:
    names: Lists
    kind: str
    clauses: Lists
    json_type: str = "string"
    choices: tuple[str, ...] = ()


def _w(train: str, held_out: str) -> Lists:
    return Lists(tuple(train.split("|")), tuple(held_out.split("|")))


_PERSON = (
    Field(_w("age|years|age_years", "how_old"), "small",
          _w("{s} is {v} years old.|{s} is {v}.|{s} is aged {v}.|{s} just turned {v}.|The age is {v}.", "{s} has reached the age of {v}.|{s} has lived for {v} years."), "integer"),
    Field(_w("city|home|lives_in|town|location", "residence|home_city"), "city",
          _w("{s} lives in {v}.|{s} comes from {v}.|{s} is from {v}.|{s} has a flat in {v}.|Home is {v}.", "{s} resides in {v}.|{s} has a house in {v}.")),
    Field(_w("job|occupation|work|profession", "trade|job_title"), "job",
          _w("{s} works as a {v}.|{s} is a {v}.|{s} earns money as a {v}.|The job is {v}.", "{s} makes a living as a {v}.|{s} is employed as a {v}.")),
    Field(_w("hobbies|likes|interests", "pastimes|activities"), "hobby",
          _w("{s} likes {v}.|{s} enjoys {v}.|Hobbies: {v}.|The hobbies are {v}.|{s} spends weekends with {v}.", "{s} is fond of {v}.|For fun there is {v}."), "array"),
    Field(_w("member|is_member|subscribed|active", "has_membership|signed_up"), "",
          _w("{s} is a member.|{s} has joined the club.|{s} is in the club.#{s} is not a member.|{s} has not joined the club.|{s} is not in the club.",
             "{s} belongs to the club.#{s} does not belong to the club."), "boolean"),
    Field(_w("married|is_married", "has_spouse"), "",
          _w("{s} is married.|{s} has a partner.#{s} is not married.|{s} is single.", "{s} has married.#{s} has not married."), "boolean"),
    Field(_w("email|mail|contact", "e_mail|mail_address"), "email", _w("Email: {v}.|The email is {v}.|Write to {v}.|Mail goes to {v}.", "{s} reads mail at {v}.|Reach {s} at {v}.")),
    Field(_w("favorite_color|colour|color|favourite_colour", "best_colour"), "colour",
          _w("The favourite colour is {v}.|{s} likes the colour {v}.|{s} wears {v}.|The colour is {v}.", "{s} prefers the colour {v}.")),
    Field(_w("phone|number|phone_number", "telephone"), "number", _w("The phone number is {v}.|Phone: {v}.|Call {v}.", "The telephone is {v}."), "integer"),
    Field(_w("language|speaks", "mother_tongue"), "language", _w("{s} speaks {v}.|The language is {v}.|{s} talks in {v}.", "{s} grew up with {v}.")),
    Field(_w("level|rank|status", "grade"), "", _w("The level is {v}.|{s} is at level {v}.|Level: {v}.", "{s} has reached the level {v}."), "string", ("basic", "silver", "gold", "beginner", "expert")),
)
_OBJECT = (
    Field(_w("price|cost|amount", "price_eur"), "number", _w("It costs {v} euros.|The price is {v}.|The {s} costs {v}.|Price: {v}.", "You pay {v} for it.|The {s} sells for {v}."), "integer"),
    Field(_w("color|colour|paint", "shade"), "colour", _w("It is {v}.|The colour is {v}.|The {s} is {v}.|It comes in {v}.", "The {s} has the colour {v}.")),
    Field(_w("quantity|count|pieces|stock", "how_many"), "small", _w("There are {v} pieces.|We have {v} of them.|Quantity: {v}.|{v} are in stock.", "{v} pieces are left."), "integer"),
    Field(_w("in_stock|available|for_sale", "can_be_bought"), "", _w("It is available.|It is in stock.|You can buy it now.#It is not available.|It is out of stock.|It is sold out.", "The {s} can be bought.#The {s} cannot be bought."), "boolean"),
    Field(_w("size|fit", "how_large"), "", _w("The size is {v}.|Size: {v}.|It is of {v} size.", "The {s} comes in size {v}."), "string", ("small", "medium", "large", "tiny", "huge")),
    Field(_w("brand|maker|company", "manufacturer"), "proper", _w("It is made by {v}.|The brand is {v}.|{v} makes it.|Maker: {v}.", "It comes from the firm {v}.")),
    Field(_w("code|sku|id|item_code", "article"), "code", _w("The code is {v}.|Code: {v}.|Its number is {v}.", "It is filed under {v}.")),
    Field(_w("tags|features|keywords", "labels"), "word", _w("Tags: {v}.|The tags are {v}.|It is tagged {v}.", "It carries the labels {v}."), "array"),
    Field(_w("owner|seller|person", "belongs_to"), "person", _w("It belongs to {v}.|The owner is {v}.|{v} owns it.|{v} sells it.", "Its owner is called {v}.")),
)
_EVENT = (
    Field(_w("day|date|weekday", "on_day"), "day", _w("It is on {v}.|The day is {v}.|It takes place on {v}.|Come on {v}.", "It happens on {v}.")),
    Field(_w("time|start|start_time|begins", "starting_at"), "time", _w("It starts at {v}.|The time is {v}.|It begins at {v}.|Be there at {v}.", "The doors open at {v}.")),
    Field(_w("place|city|location|venue", "takes_place_in"), "city", _w("It is in {v}.|The place is {v}.|We meet in {v}.|It takes place in {v}.", "It will be held in {v}.")),
    Field(_w("guests|people|attendees|invited", "participants"), "person", _w("The guests are {v}.|Invited are {v}.|{v} will come.|With {v}.", "We expect {v}."), "array"),
    Field(_w("seats|places|capacity|tickets", "chairs"), "number", _w("There are {v} seats.|It has {v} places.|Seats: {v}.|There is room for {v} people.", "The hall has {v} seats."), "integer"),
    Field(_w("free|is_free|no_fee", "costs_nothing"), "", _w("It is free.|Entry is free.|You pay nothing.#It is not free.|Entry is not free.|You have to pay.", "Nobody has to pay.#Everybody has to pay."), "boolean"),
    Field(_w("host|organizer|contact_person", "run_by"), "person", _w("{v} is the host.|The host is {v}.|It is organised by {v}.|{v} invites you.", "It is hosted by {v}.")),
    Field(_w("kind|type|category", "sort"), "", _w("It is a {v}.|It will be a {v}.|Type: {v}.|The kind is {v}.", "They call it a {v}."), "string", ("concert", "party", "meeting", "dinner", "lecture", "workshop")),
    Field(_w("food|menu|meals", "dishes"), "food", _w("There will be {v}.|We serve {v}.|The menu: {v}.", "You can eat {v}."), "array"),
)
_DOMAINS = (
    (_w("name|person|customer", "full_name|client"), "person", _PERSON,
     _w("This is {v}.|The name is {v}.|Name: {v}.|Meet {v}.|{v} wrote to us.|We talked to {v}.", "Let me introduce {v}.|A new client is {v}.")),
    (_w("item|product|name|thing", "article_name|object"), "thing", _OBJECT,
     _w("We sell a {v}.|Here is a {v}.|Item: {v}.|For sale: a {v}.|The product is a {v}.|I bought a {v}.", "We offer a {v}.|Look at this {v}.")),
    (_w("event|title|name", "event_name|occasion"), "proper", _EVENT,
     _w("The event is called {v}.|Come to {v}.|We present {v}.|Event: {v}.|{v} is coming.", "Do not miss {v}.|Join us for {v}.")),
)


def extraction(rng: random.Random, split: Split) -> Conversation:
    properties, sentences, result = _plain(rng, split) if rng.random() < 0.25 else _told(rng, split)
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
    head_names, head_kind, fields, openings = rng.choice(_DOMAINS)
    subject = words.value(rng, head_kind, split)
    chosen = rng.sample(fields, rng.choice((1, 2, 2, 3, 3, 4)))
    head = head_names.pick(rng, split)
    properties: dict[str, Any] = {head: {"type": "string"}}
    result: dict[str, Any] = {head: subject}
    sentences = []
    for field in chosen:
        name = field.names.pick(rng, split)
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


PLAIN_CLAUSES = Lists(("The {k} is {v}.", "{k}: {v}.", "Its {k} is {v}.", "{k} is {v}.", "We set the {k} to {v}.", "{v} is the {k}."),
                      ("For {k} we have {v}.", "It has {v} as its {k}."))


def _plain(rng: random.Random, split: Split) -> _Parts:
    """Names that mean nothing, stated one by one: the names and values must be copied."""
    properties: dict[str, Any] = {}
    result: dict[str, Any] = {}
    sentences = []
    for _ in range(rng.choice((1, 2, 3, 3, 4))):
        name = words.made_up(rng, split)
        if name in properties:
            continue
        json_type = rng.choice(("string", "string", "integer"))
        properties[name] = {"type": json_type}
        text = words.value(rng, rng.choice(("number", "small")) if json_type == "integer" else
                           rng.choice(("word", "proper", "city", "code", "person", "colour", "date")), split)
        result[name] = int(text) if json_type == "integer" else text
        sentences.append(fill(PLAIN_CLAUSES.pick(rng, split), {"k": name, "v": text}))
    rng.shuffle(sentences)
    return properties, sentences, result

"""What a text can state of a person, an object or an event, and the names a schema may give it.

Booleans hold the clauses for yes, then `#`, then those for no. `{s}` is what the text is about, `{v}` the value.
"""

from dataclasses import dataclass

from .conversation import Lists, barred


@dataclass(frozen=True)
class Field:
    names: Lists
    kind: str
    clauses: Lists
    json_type: str = "string"
    choices: tuple[str, ...] = ()


_PERSON = (
    Field(
        barred("age|years|age_years", "how_old"),
        "small",
        barred(
            "{s} is {v} years old.|{s} is {v}.|{s} is aged {v}.|{s} just turned {v}.|The age is {v}.",
            "{s} has reached the age of {v}.|{s} has lived for {v} years.",
        ),
        "integer",
    ),
    Field(
        barred("city|home|lives_in|town|location", "residence|home_city"),
        "city",
        barred(
            "{s} lives in {v}.|{s} comes from {v}.|{s} is from {v}.|{s} has a flat in {v}.|Home is {v}.",
            "{s} resides in {v}.|{s} has a house in {v}.",
        ),
    ),
    Field(
        barred("job|occupation|work|profession", "trade|job_title"),
        "job",
        barred(
            "{s} works as a {v}.|{s} is a {v}.|{s} earns money as a {v}.|The job is {v}.",
            "{s} makes a living as a {v}.|{s} is employed as a {v}.",
        ),
    ),
    Field(
        barred("hobbies|likes|interests", "pastimes|activities"),
        "hobby",
        barred(
            "{s} likes {v}.|{s} enjoys {v}.|Hobbies: {v}.|The hobbies are {v}.|{s} spends weekends with {v}.",
            "{s} is fond of {v}.|For fun there is {v}.",
        ),
        "array",
    ),
    Field(
        barred("member|is_member|subscribed|active", "has_membership|signed_up"),
        "",
        barred(
            "{s} is a member.|{s} has joined the club.|{s} is in the club.#{s} is not a member.|"
            "{s} has not joined the club.|{s} is not in the club.",
            "{s} belongs to the club.#{s} does not belong to the club.",
        ),
        "boolean",
    ),
    Field(
        barred("married|is_married", "has_spouse"),
        "",
        barred(
            "{s} is married.|{s} has a partner.#{s} is not married.|{s} is single.",
            "{s} has married.#{s} has not married.",
        ),
        "boolean",
    ),
    Field(
        barred("email|mail|contact", "e_mail|mail_address"),
        "email",
        barred(
            "Email: {v}.|The email is {v}.|Write to {v}.|Mail goes to {v}.", "{s} reads mail at {v}.|Reach {s} at {v}."
        ),
    ),
    Field(
        barred("favorite_color|colour|color|favourite_colour", "best_colour"),
        "colour",
        barred(
            "The favourite colour is {v}.|{s} likes the colour {v}.|{s} wears {v}.|The colour is {v}.",
            "{s} prefers the colour {v}.",
        ),
    ),
    Field(
        barred("phone|number|phone_number", "telephone"),
        "number",
        barred("The phone number is {v}.|Phone: {v}.|Call {v}.", "The telephone is {v}."),
        "integer",
    ),
    Field(
        barred("language|speaks", "mother_tongue"),
        "language",
        barred("{s} speaks {v}.|The language is {v}.|{s} talks in {v}.", "{s} grew up with {v}."),
    ),
    Field(
        barred("level|rank|status", "grade"),
        "",
        barred("The level is {v}.|{s} is at level {v}.|Level: {v}.", "{s} has reached the level {v}."),
        "string",
        ("basic", "silver", "gold", "beginner", "expert"),
    ),
)
_OBJECT = (
    Field(
        barred("price|cost|amount", "price_eur"),
        "number",
        barred(
            "It costs {v} euros.|The price is {v}.|The {s} costs {v}.|Price: {v}.",
            "You pay {v} for it.|The {s} sells for {v}.",
        ),
        "integer",
    ),
    Field(
        barred("color|colour|paint", "shade"),
        "colour",
        barred("It is {v}.|The colour is {v}.|The {s} is {v}.|It comes in {v}.", "The {s} has the colour {v}."),
    ),
    Field(
        barred("quantity|count|pieces|stock", "how_many"),
        "small",
        barred("There are {v} pieces.|We have {v} of them.|Quantity: {v}.|{v} are in stock.", "{v} pieces are left."),
        "integer",
    ),
    Field(
        barred("in_stock|available|for_sale", "can_be_bought"),
        "",
        barred(
            "It is available.|It is in stock.|You can buy it now.#It is not available.|It is out of stock.|"
            "It is sold out.",
            "The {s} can be bought.#The {s} cannot be bought.",
        ),
        "boolean",
    ),
    Field(
        barred("size|fit", "how_large"),
        "",
        barred("The size is {v}.|Size: {v}.|It is of {v} size.", "The {s} comes in size {v}."),
        "string",
        ("small", "medium", "large", "tiny", "huge"),
    ),
    Field(
        barred("brand|maker|company", "manufacturer"),
        "proper",
        barred("It is made by {v}.|The brand is {v}.|{v} makes it.|Maker: {v}.", "It comes from the firm {v}."),
    ),
    Field(
        barred("code|sku|id|item_code", "article"),
        "code",
        barred("The code is {v}.|Code: {v}.|Its number is {v}.", "It is filed under {v}."),
    ),
    Field(
        barred("tags|features|keywords", "labels"),
        "word",
        barred("Tags: {v}.|The tags are {v}.|It is tagged {v}.", "It carries the labels {v}."),
        "array",
    ),
    Field(
        barred("owner|seller|person", "belongs_to"),
        "person",
        barred("It belongs to {v}.|The owner is {v}.|{v} owns it.|{v} sells it.", "Its owner is called {v}."),
    ),
)
_EVENT = (
    Field(
        barred("day|date|weekday", "on_day"),
        "day",
        barred("It is on {v}.|The day is {v}.|It takes place on {v}.|Come on {v}.", "It happens on {v}."),
    ),
    Field(
        barred("time|start|start_time|begins", "starting_at"),
        "time",
        barred("It starts at {v}.|The time is {v}.|It begins at {v}.|Be there at {v}.", "The doors open at {v}."),
    ),
    Field(
        barred("place|city|location|venue", "takes_place_in"),
        "city",
        barred("It is in {v}.|The place is {v}.|We meet in {v}.|It takes place in {v}.", "It will be held in {v}."),
    ),
    Field(
        barred("guests|people|attendees|invited", "participants"),
        "person",
        barred("The guests are {v}.|Invited are {v}.|{v} will come.|With {v}.", "We expect {v}."),
        "array",
    ),
    Field(
        barred("seats|places|capacity|tickets", "chairs"),
        "number",
        barred(
            "There are {v} seats.|It has {v} places.|Seats: {v}.|There is room for {v} people.",
            "The hall has {v} seats.",
        ),
        "integer",
    ),
    Field(
        barred("free|is_free|no_fee", "costs_nothing"),
        "",
        barred(
            "It is free.|Entry is free.|You pay nothing.#It is not free.|Entry is not free.|You have to pay.",
            "Nobody has to pay.#Everybody has to pay.",
        ),
        "boolean",
    ),
    Field(
        barred("host|organizer|contact_person", "run_by"),
        "person",
        barred("{v} is the host.|The host is {v}.|It is organised by {v}.|{v} invites you.", "It is hosted by {v}."),
    ),
    Field(
        barred("kind|type|category", "sort"),
        "",
        barred("It is a {v}.|It will be a {v}.|Type: {v}.|The kind is {v}.", "They call it a {v}."),
        "string",
        ("concert", "party", "meeting", "dinner", "lecture", "workshop"),
    ),
    Field(
        barred("food|menu|meals", "dishes"),
        "food",
        barred("There will be {v}.|We serve {v}.|The menu: {v}.", "You can eat {v}."),
        "array",
    ),
)
DOMAINS = (
    (
        barred("name|person|customer", "full_name|client"),
        "person",
        _PERSON,
        barred(
            "This is {v}.|The name is {v}.|Name: {v}.|Meet {v}.|{v} wrote to us.|We talked to {v}.",
            "Let me introduce {v}.|A new client is {v}.",
        ),
    ),
    (
        barred("item|product|name|thing", "article_name|object"),
        "thing",
        _OBJECT,
        barred(
            "We sell a {v}.|Here is a {v}.|Item: {v}.|For sale: a {v}.|The product is a {v}.|I bought a {v}.",
            "We offer a {v}.|Look at this {v}.",
        ),
    ),
    (
        barred("event|title|name", "event_name|occasion"),
        "proper",
        _EVENT,
        barred(
            "The event is called {v}.|Come to {v}.|We present {v}.|Event: {v}.|{v} is coming.",
            "Do not miss {v}.|Join us for {v}.",
        ),
    ),
)

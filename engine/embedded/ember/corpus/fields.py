"""What a text can state of a person, an object or an event, and the names a schema may give it.

Booleans hold the clauses for yes, then `#`, then those for no. `{s}` is what the text is about, `{v}` the value.
"""

from dataclasses import dataclass

from engine.embedded.ember.corpus.conversation import Lists, barred


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
            "{s} has been alive for {v} years.|{s} reached {v} years.|{s} has turned {v}.|{s} has been around for {v} years.|{v} is the age of {s}.|{s} celebrates {v} years.|"
            "{s} was born {v} years ago.|Age: {v}.|{s} will soon be {v}.|At the moment {s} is {v}.|"
            "{s} is {v} years old.|{s} is {v}.|{s} is aged {v}.|{s} just turned {v}.|The age is {v}.",
            "{s} has reached the age of {v}.|{s} has lived for {v} years.",
        ),
        "integer",
    ),
    Field(
        barred("city|home|lives_in|town|location", "residence|home_city"),
        "city",
        barred(
            "{s} stays in {v}.|{s} moved to {v}.|{s} calls {v} home.|You find {s} in {v}.|{s} settled in {v}.|"
            "{s} was raised in {v}.|{s} is at home in {v}.|{s} owns a house in {v}.|{s} lives and works in {v}.|The address is in {v}.|{v} is where {s} lives.|{s} has an office in {v}.|"
            "{s} lives in {v}.|{s} comes from {v}.|{s} is from {v}.|{s} has a flat in {v}.|Home is {v}.",
            "{s} resides in {v}.|{s} has a house in {v}.",
        ),
    ),
    Field(
        barred("job|occupation|work|profession", "trade|job_title"),
        "job",
        barred(
            "{s} trained as a {v}.|{s} is known as a {v}.|By day {s} is a {v}.|{s} has become a {v}.|"
            "{s} found work as a {v}.|Job: {v}.|{s} was hired as a {v}.|{s} gets paid as a {v}.|"
            "{s} makes money as a {v}.|{s} is paid as a {v}.|{s} has a place as a {v}.|{s} earns a living as a {v}.|Everyone needs a {v} like {s}.|{s} works as a {v}.|{s} is a {v}.|{s} earns money as a {v}.|"
            "The job is {v}.",
            "{s} makes a living as a {v}.|{s} is employed as a {v}.",
        ),
    ),
    Field(
        barred("hobbies|likes|interests", "pastimes|activities"),
        "hobby",
        barred(
            "{s} loves {v}.|{s} is keen on {v}.|{s} spends hours on {v}.|In the evening {s} does {v}.|"
            "{s} cannot live without {v}.|{s} relaxes with {v}.|Interests: {v}.|After work it is {v}.|"
            "{s} is mad about {v}.|{s} is good at {v}.|For {s} there is nothing like {v}.|For fun {s} does {v}.|{s} is happy with {v}.|{s} likes {v}.|{s} enjoys {v}.|Hobbies: {v}.|The hobbies are {v}.|"
            "{s} spends weekends with {v}.",
            "{s} is fond of {v}.|For fun there is {v}.",
        ),
        "array",
    ),
    Field(
        barred("member|is_member|subscribed|active", "has_membership|signed_up"),
        "",
        barred(
            "{s} is a member.|{s} pays the club.|{s} counts as a member.|{s} is part of the club.|The club knows {s}.|{s} holds a club card.|"
            "{s} has joined the club.|{s} is in the club.#{s} is not a member.|{s} does not pay the club.|{s} does not count as a member.|{s} is not part of the club.|"
            "{s} left the club.|The club does not know {s}.|{s} has no club card.|"
            "{s} has not joined the club.|{s} is not in the club.",
            "{s} belongs to the club.#{s} does not belong to the club.",
        ),
        "boolean",
    ),
    Field(
        barred("married|is_married", "has_spouse"),
        "",
        barred(
            "{s} is married.|{s} has a wedding ring.|{s} found a partner.|{s} married last year.|"
            "{s} has a partner.#{s} is not married.|{s} has no partner.|{s} never married.|{s} lives alone.|"
            "{s} has not found a partner.|{s} is single.",
            "{s} has married.#{s} has not married.",
        ),
        "boolean",
    ),
    Field(
        barred("email|mail|contact", "e_mail|mail_address"),
        "email",
        barred(
            "You can mail {v}.|Send it to {v}.|{s} uses {v}.|Answers go to {v}.|Ask at {v}.|{s} writes from {v}.|"
            "Contact: {v}.|The inbox is {v}.|Email: {v}.|The email is {v}.|Write to {v}.|Mail goes to {v}.",
            "{s} reads mail at {v}.|Reach {s} at {v}.",
        ),
    ),
    Field(
        barred("favorite_color|colour|color|favourite_colour", "best_colour"),
        "colour",
        barred(
            "{s} picks {v}.|{s} paints in {v}.|Colour: {v}.|{s} wants everything in {v}.|{s} chose {v}.|"
            "{v} is the colour of {s}.|The favourite colour is {v}.|{s} likes the colour {v}.|{s} wears {v}.|"
            "The colour is {v}.",
            "{s} prefers the colour {v}.",
        ),
    ),
    Field(
        barred("phone|number|phone_number", "telephone"),
        "number",
        barred(
            "Number: {v}.|Dial {v}.|{s} answers at {v}.|You reach us under {v}.|Ring {v}.|"
            "The phone number is {v}.|Phone: {v}.|Call {v}.",
            "The telephone is {v}.",
        ),
        "integer",
    ),
    Field(
        barred("language|speaks", "mother_tongue"),
        "language",
        barred(
            "{s} learned {v}.|{s} writes {v}.|{s} thinks in {v}.|At home it is {v}.|{s} sings in {v}.|"
            "{s} understands {v}.|{s} studied {v}.|Language: {v}.|{s} speaks {v}.|The language is {v}.|"
            "{s} talks in {v}.",
            "{s} grew up with {v}.",
        ),
    ),
    Field(
        barred("level|rank|status", "grade"),
        "",
        barred(
            "{s} got to {v}.|{s} has the rank {v}.|{s} made it to {v}.|They gave {s} the level {v}.|"
            "{s} is ranked {v}.|Status: {v}.|The card of {s} says {v}.|The level is {v}.|{s} is at level {v}.|"
            "Level: {v}.",
            "{s} has reached the level {v}.",
        ),
        "string",
        ("basic", "silver", "gold", "beginner", "expert"),
    ),
)
_OBJECT = (
    Field(
        barred("price|cost|amount", "price_eur"),
        "number",
        barred(
            "We ask {v} for it.|It is yours for {v}.|You get it for {v} euros.|{v} euros is what it costs.|"
            "The {s} goes for {v}.|We charge {v}.|Cost: {v}.|It costs {v} euros.|The price is {v}.|"
            "The {s} costs {v}.|Price: {v}.",
            "You pay {v} for it.|The {s} sells for {v}.",
        ),
        "integer",
    ),
    Field(
        barred("color|colour|paint", "shade"),
        "colour",
        barred(
            "It was painted {v}.|We have it in {v}.|Colour: {v}.|It looks {v}.|A {s} in {v}.|You get it in {v}.|"
            "It has a {v} finish.|It is {v}.|The colour is {v}.|The {s} is {v}.|It comes in {v}.",
            "The {s} has the colour {v}.",
        ),
    ),
    Field(
        barred("quantity|count|pieces|stock", "how_many"),
        "small",
        barred(
            "{v} are there.|We keep {v} here.|Stock: {v}.|{v} wait in the store.|We counted {v}.|"
            "Only {v} remain.|We made {v} of them.|There are {v} pieces.|We have {v} of them.|Quantity: {v}.|"
            "{v} are in stock.",
            "{v} pieces are left.",
        ),
        "integer",
    ),
    Field(
        barred("in_stock|available|for_sale", "can_be_bought"),
        "",
        barred(
            "It is available.|We can send it today.|You can have it.|It can be ordered.|The {s} can be had.|"
            "It is in stock.|You can buy it now.#It is not available.|We cannot send it.|You cannot have it.|"
            "It cannot be ordered.|The {s} cannot be had.|It is out of stock.|"
            "It is sold out.",
            "The {s} can be bought.#The {s} cannot be bought.",
        ),
        "boolean",
    ),
    Field(
        barred("size|fit", "how_large"),
        "",
        barred(
            "It is a {v} one.|The {s} is {v}.|We only have {v}.|It measures {v}.|You get it in {v}.|"
            "The size is {v}.|Size: {v}.|It is of {v} size.",
            "The {s} comes in size {v}.",
        ),
        "string",
        ("small", "medium", "large", "tiny", "huge"),
    ),
    Field(
        barred("brand|maker|company", "manufacturer"),
        "proper",
        barred(
            "{v} built it.|It was designed by {v}.|We get it from {v}.|It is a {v}.|{v} stands behind it.|"
            "Brand: {v}.|The label says {v}.|It is made by {v}.|The brand is {v}.|{v} makes it.|Maker: {v}.",
            "It comes from the firm {v}.",
        ),
    ),
    Field(
        barred("code|sku|id|item_code", "article"),
        "code",
        barred(
            "Look for {v}.|It is listed as {v}.|You find it under {v}.|The tag reads {v}.|Item {v}.|"
            "We call it {v}.|The code is {v}.|Code: {v}.|Its number is {v}.",
            "It is filed under {v}.",
        ),
    ),
    Field(
        barred("tags|features|keywords", "labels"),
        "word",
        barred(
            "Labels: {v}.|It is known for {v}.|Think of {v}.|Its words are {v}.|People say {v}.|Tags: {v}.|"
            "The tags are {v}.|It is tagged {v}.",
            "It carries the labels {v}.",
        ),
        "array",
    ),
    Field(
        barred("owner|seller|person", "belongs_to"),
        "person",
        barred(
            "{v} has it now.|It was bought by {v}.|Ask {v} about it.|{v} keeps it.|Owner: {v}.|"
            "It is in the hands of {v}.|It belongs to {v}.|The owner is {v}.|{v} owns it.|{v} sells it.",
            "Its owner is called {v}.",
        ),
    ),
)
_EVENT = (
    Field(
        barred("day|date|weekday", "on_day"),
        "day",
        barred(
            "We start on {v}.|See you {v}.|Day: {v}.|Mark {v}.|It was moved to {v}.|Keep {v} free.|It is on {v}.|"
            "The day is {v}.|It takes place on {v}.|Come on {v}.",
            "It happens on {v}.",
        ),
    ),
    Field(
        barred("time|start|start_time|begins", "starting_at"),
        "time",
        barred(
            "We open at {v}.|From {v} on.|Time: {v}.|Come at {v}.|The first guests come at {v}.|"
            "It goes from {v}.|It starts at {v}.|The time is {v}.|It begins at {v}.|Be there at {v}.",
            "The doors open at {v}.",
        ),
    ),
    Field(
        barred("place|city|location|venue", "takes_place_in"),
        "city",
        barred(
            "Travel to {v}.|See you in {v}.|City: {v}.|{v} is the place.|We booked a hall in {v}.|"
            "It comes to {v}.|You find us in {v}.|It is in {v}.|The place is {v}.|We meet in {v}.|"
            "It takes place in {v}.",
            "It will be held in {v}.",
        ),
    ),
    Field(
        barred("guests|people|attendees|invited", "participants"),
        "person",
        barred(
            "We asked {v}.|You will meet {v}.|Guests: {v}.|On the list are {v}.|{v} said yes.|We wait for {v}.|"
            "Together with {v}.|The guests are {v}.|Invited are {v}.|{v} will come.|With {v}.",
            "We expect {v}.",
        ),
        "array",
    ),
    Field(
        barred("seats|places|capacity|tickets", "chairs"),
        "number",
        barred(
            "We have {v} chairs.|Up to {v} people can come.|The room takes {v}.|Capacity: {v}.|"
            "We put out {v} chairs.|There are {v} seats.|It has {v} places.|Seats: {v}.|"
            "There is room for {v} people.",
            "The hall has {v} seats.",
        ),
        "integer",
    ),
    Field(
        barred("free|is_free|no_fee", "costs_nothing"),
        "",
        barred(
            "It is free.|Nobody pays.|There is nothing to pay.|It costs nothing.|No guest has to pay.|"
            "Entry is free.|You pay nothing.#It is not free.|Everybody pays.|It costs money.|"
            "All guests have to pay.|Each of us has to pay.|Entry is not free.|You have to pay.",
            "Nobody has to pay.#Everybody has to pay.",
        ),
        "boolean",
    ),
    Field(
        barred("host|organizer|contact_person", "run_by"),
        "person",
        barred(
            "{v} runs it.|{v} leads the evening.|Ask {v}.|Host: {v}.|It is the idea of {v}.|"
            "{v} takes care of it.|{v} is the host.|The host is {v}.|It is organised by {v}.|{v} invites you.",
            "It is hosted by {v}.",
        ),
    ),
    Field(
        barred("kind|type|category", "sort"),
        "",
        barred(
            "We plan a {v}.|Think of a {v}.|This {v} is for all.|Kind: {v}.|It started as a {v}.|It is a {v}.|"
            "It will be a {v}.|Type: {v}.|The kind is {v}.",
            "They call it a {v}.",
        ),
        "string",
        ("concert", "party", "meeting", "dinner", "lecture", "workshop"),
    ),
    Field(
        barred("food|menu|meals", "dishes"),
        "food",
        barred(
            "We cook {v}.|Enjoy {v}.|On the table: {v}.|Try the {v}.|The kitchen makes {v}.|Food: {v}.|"
            "There will be {v}.|We serve {v}.|The menu: {v}.",
            "You can eat {v}.",
        ),
        "array",
    ),
)
DOMAINS = (
    (
        barred("name|person|customer", "full_name|client"),
        "person",
        _PERSON,
        barred(
            "Say hello to {v}.|Please welcome {v}.|I would like to present {v}.|Today we meet {v}.|"
            "Have you met {v}?|Our customer is {v}.|We have a guest, {v}.|I know {v}.|Here comes {v}.|"
            "This is {v}.|The name is {v}.|Name: {v}.|Meet {v}.|{v} wrote to us.|We talked to {v}.|Let me present {v}.|"
            "Let us meet {v}.|Allow me to introduce {v}.|May I introduce {v}?|A new guest is {v}.|A new member is {v}.|"
            "Our new colleague is {v}.|The new customer is {v}.|I introduce {v}.|Let me tell you about {v}.|"
            "A friend of mine is {v}.|Say hi to {v}.|Somebody called {v} came.|There is a client named {v}.|"
            "The client is {v}.|We have a new one: {v}.|Next is {v}.|Here we have {v}.|A person named {v} called.",
            "Let me introduce {v}.|A new client is {v}.",
        ),
    ),
    (
        barred("item|product|name|thing", "article_name|object"),
        "thing",
        _OBJECT,
        barred(
            "I have a {v}.|There is a {v}.|Buy a {v}.|This {v} is for you.|Have a look at our {v}.|"
            "You need a {v}.|New: a {v}.|They brought a {v}.|We make a {v}.|We sell a {v}.|Here is a {v}.|"
            "Item: {v}.|For sale: a {v}.|The product is a {v}.|I bought a {v}.|Look at my {v}.|Look at the {v}.|See this {v}.|"
            "We can offer you a {v}.|They offer a {v}.|My offer is a {v}.|Take this {v}.|Think of a {v}.|A {v} came in.|"
            "We found a {v}.|Let me show you a {v}.|It is a {v}.",
            "We offer a {v}.|Look at this {v}.",
        ),
    ),
    (
        barred("event|title|name", "event_name|occasion"),
        "proper",
        _EVENT,
        barred(
            "We invite you to {v}.|Save the date for {v}.|Welcome to {v}.|{v} is here again.|You will love {v}.|"
            "This year we do {v}.|Everyone talks about {v}.|The event is called {v}.|Come to {v}.|"
            "We present {v}.|Event: {v}.|{v} is coming.|Do come to {v}.|Do not forget {v}.|You must not miss {v}.|Join {v}.|"
            "Be part of {v}.|Take part in {v}.|Let us go to {v}.|We look forward to {v}.|Soon there is {v}.|"
            "Let me tell you of {v}.|Visit {v}.|They planned {v}.|It is time for {v}.",
            "Do not miss {v}.|Join us for {v}.",
        ),
    ),
)

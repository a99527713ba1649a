"""Calling a tool the prompt lists, with arguments in the user's own words; using its result; or calling none.

A `Kind` is one sort of tool. Its names, descriptions and parameter names vary, some are made of syllables that mean
nothing, so that the model reads them in the prompt. Optional arguments that the user does not mention are left out.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import words
from .conversation import Conversation, Exchange, Expected, Lists, Message, Split, assistant, user
from .phrasing import fill, say


@dataclass(frozen=True)
class Param:
    """`slot` is the word in the phrasings; `names` what a tool may call it; `kind` where its values come from."""

    slot: str
    names: Lists
    kind: str
    about: str
    json_type: str = "string"
    choices: tuple[str, ...] = ()
    mention: Lists | None = None  # how an optional argument is mentioned; None: required

    def draw(self, rng: random.Random, split: Split) -> tuple[str, Any]:
        """The words of the user, and the argument they mean."""
        if self.choices:
            choice = rng.choice(self.choices)
            return choice, choice
        text = words.value(rng, self.kind, split)
        return text, int(text) if self.json_type == "integer" else text


@dataclass(frozen=True)
class Kind:
    names: Lists
    about: tuple[str, ...]
    params: tuple[Param, ...]
    asks: Lists
    result: Callable[[random.Random], Mapping[str, Any]]


def _w(train: str, held_out: str) -> Lists:
    return Lists(tuple(train.split("|")), tuple(held_out.split("|")))


_DONE = ({"status": "ok"}, {"status": "done"}, {"ok": True}, {"success": True})


def _done(rng: random.Random) -> Mapping[str, Any]:
    return rng.choice(_DONE)


def _words_result(*keys: str) -> Callable[[random.Random], Mapping[str, Any]]:
    def make(rng: random.Random) -> Mapping[str, Any]:
        result: dict[str, Any] = {}
        for key in keys:
            name, kind = key.split(":")
            text = words.value(rng, kind, Split.TRAIN)
            result[name] = int(text) if kind in ("number", "small") else text
        return result

    return make


_UNIT = Param("unit", _w("unit|units|scale", "temperature_unit|degrees_in"), "", "The unit", choices=("celsius", "fahrenheit"),
              mention=_w(" in {unit}| in {unit} please|, {unit} please|, use {unit}", " using {unit}|, and give it in {unit}"))
_CITY = Param("city", _w("city|location|place|town|city_name", "where|destination_city|municipality"), "city", "The city")
_DAY = Param("day", _w("day|date|when", "on_day|which_day"), "day", "The day",
             mention=_w(" on {day}| for {day}|, {day}", ", on {day} please"))
_TIME = Param("time", _w("time|at|clock|hour", "at_time|start"), "time", "The time as HH:MM")
_WHO = Param("who", _w("to|recipient|person|contact|name", "addressee|receiver"), "person", "The person")

KINDS: tuple[Kind, ...] = (
    Kind(_w("get_weather|weather|current_weather|fetch_weather|check_weather|weather_lookup|get_forecast", "weather_report|forecast_for|look_up_weather"),
         ("Get the weather in a city", "Current weather for a place", "Weather forecast"), (_CITY, _UNIT, _DAY),
         _w("What is the weather in {city}?|How is the weather in {city}?|Weather in {city}?|Is it raining in {city}?|Do I need an umbrella in {city}?|"
            "Tell me the weather in {city}.|How warm is it in {city}?|Is it cold in {city}?|Check the weather for {city}.|What's the weather like in {city}?",
            "Can you tell me how the weather is in {city}?|Is it sunny in {city}?|I need the weather for {city}."),
         _words_result("temperature:small", "condition:word")),
    Kind(_w("get_time|current_time|time_in|clock|local_time|world_clock", "time_now_in|fetch_time"),
         ("Get the local time in a city", "Current time in a place"), (_CITY,),
         _w("What time is it in {city}?|Time in {city}?|Tell me the time in {city}.|What is the local time in {city}?|How late is it in {city}?|Current time in {city}, please.",
            "Can you tell me the time in {city}?|What does the clock say in {city}?"),
         _words_result("time:time")),
    Kind(_w("send_message|message|text_person|send_text|send_sms", "write_message|post_message"),
         ("Send a message to a person", "Send a text message"),
         (_WHO, Param("text", _w("text|message|body|content", "words|note_text"), "task", "What to say")),
         _w("Send {who} the message {text}.|Tell {who}: {text}.|Message {who}: {text}.|Text {who}: {text}.|Send a message to {who}: {text}.|Write to {who}: {text}.",
            "Let {who} know: {text}.|Please send {who} this message: {text}."), _done),
    Kind(_w("set_alarm|alarm|add_alarm|create_alarm|wake_up", "new_alarm|schedule_alarm"),
         ("Set an alarm", "Set an alarm for a time"),
         (_TIME, Param("label", _w("label|title|name", "caption|tag"), "word", "A label", mention=_w(" called {label}| with the label {label}| named {label}", " labelled {label}"))),
         _w("Set an alarm for {time}|Wake me at {time}|Wake me up at {time}|Alarm at {time}|I need an alarm at {time}|Please set an alarm at {time}|Make an alarm for {time}",
            "I want an alarm for {time}|Add an alarm at {time}"), _done),
    Kind(_w("create_reminder|remind|add_reminder|set_reminder|reminder", "new_reminder|remember_task"),
         ("Create a reminder", "Remind the user of a task"),
         (Param("task", _w("task|what|text|title", "to_do|matter"), "task", "What to remember"),
          Param("time", _w("time|at|when", "at_time|due"), "time", "When, as HH:MM", mention=_w(" at {time}|, at {time}", ", at {time} please"))),
         _w("Remind me to {task}|Please remind me to {task}|Set a reminder to {task}|Do not let me forget to {task}|I have to {task}, remind me|Reminder: {task}",
            "Make a reminder to {task}|I want a reminder to {task}"), _done),
    Kind(_w("add_todo|add_task|todo|create_task|new_task", "put_on_list|append_task"),
         ("Add a task to the list", "Add a to-do item"), (Param("task", _w("task|item|title|what", "to_do|entry"), "task", "The task"),),
         _w("Add {task} to my list.|Put {task} on my to-do list.|New task: {task}.|Add a task: {task}.|To do: {task}.|Add to my tasks: {task}.",
            "Please put {task} on the list.|Write {task} on my list."), _done),
    Kind(_w("set_timer|timer|start_timer|countdown", "begin_timer|run_timer"),
         ("Start a timer", "Set a countdown in minutes"),
         (Param("minutes", _w("minutes|duration|length|min", "minute_count|for_minutes"), "small", "Minutes", "integer"),),
         _w("Set a timer for {minutes} minutes.|Timer for {minutes} minutes.|Start a timer of {minutes} minutes.|Count down {minutes} minutes.|{minutes} minute timer, please.|Give me {minutes} minutes on the timer.",
            "I need a timer for {minutes} minutes.|Please run a timer of {minutes} minutes."), _done),
    Kind(_w("play_music|play_song|play|music_player|start_music", "put_on_music|song_player"),
         ("Play a song", "Play music"), (Param("song", _w("song|title|track|music", "piece|tune"), "proper", "The song"),
         Param("artist", _w("artist|singer|by|band", "performer"), "person", "The artist", mention=_w(" by {artist}| from {artist}", " sung by {artist}"))),
         _w("Play {song}|Play the song {song}|I want to hear {song}|Put on {song}|Start the song {song}|Please play {song}",
            "Let me hear {song}|Could you play {song}"), _done),
    Kind(_w("translate|translate_text|translator|to_language", "translation|convert_language"),
         ("Translate a word", "Translate text into a language"),
         (Param("text", _w("text|word|phrase|input", "source|expression"), "word", "What to translate"),
          Param("language", _w("language|target|to|lang", "target_language|into"), "language", "The language")),
         _w("Translate {text} into {language}.|Translate {text} to {language}.|What is {text} in {language}?|How do you say {text} in {language}?|Say {text} in {language}.|Give me {text} in {language}.",
            "Please translate {text} to {language}.|What does one say in {language} for {text}?"), _words_result("translation:word")),
    Kind(_w("turn_on|lights|switch_light|set_light|light", "light_switch|lamp_control"),
         ("Switch a light on or off", "Control the light in a room"),
         (Param("room", _w("room|where|place|area", "space|zone"), "", "The room",
                choices=("kitchen", "bedroom", "bathroom", "hall", "garden", "office", "cellar", "garage")),
          Param("state", _w("state|mode|switch|status", "position"), "", "on or off", choices=("on", "off"))),
         _w("Turn the light in the {room} {state}.|Switch {state} the {room} light.|{room} light {state}.|Turn {state} the light in the {room}.|Lights {state} in the {room}.|Please turn the {room} light {state}.",
            "I want the light {state} in the {room}.|Set the {room} light to {state}."), _done),
    Kind(_w("set_temperature|thermostat|heating|set_heat|temperature", "heat_control|adjust_temperature"),
         ("Set the temperature at home", "Set the heating in degrees"),
         (Param("degrees", _w("degrees|temperature|value|target", "heat_level|deg"), "small", "Degrees", "integer"),),
         _w("Set the heating to {degrees} degrees.|Make it {degrees} degrees.|Set the temperature to {degrees}.|Heat the house to {degrees} degrees.|Thermostat to {degrees}.|I want {degrees} degrees in here.",
            "Put the heating at {degrees} degrees.|Please set {degrees} degrees at home."), _done),
    Kind(_w("book_hotel|reserve_room|hotel_booking|find_hotel|hotel", "hotel_reservation|get_room"),
         ("Book a hotel in a city", "Reserve a hotel room"),
         (_CITY, Param("nights", _w("nights|stay|num_nights", "night_count"), "small", "How many nights", "integer", mention=_w(" for {nights} nights|, {nights} nights", ", staying {nights} nights"))),
         _w("Book a hotel in {city}|I need a hotel in {city}|Find me a hotel in {city}|Reserve a room in {city}|Book me a room in {city}|Get me a hotel in {city}",
            "Please arrange a hotel in {city}|I want to book a hotel in {city}"), _words_result("hotel:proper", "price:number")),
    Kind(_w("book_flight|find_flights|flight_search|search_flights|flights", "get_flight|flight_finder"),
         ("Search flights between two cities", "Book a flight"),
         (Param("origin", _w("origin|from|from_city|start", "departure|leaving_from"), "city", "Where the flight starts"),
          Param("goal", _w("destination|to|to_city|goal", "arrival|flying_to"), "city", "Where the flight goes"), _DAY),
         _w("Find a flight from {origin} to {goal}|Book a flight from {origin} to {goal}|I want to fly from {origin} to {goal}|Flights from {origin} to {goal}|Search flights from {origin} to {goal}|Is there a flight from {origin} to {goal}",
            "I need a flight from {origin} to {goal}|Please look for flights from {origin} to {goal}"), _words_result("flight:code", "price:number")),
    Kind(_w("get_stock|stock_price|share_price|quote|stock", "market_price|price_of_share"),
         ("Get the price of a share", "Look up a stock price"), (Param("company", _w("company|symbol|ticker|name", "firm|issuer"), "proper", "The company"),),
         _w("What is the share price of {company}?|Stock price of {company}?|How much is a share of {company}?|Get me the stock price of {company}.|How is the stock of {company} doing?|Price of {company} shares, please.",
            "Look up the share price of {company}.|What does one share of {company} cost?"), _words_result("price:number")),
    Kind(_w("convert_currency|currency|exchange|money_convert", "exchange_money|currency_change"),
         ("Convert money into another currency", "Currency conversion"),
         (Param("amount", _w("amount|value|sum|quantity", "how_much"), "number", "How much money", "integer"),
          Param("source", _w("from|source|from_currency", "old_currency"), "", "Currency to convert from", choices=("euros", "dollars", "pounds", "yen", "francs", "rupees")),
          Param("target", _w("to|target|to_currency", "new_currency"), "", "Currency to convert to", choices=("kroner", "pesos", "zloty", "won", "rand", "lira"))),
         _w("Convert {amount} {source} to {target}.|How much is {amount} {source} in {target}?|Change {amount} {source} into {target}.|What is {amount} {source} in {target}?|{amount} {source} to {target}, please.",
            "Exchange {amount} {source} for {target}.|I have {amount} {source}, how much is that in {target}?"), _words_result("amount:number")),
    Kind(_w("search_web|web_search|search|find|look_up", "internet_search|query_web"),
         ("Search the web", "Look something up on the internet"), (Param("query", _w("query|q|text|term", "search_term|keywords"), "word", "What to look for"),
         Param("limit", _w("limit|count|max_results|n", "top"), "small", "How many results", "integer", mention=_w(", {limit} results| and give me {limit} results|, at most {limit} results", ", show {limit} results"))),
         _w("Search the web for {query}|Look up {query} on the internet|Search for {query}|Find {query} online|Google {query}|Do a web search for {query}",
            "Search online for {query}|Please look for {query} on the web"), _words_result("title:proper")),
    Kind(_w("define_word|dictionary|define|meaning|word_meaning", "lookup_definition|explain_word"),
         ("Look up the meaning of a word", "Dictionary"), (Param("word", _w("word|term|text", "vocable|entry"), "word", "The word"),),
         _w("What does {word} mean?|Define {word}.|What is the meaning of {word}?|Look up the word {word}.|Meaning of {word}?|Give me the definition of {word}.",
            "Find the definition of {word}.|What is meant by {word}?"), _words_result("meaning:word")),
    Kind(_w("order_food|food_order|order_meal|order|buy_food", "meal_order|deliver_food"),
         ("Order food", "Order a meal for delivery"), (Param("food", _w("food|dish|meal|item", "what_to_eat"), "food", "The dish"),
         Param("count", _w("count|quantity|amount|portions", "servings"), "small", "How many portions", "integer", mention=_w(", {count} portions| for {count} people|, {count} times", ", make it {count} portions"))),
         _w("Order {food}|I want to order {food}|Get me {food}|Please order {food}|Order some {food}|I am hungry, order {food}",
            "Have {food} delivered|I would like {food}"), _words_result("order:code")),
    Kind(_w("create_event|add_event|calendar|schedule_meeting|new_event", "plan_event|put_in_calendar"),
         ("Add an event to the calendar", "Schedule a meeting"),
         (Param("person", _w("person|with|guest|attendee", "participant"), "person", "Whom to meet"), Param("day", _w("day|date|on", "on_day"), "day", "The day"),
          Param("time", _w("time|at|start", "at_time"), "time", "The time", mention=_w(" at {time}|, at {time}", ", starting {time}"))),
         _w("Schedule a meeting with {person} {day}|Plan a meeting with {person} {day}|Put a meeting with {person} in my calendar for {day}|Meet {person} {day}|Add a meeting with {person} on {day}|I meet {person} on {day}, note it",
            "Arrange a meeting with {person} for {day}|Set up a meeting with {person} {day}"), _done),
    Kind(_w("call_person|phone|call|dial|make_call", "start_call|ring"),
         ("Call a person", "Make a phone call"), (Param("who", _w("person|name|contact|who", "callee|whom"), "person", "Whom to call"),),
         _w("Call {who}.|Phone {who}.|Ring {who}, please.|Make a call to {who}.|Dial {who}.|I want to talk to {who} on the phone.|Please call {who}.",
            "Give {who} a call.|Get {who} on the phone."), _done),
    Kind(_w("send_email|email|mail|write_email", "email_sender|compose_mail"),
         ("Send an email", "Write an email to an address"), (Param("address", _w("to|address|email|recipient", "mail_address|mailbox"), "email", "The address"),
         Param("subject", _w("subject|title|about|topic", "heading"), "word", "The subject", mention=_w(" about {subject}| with the subject {subject}", " with subject {subject}"))),
         _w("Send an email to {address}|Email {address}|Write an email to {address}|Mail {address}|Send a mail to {address}",
            "Please email {address}|Compose an email to {address}"), _done),
    Kind(_w("track_order|order_status|find_parcel|parcel|tracking", "where_is_parcel|shipment_status"),
         ("Track an order", "Find out where a parcel is"), (Param("order", _w("order|order_id|id|number", "parcel_code|shipment"), "code", "The order number"),),
         _w("Where is my order {order}?|Track order {order}.|What is the status of order {order}?|Track my parcel {order}.|Find parcel {order}.|Has {order} arrived?",
            "Please track {order} for me.|Where has parcel {order} got to?"), _words_result("status:word", "day:day")),
    Kind(_w("get_distance|distance|route_length|measure_distance|how_far", "distance_between|compute_distance"),
         ("Distance between two cities", "How far two places are apart"),
         (Param("origin", _w("from|origin|start|a", "first_place"), "city", "The first place"), Param("goal", _w("to|destination|end|b", "second_place"), "city", "The second place")),
         _w("How far is it from {origin} to {goal}?|Distance from {origin} to {goal}?|What is the distance between {origin} and {goal}?|How many kilometres from {origin} to {goal}?|Measure from {origin} to {goal}.",
            "How long is the way from {origin} to {goal}?|Tell me the distance from {origin} to {goal}."), _words_result("kilometres:number")),
    Kind(_w("take_note|note|add_note|save_note|write_note", "new_note|store_note"),
         ("Save a note", "Write a note"), (Param("text", _w("text|note|content|body", "memo|lines"), "task", "The note"),),
         _w("Note: {text}.|Take a note: {text}.|Write down: {text}.|Save a note: {text}.|Make a note: {text}.|Keep this note: {text}.",
            "Please note down: {text}.|Store the note: {text}."), _done),
    Kind(_w("set_volume|volume|loudness|sound", "sound_level|change_volume"),
         ("Set the volume", "Set how loud the speaker is"), (Param("level", _w("level|volume|percent|value", "strength"), "small", "The volume", "integer"),),
         _w("Set the volume to {level}.|Volume {level}.|Make the volume {level}.|Turn the sound to {level}.|Volume to {level}, please.|Change the volume to {level}.",
            "Put the volume at {level}.|I want the volume at {level}."), _done),
    Kind(_w("open_app|launch|start_app|open|run_app", "app_starter|launch_program"),
         ("Open an app", "Start a program"), (Param("app", _w("app|name|program|application", "app_name|software"), "word", "The app"),),
         _w("Open {app}.|Start {app}.|Launch {app}.|Open the app {app}.|Please open {app}.|Start the program {app}.",
            "Could you open {app}?|Bring up the app {app}."), _done),
    Kind(_w("find_recipe|recipe|get_recipe|recipes|cook", "recipe_for|cooking_help"),
         ("Find a recipe", "Get a recipe for a dish"), (Param("dish", _w("dish|food|meal|name", "what_to_cook"), "food", "The dish"),
         Param("vegan", _w("vegan|vegetarian|no_meat", "plant_based"), "", "Without animals", "boolean", mention=_w(", vegan|, it must be vegan| without meat", ", strictly vegan"))),
         _w("Find a recipe for {dish}|How do I cook {dish}|Recipe for {dish}|I want to cook {dish}|Give me a recipe for {dish}|How do I make {dish}",
            "Look up a recipe for {dish}|Please find me a {dish} recipe"), _words_result("recipe:proper", "minutes:small")),
    Kind(_w("lock_door|door|door_lock|set_lock", "door_control|secure_door"),
         ("Lock or unlock a door", "Control the lock of a door"), (Param("door", _w("door|which|name", "entrance"), "", "Which door", choices=("front", "back", "garage", "cellar", "garden")),
         Param("action", _w("action|mode|do", "operation"), "", "lock or unlock", choices=("lock", "unlock"))),
         _w("{action} the {door} door.|Please {action} the {door} door.|Can you {action} the {door} door?|I want you to {action} the {door} door.",
            "Would you {action} the {door} door?|Now {action} the {door} door please."), _done),
    Kind(_w("get_population|population|people_count|inhabitants", "count_people|population_lookup"),
         ("Population of a city", "How many people live in a place"), (_CITY,),
         _w("How many people live in {city}?|Population of {city}?|What is the population of {city}?|How big is {city}?|Tell me how many people live in {city}.",
            "How many inhabitants are in {city}?|What population has {city}?"), _words_result("population:number")),
    Kind(_w("buy_ticket|tickets|book_ticket|get_tickets", "ticket_office|purchase_tickets"),
         ("Buy tickets for a show", "Buy tickets"), (Param("show", _w("show|event|film|title", "performance"), "proper", "The show"),
         Param("count", _w("count|tickets|quantity|number", "how_many|seats"), "small", "How many tickets", "integer")),
         _w("Buy {count} tickets for {show}.|Get me {count} tickets for {show}.|I need {count} tickets to {show}.|Book {count} tickets for {show}.|{count} tickets for {show}, please.",
            "I would like {count} tickets for {show}.|Order {count} tickets to see {show}."), _words_result("order:code")),
    Kind(_w("calculate|calculator|multiply|compute", "do_math|calc_product"),
         ("Multiply two numbers", "Product of two numbers"),
         (Param("a", _w("a|x|first", "left"), "number", "First number", "integer"), Param("b", _w("b|y|second", "right"), "number", "Second number", "integer")),
         _w("What is {a} times {b}?|Multiply {a} by {b}.|Calculate {a} times {b}.|{a} times {b}?|Compute {a} times {b}.|How much is {a} times {b}?",
            "What is {a} multiplied by {b}?|Work out {a} times {b}."), _words_result("result:number")),
    Kind(_w("find_contact|contact|phone_book|get_contact|lookup_person", "person_info|address_book"),
         ("Find the phone number of a person", "Look up a contact"), (Param("who", _w("name|person|contact|who", "full_name|individual"), "full_name", "The person"),),
         _w("What is the phone number of {who}?|Find the number of {who}.|Look up {who} in my contacts.|Phone number of {who}?|Give me the contact of {who}.|Do you have the number of {who}?",
            "Search my contacts for {who}.|Which phone number has {who}?"), _words_result("phone:number")),
)


def tools(rng: random.Random, split: Split, other: Callable[[random.Random, Split], Exchange]) -> Conversation:
    """A prompt with one to four tools, and a request that one of them, or none of them, can meet."""
    count = rng.choice((1, 1, 2, 2, 3, 3, 4))
    kinds = rng.sample(KINDS, count)
    listed = [_Tool(rng, split, kind) for kind in kinds]
    if rng.random() < 0.22:
        listed[0] = _Tool(rng, split, None)
    definitions = tuple(tool.definition for tool in listed)
    if len({definition["function"]["name"] for definition in definitions}) < count:
        return tools(rng, split, other)
    draw = rng.random()
    if draw < 0.14:
        return _none_fits(rng, split, kinds, definitions, other)
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
        elif rng.random() < 0.25:
            question, arguments = called.request(rng, split)
            messages += [user(question), _calling({"name": called.name, "arguments": arguments})]
    return Conversation("tools", (*before, *messages), tuple(order), expected)


def _calling(call: Mapping[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": dict(call)}]}


_NO_TOOL = "None of my tools can do that."


def _none_fits(rng: random.Random, split: Split, kinds: list[Kind], definitions: tuple[Mapping[str, Any], ...],
               other: Callable[[random.Random, Split], Exchange]) -> Conversation:
    if rng.random() < 0.5:
        rest = other(rng, split)
        return Conversation("tools", rest.messages, definitions, Expected(rest.expected.holds, rest.expected.lacks, no_call=True))
    absent = rng.choice([kind for kind in KINDS if not any(kind.about[0].split()[:2] == one.about[0].split()[:2] for one in kinds)])
    question, _ = _Tool(rng, split, absent).request(rng, split)
    return Conversation("tools", (user(question), assistant(_NO_TOOL)), definitions, Expected(holds=("None of my tools",), no_call=True))


def _result(rng: random.Random, split: Split, tool: "_Tool") -> Mapping[str, Any]:
    if rng.random() < 0.12:
        return {"error": rng.choice(("not found", "no connection", "not allowed", "try later", f"unknown {words.made_up(rng, split)}"))}
    if tool.kind is None or rng.random() < 0.3:
        keys = {words.made_up(rng, split): rng.choice(("word", "number", "proper", "code")) for _ in range(rng.choice((1, 2, 3)))}
        values = {key: words.value(rng, kind, split) for key, kind in keys.items()}
        return {key: int(text) if keys[key] == "number" else text for key, text in values.items()}
    return tool.kind.result(rng)


def _report(result: Mapping[str, Any]) -> str:
    """What Ember says to a tool's result: done, the failure, or each value under its name."""
    if "error" in result:
        return f"The tool failed: {result['error']}."
    if list(result)[0] in ("status", "ok", "success") and list(result.values())[0] in ("ok", "done", True):
        return "Done."
    parts = [f"{key.replace('_', ' ')} is {value}" for key, value in result.items()]
    return "The " + ", the ".join(parts) + "."


class _Tool:
    """One tool as a prompt lists it: a kind with its names chosen, or (kind None) a made-up one."""

    def __init__(self, rng: random.Random, split: Split, kind: Kind | None) -> None:
        self.kind = kind
        self.params: list[tuple[str, Param]] = []
        if kind is None:
            self._make_up(rng, split)
        else:
            self._take(rng, split, kind)

    def _take(self, rng: random.Random, split: Split, kind: Kind) -> None:
        self.name = kind.names.pick(rng, split)
        if split is Split.TRAIN and rng.random() < 0.35:
            made_up = words.made_up(rng, split)
            self.name = rng.choice((f"{self.name}_{made_up}", f"{made_up}_{self.name}", made_up))
        for param in kind.params:
            if param.mention is not None and rng.random() < 0.4:
                continue
            name = param.names.pick(rng, split)
            if split is Split.TRAIN and rng.random() < 0.2:
                name = rng.choice((f"{name}_{words.made_up(rng, split)}", f"the_{name}", f"{name}_value", f"target_{name}"))
            if name not in [taken for taken, _ in self.params]:
                self.params.append((name, param))
            else:
                self.params.append((f"{name}_{param.slot}", param))
        self.definition = self._define(rng, rng.choice(kind.about))

    def _make_up(self, rng: random.Random, split: Split) -> None:
        self.name = rng.choice((f"{words.made_up(rng, split)}_{words.made_up(rng, split)}", words.made_up(rng, split, 2),
                                f"{rng.choice(('get', 'set', 'run', 'do', 'make', 'find'))}_{words.made_up(rng, split)}"))
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            name = words.made_up(rng, split)
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
        """The user's sentence, and the arguments it holds in the order the tool lists them."""
        if self.kind is None:
            return self._explicit(rng, split)
        template = self.kind.asks.pick(rng, split)
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
        shuffled = list(texts.items())
        rng.shuffle(shuffled)
        pairs = joined.join(fill(pair, {"key": key, "value": text}) for key, text in shuffled)
        return fill(style, {"tool": self.name, "pairs": pairs}), arguments


EXPLICIT = Lists(
    ("Call {tool} with {pairs}.", "Use {tool} with {pairs}.", "Run {tool} with {pairs}.", "{tool}: {pairs}", "Please call {tool}, {pairs}.",
     "Use the tool {tool} with {pairs}.", "I want you to run {tool} with {pairs}.", "call {tool} with {pairs}", "Do {tool} for {pairs}.",
     "Execute {tool} with {pairs}."),
    ("Could you call {tool} with {pairs}?", "Invoke {tool} with {pairs}.", "Please use {tool} with {pairs}."),
)
PAIR = Lists(("{key} {value}", "{key} set to {value}", "{key} = {value}", "{key} as {value}", "the {key} {value}", "{key}: {value}", "{value} as {key}"),
             ("{key} being {value}", "{key} equal to {value}"))
PAIR_JOIN = Lists((" and ", ", ", " and ", ", and "), (" and also ",))

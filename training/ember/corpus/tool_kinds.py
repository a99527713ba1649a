"""The kinds of tool that training lists: their names, parameters, requests and results.

A `Kind` is data. Names and phrasings have separate lists for the evaluation, whose names are not seen in training.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from training.ember.corpus import words
from training.ember.corpus.conversation import Lists, Split, barred


@dataclass(frozen=True)
class Param:
    """A parameter: its name `slot` in the phrasings, its `names` in tools, and the `kind` of its values."""

    slot: str
    names: Lists
    kind: str
    about: str
    json_type: str = "string"
    choices: tuple[str, ...] = ()
    mention: Lists | None = None  # phrases that mention an optional argument; None if it is required

    def draw(self, rng: random.Random, split: Split) -> tuple[str, Any]:
        """Return the user's words for a value, and the value as an argument."""
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


DONE = ({"status": "ok"}, {"status": "done"}, {"ok": True}, {"success": True})


def _done(rng: random.Random) -> Mapping[str, Any]:
    return rng.choice(DONE)


def _words_result(*keys: str) -> Callable[[random.Random], Mapping[str, Any]]:
    def make(rng: random.Random) -> Mapping[str, Any]:
        result: dict[str, Any] = {}
        for key in keys:
            name, kind = key.split(":")
            text = words.value(rng, kind, Split.TRAIN)
            result[name] = int(text) if kind in ("number", "small") else text
        return result

    return make


_UNIT = Param(
    "unit",
    barred("unit|units|scale", "temperature_unit|degrees_in"),
    "",
    "The unit",
    choices=("celsius", "fahrenheit"),
    mention=barred(
        " in {unit}| in {unit} please|, {unit} please|, use {unit}", " using {unit}|, and give it in {unit}"
    ),
)
_CITY = Param(
    "city", barred("city|location|place|town|city_name", "where|destination_city|municipality"), "city", "The city"
)
_DAY = Param(
    "day",
    barred("day|date|when", "on_day|which_day"),
    "day",
    "The day",
    mention=barred(" on {day}| for {day}|, {day}", ", on {day} please"),
)
_TIME = Param("time", barred("time|at|clock|hour", "at_time|start"), "time", "The time as HH:MM")
_WHO = Param("who", barred("to|recipient|person|contact|name", "addressee|receiver"), "person", "The person")

KINDS: tuple[Kind, ...] = (
    Kind(
        barred(
            "get_weather|weather|current_weather|fetch_weather|check_weather|weather_lookup|get_forecast",
            "weather_report|forecast_for|look_up_weather",
        ),
        ("Get the weather in a city", "Current weather for a place", "Weather forecast"),
        (_CITY, _UNIT, _DAY),
        barred(
            "What is the weather in {city}?|How is the weather in {city}?|Weather in {city}?"
            "|Is it raining in {city}?|Do I need an umbrella in {city}?|Tell me the weather in {city}."
            "|How warm is it in {city}?|Is it cold in {city}?|Check the weather for {city}."
            "|What's the weather like in {city}?|I need to know the weather in {city}."
            "|Is the weather in {city} good?|Is the sun out in {city}?|Is it warm in {city}?"
            "|Can you check the weather in {city}?|Do you know the weather in {city}?"
            "|How is it outside in {city}?|Will it rain in {city}?|Is it windy in {city}?"
            "|I need weather data of {city}.|Tell me how warm it is in {city}.|Give me the weather in {city}."
            "|I go to {city}, how is the weather?|The weather in {city}, please.|Show me the weather of {city}."
            "|Is there snow in {city}?|Could you look up the weather of {city}?|I want the weather of {city}."
            "|Is it a sunny day in {city}?|Is {city} sunny?|Is it cloudy in {city}?|How sunny is it in {city}?"
            "|Are there clouds in {city}?|Is it sunny today in {city}?|Tell me if it is sunny in {city}."
            "|Will it be sunny in {city}?|Is the day sunny in {city}?",
            "Can you tell me how the weather is in {city}?|Is it sunny in {city}?|I need the weather for {city}.",
        ),
        _words_result("temperature:small", "condition:word"),
    ),
    Kind(
        barred("get_time|current_time|time_in|clock|local_time|world_clock", "time_now_in|fetch_time"),
        ("Get the local time in a city", "Current time in a place"),
        (_CITY,),
        barred(
            "What time is it in {city}?|Time in {city}?|Tell me the time in {city}."
            "|What is the local time in {city}?|How late is it in {city}?|Current time in {city}, please."
            "|Can you tell me how late it is in {city}?|Which time is it in {city}?|What is the time in {city}?"
            "|What does my clock show in {city}?|Give me the time in {city}.|I need the time in {city}."
            "|The time in {city}, please.|Do you know the time in {city}?|What time do they have in {city}?"
            "|How late is it now in {city}?|Say the time in {city}.|The clock in {city}, please."
            "|Show me the time of {city}.|Could you check the time in {city}?|What do the clocks of {city} say?"
            "|What does a clock in {city} show?|What do clocks in {city} say?|What does the watch say in {city}?",
            "Can you tell me the time in {city}?|What does the clock say in {city}?",
        ),
        _words_result("time:time"),
    ),
    Kind(
        barred("send_message|message|text_person|send_text|send_sms", "write_message|post_message"),
        ("Send a message to a person", "Send a text message"),
        (_WHO, Param("text", barred("text|message|body|content", "words|note_text"), "task", "What to say")),
        barred(
            "Send {who} the message {text}.|Tell {who}: {text}.|Message {who}: {text}.|Text {who}: {text}."
            "|Send a message to {who}: {text}.|Write to {who}: {text}.|Please message {who}: {text}."
            "|Let {who} have a message: {text}.|I want {who} to know: {text}.|Please text {who}: {text}."
            "|Send this message to {who}: {text}.|Send this to {who}: {text}.|Please tell {who} this: {text}."
            "|{who} should know: {text}.|Give {who} this message: {text}.|A message for {who}: {text}."
            "|Please send {who} a text: {text}.|Send {who} this text: {text}."
            "|Please send to {who} the message {text}.|Say to {who}: {text}.|New message to {who}: {text}.",
            "Let {who} know: {text}.|Please send {who} this message: {text}.",
        ),
        _done,
    ),
    Kind(
        barred("set_alarm|alarm|add_alarm|create_alarm|wake_up", "new_alarm|schedule_alarm"),
        ("Set an alarm", "Set an alarm for a time"),
        (
            _TIME,
            Param(
                "label",
                barred("label|title|name", "caption|tag"),
                "word",
                "A label",
                mention=barred(" called {label}| with the label {label}| named {label}", " labelled {label}"),
            ),
        ),
        barred(
            "Set an alarm for {time}|Wake me at {time}|Wake me up at {time}|Alarm at {time}"
            "|I need an alarm at {time}|Please set an alarm at {time}|Make an alarm for {time}"
            "|I want an alarm at {time}|Add a new alarm for {time}|Add one alarm, {time}"
            "|I have to get up at {time}|Get me up at {time}|Please wake me at {time}|New alarm at {time}"
            "|Put an alarm at {time}|The alarm should ring at {time}|Ring me awake at {time}"
            "|Can you set an alarm at {time}|Set my alarm to {time}|I want to wake up at {time}|Alarm, {time}",
            "I want an alarm for {time}|Add an alarm at {time}",
        ),
        _done,
    ),
    Kind(
        barred("create_reminder|remind|add_reminder|set_reminder|reminder", "new_reminder|remember_task"),
        ("Create a reminder", "Remind the user of a task"),
        (
            Param("task", barred("task|what|text|title", "to_do|matter"), "task", "What to remember"),
            Param(
                "time",
                barred("time|at|when", "at_time|due"),
                "time",
                "When, as HH:MM",
                mention=barred(" at {time}|, at {time}", ", at {time} please"),
            ),
        ),
        barred(
            "Remind me to {task}|Please remind me to {task}|Set a reminder to {task}"
            "|Do not let me forget to {task}|I have to {task}, remind me|Reminder: {task}"
            "|I need a reminder to {task}|Make a new reminder: {task}|Give me a reminder to {task}"
            "|Add a reminder to {task}|I want you to remind me to {task}|I must not forget to {task}"
            "|Can you remind me to {task}|New reminder: {task}|Remind me that I have to {task}"
            "|Help me remember to {task}|Put a reminder for me to {task}|Do remind me to {task}"
            "|Create a reminder to {task}",
            "Make a reminder to {task}|I want a reminder to {task}",
        ),
        _done,
    ),
    Kind(
        barred("add_todo|add_task|todo|create_task|new_task", "put_on_list|append_task"),
        ("Add a task to the list", "Add a to-do item"),
        (Param("task", barred("task|item|title|what", "to_do|entry"), "task", "The task"),),
        barred(
            "Add {task} to my list.|Put {task} on my to-do list.|New task: {task}.|Add a task: {task}."
            "|To do: {task}.|Add to my tasks: {task}.|Please add {task} to the list.|Put {task} on my list."
            "|Please put {task} on my to-do list.|Write {task} on the to-do list.|The list needs {task}."
            "|Put this on the list: {task}.|My list should have {task}.|Another task: {task}."
            "|Write a new task: {task}.|Please note the task {task}.|I have a new task, {task}."
            "|Add this to my list: {task}.|Can you add {task} to my list?|One more task: {task}."
            "|List {task} as a task.",
            "Please put {task} on the list.|Write {task} on my list.",
        ),
        _done,
    ),
    Kind(
        barred("set_timer|timer|start_timer|countdown", "begin_timer|run_timer"),
        ("Start a timer", "Set a countdown in minutes"),
        (
            Param(
                "minutes",
                barred("minutes|duration|length|min", "minute_count|for_minutes"),
                "small",
                "Minutes",
                "integer",
            ),
        ),
        barred(
            "Set a timer for {minutes} minutes.|Timer for {minutes} minutes.|Start a timer of {minutes} minutes."
            "|Count down {minutes} minutes.|{minutes} minute timer, please."
            "|Give me {minutes} minutes on the timer.|I want a timer for {minutes} minutes."
            "|Please set a timer of {minutes} minutes.|Run a {minutes} minute timer."
            "|Run the timer for {minutes} minutes.|I need the timer, {minutes} minutes."
            "|Start the timer with {minutes} minutes.|Can you set a timer for {minutes} minutes?"
            "|A timer of {minutes} minutes, please.|Timer: {minutes} minutes."
            "|Tell me when {minutes} minutes are over.|Wait {minutes} minutes and tell me."
            "|Start counting {minutes} minutes.|{minutes} minutes on the timer.",
            "I need a timer for {minutes} minutes.|Please run a timer of {minutes} minutes.",
        ),
        _done,
    ),
    Kind(
        barred("play_music|play_song|play|music_player|start_music", "put_on_music|song_player"),
        ("Play a song", "Play music"),
        (
            Param("song", barred("song|title|track|music", "piece|tune"), "proper", "The song"),
            Param(
                "artist",
                barred("artist|singer|by|band", "performer"),
                "person",
                "The artist",
                mention=barred(" by {artist}| from {artist}", " sung by {artist}"),
            ),
        ),
        barred(
            "Play {song}|Play the song {song}|I want to hear {song}|Put on {song}|Start the song {song}"
            "|Please play {song}|Let me listen to {song}|Let us hear the song {song}|Could you put on {song}"
            "|Can you play {song}|I would like to hear {song}|Please put on {song}|Turn on {song}"
            "|I want to listen to {song}|Music: {song}|Start {song}|The song {song}, please|Now play {song}"
            "|Play me {song}|Please let {song} play",
            "Let me hear {song}|Could you play {song}",
        ),
        _done,
    ),
    Kind(
        barred("translate|translate_text|translator|to_language", "translation|convert_language"),
        ("Translate a word", "Translate text into a language"),
        (
            Param("text", barred("text|word|phrase|input", "source|expression"), "word", "What to translate"),
            Param("language", barred("language|target|to|lang", "target_language|into"), "language", "The language"),
        ),
        barred(
            "Translate {text} into {language}.|Translate {text} to {language}.|What is {text} in {language}?"
            "|How do you say {text} in {language}?|Say {text} in {language}.|Give me {text} in {language}."
            "|Please say {text} in {language}.|Please give me {text} in {language}."
            "|Can you translate {text} into {language}?|What does one call {text} in {language}?"
            "|What is the {language} word for {text}?|What is {language} for {text}?|I need {text} in {language}."
            "|Turn {text} into {language}.|Write {text} in {language}.|Put {text} into {language}."
            "|Tell me {text} in {language}.|How does one say {text} in {language}?"
            "|The {language} word for {text}, please.|Could you translate {text} to {language}?"
            "|Translate to {language}: {text}.",
            "Please translate {text} to {language}.|What does one say in {language} for {text}?",
        ),
        _words_result("translation:word"),
    ),
    Kind(
        barred("turn_on|lights|switch_light|set_light|light", "light_switch|lamp_control"),
        ("Switch a light on or off", "Control the light in a room"),
        (
            Param(
                "room",
                barred("room|where|place|area", "space|zone"),
                "",
                "The room",
                choices=("kitchen", "bedroom", "bathroom", "hall", "garden", "office", "cellar", "garage"),
            ),
            Param("state", barred("state|mode|switch|status", "position"), "", "on or off", choices=("on", "off")),
        ),
        barred(
            "Turn the light in the {room} {state}.|Switch {state} the {room} light.|{room} light {state}."
            "|Turn {state} the light in the {room}.|Lights {state} in the {room}."
            "|Please turn the {room} light {state}.|I want the {room} light {state}."
            "|I want the light in the {room} to be {state}.|Set the light in the {room} to {state}."
            "|Set the {room} light {state}.|Make the light in the {room} go {state}."
            "|Can you switch the {room} light {state}?|The light in the {room} should be {state}."
            "|Switch the light in the {room} {state}.|{room} lights {state}, please."
            "|Put the {room} light {state}.|Light {state} in the {room}, please.|The {room}: light {state}.",
            "I want the light {state} in the {room}.|Set the {room} light to {state}.",
        ),
        _done,
    ),
    Kind(
        barred("set_temperature|thermostat|heating|set_heat|temperature", "heat_control|adjust_temperature"),
        ("Set the temperature at home", "Set the heating in degrees"),
        (
            Param(
                "degrees", barred("degrees|temperature|value|target", "heat_level|deg"), "small", "Degrees", "integer"
            ),
        ),
        barred(
            "Set the heating to {degrees} degrees.|Make it {degrees} degrees.|Set the temperature to {degrees}."
            "|Heat the house to {degrees} degrees.|Thermostat to {degrees}.|I want {degrees} degrees in here."
            "|Put the heating to {degrees}.|Put the temperature at {degrees} degrees."
            "|Please set the heating to {degrees} degrees.|Please make it {degrees} degrees at home."
            "|It should be {degrees} degrees at home.|I want it to be {degrees} degrees."
            "|Can you set the temperature to {degrees} degrees?|Heating: {degrees} degrees."
            "|Turn the heating to {degrees} degrees.|Change the temperature to {degrees}."
            "|The house should have {degrees} degrees.|I need {degrees} degrees here."
            "|Warm the house to {degrees} degrees.",
            "Put the heating at {degrees} degrees.|Please set {degrees} degrees at home.",
        ),
        _done,
    ),
    Kind(
        barred("book_hotel|reserve_room|hotel_booking|find_hotel|hotel", "hotel_reservation|get_room"),
        ("Book a hotel in a city", "Reserve a hotel room"),
        (
            _CITY,
            Param(
                "nights",
                barred("nights|stay|num_nights", "night_count"),
                "small",
                "How many nights",
                "integer",
                mention=barred(" for {nights} nights|, {nights} nights", ", staying {nights} nights"),
            ),
        ),
        barred(
            "Book a hotel in {city}|I need a hotel in {city}|Find me a hotel in {city}|Reserve a room in {city}"
            "|Book me a room in {city}|Get me a hotel in {city}|Please book a hotel in {city}"
            "|Please find a hotel in {city}|I want a hotel in {city}|I want to stay in a hotel in {city}"
            "|Can you arrange a room in {city}|Can you book a hotel in {city}|I need a room in {city}"
            "|I go to {city} and need a hotel|Look for a hotel in {city}|A hotel in {city}, please"
            "|Arrange for a room in {city}|Hotel in {city}|Reserve a hotel in {city}|Get a room for me in {city}"
            "|I would like to sleep in {city}",
            "Please arrange a hotel in {city}|I want to book a hotel in {city}",
        ),
        _words_result("hotel:proper", "price:number"),
    ),
    Kind(
        barred("book_flight|find_flights|flight_search|search_flights|flights", "get_flight|flight_finder"),
        ("Search flights between two cities", "Book a flight"),
        (
            Param(
                "origin",
                barred("origin|from|from_city|start", "departure|leaving_from"),
                "city",
                "Where the flight starts",
            ),
            Param("goal", barred("destination|to|to_city|goal", "arrival|flying_to"), "city", "Where the flight goes"),
            _DAY,
        ),
        barred(
            "Find a flight from {origin} to {goal}|Book a flight from {origin} to {goal}"
            "|I want to fly from {origin} to {goal}|Flights from {origin} to {goal}"
            "|Search flights from {origin} to {goal}|Is there a flight from {origin} to {goal}"
            "|I need to fly from {origin} to {goal}|I want a flight from {origin} to {goal}"
            "|Please find flights from {origin} to {goal}|Please look for a flight, {origin} to {goal}"
            "|Look up flights from {origin} to {goal}|Can you book a flight from {origin} to {goal}"
            "|Get me a flight from {origin} to {goal}|Get me from {origin} to {goal}"
            "|A flight from {origin} to {goal}, please|Show flights from {origin} to {goal}"
            "|Which flights go from {origin} to {goal}|I have to go from {origin} to {goal}"
            "|I want to travel by plane from {origin} to {goal}|Flight, {origin} to {goal}",
            "I need a flight from {origin} to {goal}|Please look for flights from {origin} to {goal}",
        ),
        _words_result("flight:code", "price:number"),
    ),
    Kind(
        barred("get_stock|stock_price|share_price|quote|stock", "market_price|price_of_share"),
        ("Get the price of a share", "Look up a stock price"),
        (Param("company", barred("company|symbol|ticker|name", "firm|issuer"), "proper", "The company"),),
        barred(
            "What is the share price of {company}?|Stock price of {company}?|How much is a share of {company}?"
            "|Get me the stock price of {company}.|How is the stock of {company} doing?"
            "|Price of {company} shares, please.|Look up the stock of {company}."
            "|Look up what {company} shares cost.|What does a share of {company} cost?"
            "|What do {company} shares cost?|Show me the share price of {company}."
            "|Tell me the share price of {company}.|Tell me the stock price of {company}."
            "|How much is one share of {company}?|What is {company} stock worth?"
            "|The share price of {company}, please.|I want to know the stock price of {company}."
            "|Check the stock of {company}.|Share price for {company}?|How are the shares of {company}?",
            "Look up the share price of {company}.|What does one share of {company} cost?",
        ),
        _words_result("price:number"),
    ),
    Kind(
        barred("convert_currency|currency|exchange|money_convert", "exchange_money|currency_change"),
        ("Convert money into another currency", "Currency conversion"),
        (
            Param("amount", barred("amount|value|sum|quantity", "how_much"), "number", "How much money", "integer"),
            Param(
                "source",
                barred("from|source|from_currency", "old_currency"),
                "",
                "Currency to convert from",
                choices=("euros", "dollars", "pounds", "yen", "francs", "rupees"),
            ),
            Param(
                "target",
                barred("to|target|to_currency", "new_currency"),
                "",
                "Currency to convert to",
                choices=("kroner", "pesos", "zloty", "won", "rand", "lira"),
            ),
        ),
        barred(
            "Convert {amount} {source} to {target}.|How much is {amount} {source} in {target}?"
            "|Change {amount} {source} into {target}.|What is {amount} {source} in {target}?"
            "|{amount} {source} to {target}, please.|Exchange {amount} {source} to {target}."
            "|Please exchange {amount} {source} into {target}.|I have {amount} {source} and want {target}."
            "|I have {amount} {source}, change them into {target}.|Give me {target} for {amount} {source}."
            "|How many {target} are {amount} {source}?|How many {target} do I get for {amount} {source}?"
            "|Turn {amount} {source} into {target}.|{amount} {source} in {target}?"
            "|What are {amount} {source} in {target}?|Can you convert {amount} {source} into {target}?"
            "|I need {target} for {amount} {source}.|Please convert {amount} {source} to {target}.",
            "Exchange {amount} {source} for {target}.|I have {amount} {source}, how much is that in {target}?",
        ),
        _words_result("amount:number"),
    ),
    Kind(
        barred("search_web|web_search|search|find|look_up", "internet_search|query_web"),
        ("Search the web", "Look something up on the internet"),
        (
            Param("query", barred("query|q|text|term", "search_term|keywords"), "word", "What to look for"),
            Param(
                "limit",
                barred("limit|count|max_results|n", "top"),
                "small",
                "How many results",
                "integer",
                mention=barred(
                    ", {limit} results| and give me {limit} results|, at most {limit} results", ", show {limit} results"
                ),
            ),
        ),
        barred(
            "Search the web for {query}|Look up {query} on the internet|Search for {query}|Find {query} online"
            "|Google {query}|Do a web search for {query}|Search for {query} online|Please search for {query}"
            "|Look for {query} online|Look for {query} on the internet|Please look up {query}"
            "|Search the internet for {query}|Find something about {query} on the web"
            "|What does the web say about {query}|Can you search for {query}|I am looking for {query} on the web"
            "|Find pages about {query}|Look up {query}|Web search: {query}|See what you find about {query}",
            "Search online for {query}|Please look for {query} on the web",
        ),
        _words_result("title:proper"),
    ),
    Kind(
        barred("define_word|dictionary|define|meaning|word_meaning", "lookup_definition|explain_word"),
        ("Look up the meaning of a word", "Dictionary"),
        (Param("word", barred("word|term|text", "vocable|entry"), "word", "The word"),),
        barred(
            "What does {word} mean?|Define {word}.|What is the meaning of {word}?|Look up the word {word}."
            "|Meaning of {word}?|Give me the definition of {word}.|Find the meaning of {word}."
            "|Find out what {word} means.|What is the definition of {word}?|What do people mean by {word}?"
            "|Look up what {word} means.|Tell me what {word} means.|What is {word}, as a word?"
            "|Please define {word}.|Can you define {word}?|The definition of {word}, please."
            "|I do not know the word {word}.|Explain the word {word}.|Explain what is meant, {word}."
            "|The word {word}, what does it mean?|Do you know what {word} means?"
            "|What is meant when they say {word}?|What do you mean by {word}?|What is it that is meant by {word}?"
            "|What could be meant by {word}?|What did they mean by {word}?",
            "Find the definition of {word}.|What is meant by {word}?",
        ),
        _words_result("meaning:word"),
    ),
    Kind(
        barred("order_food|food_order|order_meal|order|buy_food", "meal_order|deliver_food"),
        ("Order food", "Order a meal for delivery"),
        (
            Param("food", barred("food|dish|meal|item", "what_to_eat"), "food", "The dish"),
            Param(
                "count",
                barred("count|quantity|amount|portions", "servings"),
                "small",
                "How many portions",
                "integer",
                mention=barred(", {count} portions| for {count} people|, {count} times", ", make it {count} portions"),
            ),
        ),
        barred(
            "Order {food}|I want to order {food}|Get me {food}|Please order {food}|Order some {food}"
            "|I am hungry, order {food}|Have some {food} sent to me|I want {food} delivered"
            "|I would like to eat {food}|I would like to order {food}|Bring me {food}|I want {food}"
            "|Can you order {food}|Could I have {food}|Let me have {food}|For dinner order {food}"
            "|We want to eat {food}|Deliver {food} to me|{food} for dinner, please|Buy {food} for us"
            "|Order me {food}",
            "Have {food} delivered|I would like {food}",
        ),
        _words_result("order:code"),
    ),
    Kind(
        barred("create_event|add_event|calendar|schedule_meeting|new_event", "plan_event|put_in_calendar"),
        ("Add an event to the calendar", "Schedule a meeting"),
        (
            Param("person", barred("person|with|guest|attendee", "participant"), "person", "Whom to meet"),
            Param("day", barred("day|date|on", "on_day"), "day", "The day"),
            Param(
                "time",
                barred("time|at|start", "at_time"),
                "time",
                "The time",
                mention=barred(" at {time}|, at {time}", ", starting {time}"),
            ),
        ),
        barred(
            "Schedule a meeting with {person} {day}|Plan a meeting with {person} {day}"
            "|Put a meeting with {person} in my calendar for {day}|Meet {person} {day}"
            "|Add a meeting with {person} on {day}|I meet {person} on {day}, note it"
            "|Arrange to meet {person} {day}|Set a meeting with {person} for {day}"
            "|Set up something with {person} on {day}|I have a meeting with {person} {day}"
            "|New meeting with {person} on {day}|Make a meeting with {person} for {day}"
            "|Please schedule a meeting with {person} on {day}|I want to meet {person} {day}"
            "|I will see {person} {day}, note it|Meeting with {person} on {day}"
            "|Put {person} in my calendar for {day}|Can you plan a meeting with {person} for {day}"
            "|On my calendar: {person} {day}",
            "Arrange a meeting with {person} for {day}|Set up a meeting with {person} {day}",
        ),
        _done,
    ),
    Kind(
        barred("call_person|phone|call|dial|make_call", "start_call|ring"),
        ("Call a person", "Make a phone call"),
        (Param("who", barred("person|name|contact|who", "callee|whom"), "person", "Whom to call"),),
        barred(
            "Call {who}.|Phone {who}.|Ring {who}, please.|Make a call to {who}.|Dial {who}."
            "|I want to talk to {who} on the phone.|Please call {who}.|I want to call {who}.|Can you call {who}?"
            "|Call up {who}.|Get me {who} on the line.|Give a call to {who}.|Could you phone {who}?"
            "|I need to call {who}.|I must speak to {who} by phone.|Please ring {who}.|Please phone {who}."
            "|Start a call with {who}.|A call to {who}, please.|Let me speak to {who}.|Put me through to {who}."
            "|Call {who} for me.",
            "Give {who} a call.|Get {who} on the phone.",
        ),
        _done,
    ),
    Kind(
        barred("send_email|email|mail|write_email", "email_sender|compose_mail"),
        ("Send an email", "Write an email to an address"),
        (
            Param("address", barred("to|address|email|recipient", "mail_address|mailbox"), "email", "The address"),
            Param(
                "subject",
                barred("subject|title|about|topic", "heading"),
                "word",
                "The subject",
                mention=barred(" about {subject}| with the subject {subject}", " with subject {subject}"),
            ),
        ),
        barred(
            "Send an email to {address}|Email {address}|Write an email to {address}|Mail {address}"
            "|Send a mail to {address}|Please mail {address}|Please send an email to {address}"
            "|Compose a mail for {address}|Write a new email to {address}|I want to email {address}"
            "|I want to write an email to {address}|Can you email {address}|An email to {address}, please"
            "|New email to {address}|Start an email to {address}|Mail to {address}"
            "|Send something to {address} by email|Write to {address}",
            "Please email {address}|Compose an email to {address}",
        ),
        _done,
    ),
    Kind(
        barred("track_order|order_status|find_parcel|parcel|tracking", "where_is_parcel|shipment_status"),
        ("Track an order", "Find out where a parcel is"),
        (Param("order", barred("order|order_id|id|number", "parcel_code|shipment"), "code", "The order number"),),
        barred(
            "Where is my order {order}?|Track order {order}.|What is the status of order {order}?"
            "|Track my parcel {order}.|Find parcel {order}.|Has {order} arrived?|Please track order {order}."
            "|Track {order}.|Can you track my order {order}?|Please find order {order}.|Where is {order} now?"
            "|Where is my parcel {order}?|Where has {order} gone?|Has parcel {order} got here?"
            "|When do I get {order}?|When will {order} come?|Check the status of {order}."
            "|Look up order {order} for me.|How far has my parcel {order} got?|What happened to parcel {order}?"
            "|The status of {order}, please.|Please track my order {order}.|Track {order} for me."
            "|Can you track {order} for me?|Please track this for me: {order}.",
            "Please track {order} for me.|Where has parcel {order} got to?",
        ),
        _words_result("status:word", "day:day"),
    ),
    Kind(
        barred("get_distance|distance|route_length|measure_distance|how_far", "distance_between|compute_distance"),
        ("Distance between two cities", "How far two places are apart"),
        (
            Param("origin", barred("from|origin|start|a", "first_place"), "city", "The first place"),
            Param("goal", barred("to|destination|end|b", "second_place"), "city", "The second place"),
        ),
        barred(
            "How far is it from {origin} to {goal}?|Distance from {origin} to {goal}?"
            "|What is the distance between {origin} and {goal}?|How many kilometres from {origin} to {goal}?"
            "|Measure from {origin} to {goal}.|How long is the road from {origin} to {goal}?"
            "|How far is {goal} from {origin}?|How far is {origin} from {goal}?"
            "|Tell me how far it is from {origin} to {goal}.|Give me the distance from {origin} to {goal}."
            "|Tell me the way from {origin} to {goal} in kilometres."
            "|What is the way from {origin} to {goal} in kilometres?"
            "|The distance between {origin} and {goal}, please."
            "|How many kilometres are {origin} and {goal} apart?|How far apart are {origin} and {goal}?"
            "|I want to know the distance between {origin} and {goal}.|Find the distance from {origin} to {goal}."
            "|Is it far from {origin} to {goal}?",
            "How long is the way from {origin} to {goal}?|Tell me the distance from {origin} to {goal}.",
        ),
        _words_result("kilometres:number"),
    ),
    Kind(
        barred("take_note|note|add_note|save_note|write_note", "new_note|store_note"),
        ("Save a note", "Write a note"),
        (Param("text", barred("text|note|content|body", "memo|lines"), "task", "The note"),),
        barred(
            "Note: {text}.|Take a note: {text}.|Write down: {text}.|Save a note: {text}.|Make a note: {text}."
            "|Keep this note: {text}.|Please note this: {text}.|Please write down: {text}."
            "|Note this down: {text}.|Note down for me: {text}.|Store this as a note: {text}."
            "|Save this note: {text}.|Please save the note: {text}.|A new note: {text}.|Put down a note: {text}."
            "|Keep a note of this: {text}.|I want to note: {text}.|Please take this note: {text}."
            "|Add a note: {text}.|Write a note: {text}.|Note for me: {text}.",
            "Please note down: {text}.|Store the note: {text}.",
        ),
        _done,
    ),
    Kind(
        barred("set_volume|volume|loudness|sound", "sound_level|change_volume"),
        ("Set the volume", "Set how loud the speaker is"),
        (Param("level", barred("level|volume|percent|value", "strength"), "small", "The volume", "integer"),),
        barred(
            "Set the volume to {level}.|Volume {level}.|Make the volume {level}.|Turn the sound to {level}."
            "|Volume to {level}, please.|Change the volume to {level}.|Put the volume to {level}."
            "|Put the sound at {level}.|I want the sound at {level}.|I want the volume to be {level}."
            "|Turn the volume to {level}.|Please set the volume to {level}.|The volume should be {level}."
            "|Can you set the volume to {level}?|Sound to {level}.|Turn it to volume {level}."
            "|Set the sound to {level}.|Volume at {level}, please.",
            "Put the volume at {level}.|I want the volume at {level}.",
        ),
        _done,
    ),
    Kind(
        barred("open_app|launch|start_app|open|run_app", "app_starter|launch_program"),
        ("Open an app", "Start a program"),
        (Param("app", barred("app|name|program|application", "app_name|software"), "word", "The app"),),
        barred(
            "Open {app}.|Start {app}.|Launch {app}.|Open the app {app}.|Please open {app}."
            "|Start the program {app}.|Can you open {app}?|Could you start {app}?|Please start {app}."
            "|Bring up {app}.|Bring the app {app} up.|I want to open {app}.|I want to use {app}."
            "|Please launch {app}.|Start the app {app}.|Run {app}.|Run the app {app}.|Open up {app}."
            "|I need the app {app}.|The app {app}, please.",
            "Could you open {app}?|Bring up the app {app}.",
        ),
        _done,
    ),
    Kind(
        barred("find_recipe|recipe|get_recipe|recipes|cook", "recipe_for|cooking_help"),
        ("Find a recipe", "Get a recipe for a dish"),
        (
            Param("dish", barred("dish|food|meal|name", "what_to_cook"), "food", "The dish"),
            Param(
                "vegan",
                barred("vegan|vegetarian|no_meat", "plant_based"),
                "",
                "Without animals",
                "boolean",
                mention=barred(", vegan|, it must be vegan| without meat", ", strictly vegan"),
            ),
        ),
        barred(
            "Find a recipe for {dish}|How do I cook {dish}|Recipe for {dish}|I want to cook {dish}"
            "|Give me a recipe for {dish}|How do I make {dish}|Look up how to cook {dish}"
            "|Look for a recipe for {dish}|Please find a recipe for {dish}|Please look up a {dish} recipe"
            "|I need a recipe for {dish}|I want to make {dish}|Show me how to cook {dish}"
            "|Tell me how to make {dish}|Find me a recipe for {dish}|Can you find a recipe for {dish}"
            "|How is {dish} made|How can I make {dish}|A recipe for {dish}, please|I would like to cook {dish}",
            "Look up a recipe for {dish}|Please find me a {dish} recipe",
        ),
        _words_result("recipe:proper", "minutes:small"),
    ),
    Kind(
        barred("lock_door|door|door_lock|set_lock", "door_control|secure_door"),
        ("Lock or unlock a door", "Control the lock of a door"),
        (
            Param(
                "door",
                barred("door|which|name", "entrance"),
                "",
                "Which door",
                choices=("front", "back", "garage", "cellar", "garden"),
            ),
            Param("action", barred("action|mode|do", "operation"), "", "lock or unlock", choices=("lock", "unlock")),
        ),
        barred(
            "{action} the {door} door.|Please {action} the {door} door.|Can you {action} the {door} door?"
            "|I want you to {action} the {door} door.|Would you please {action} the {door} door?"
            "|Could you {action} the {door} door?|{action} the door, the {door} one."
            "|The {door} door: {action} it.|I need you to {action} the {door} door."
            "|Go and {action} the {door} door.|{action} the {door} door now.|Do {action} the {door} door."
            "|The {door} door, {action} it please.|I would like you to {action} the {door} door."
            "|Make sure to {action} the {door} door.",
            "Would you {action} the {door} door?|Now {action} the {door} door please.",
        ),
        _done,
    ),
    Kind(
        barred("get_population|population|people_count|inhabitants", "count_people|population_lookup"),
        ("Population of a city", "How many people live in a place"),
        (_CITY,),
        barred(
            "How many people live in {city}?|Population of {city}?|What is the population of {city}?"
            "|How big is {city}?|Tell me how many people live in {city}.|How many people are in {city}?"
            "|How many inhabitants has {city}?|How many inhabitants does {city} have?"
            "|Tell me the population of {city}.|Give me the population of {city}."
            "|What is the number of people in {city}?|How large is the population of {city}?"
            "|What population does {city} have?|The population of {city}, please."
            "|How many people does {city} have?|How many live in {city}?"
            "|I want to know how many people live in {city}.|Look up the population of {city}.",
            "How many inhabitants are in {city}?|What population has {city}?",
        ),
        _words_result("population:number"),
    ),
    Kind(
        barred("buy_ticket|tickets|book_ticket|get_tickets", "ticket_office|purchase_tickets"),
        ("Buy tickets for a show", "Buy tickets"),
        (
            Param("show", barred("show|event|film|title", "performance"), "proper", "The show"),
            Param(
                "count",
                barred("count|tickets|quantity|number", "how_many|seats"),
                "small",
                "How many tickets",
                "integer",
            ),
        ),
        barred(
            "Buy {count} tickets for {show}.|Get me {count} tickets for {show}.|I need {count} tickets to {show}."
            "|Book {count} tickets for {show}.|{count} tickets for {show}, please."
            "|I would like to buy {count} tickets for {show}.|I want {count} tickets for {show}."
            "|Order {count} tickets for {show}.|I want to see {show} and need {count} tickets."
            "|We need {count} tickets for {show}.|Could you buy {count} tickets for {show}?"
            "|Can you get {count} tickets for {show}?|Please buy {count} tickets to {show}."
            "|Get {count} tickets to see {show}.|Reserve {count} tickets for {show}."
            "|For {show} we need {count} tickets.|{count} tickets to {show}.|Buy us {count} tickets for {show}.",
            "I would like {count} tickets for {show}.|Order {count} tickets to see {show}.",
        ),
        _words_result("order:code"),
    ),
    Kind(
        barred("calculate|calculator|multiply|compute", "do_math|calc_product"),
        ("Multiply two numbers", "Product of two numbers"),
        (
            Param("a", barred("a|x|first", "left"), "number", "First number", "integer"),
            Param("b", barred("b|y|second", "right"), "number", "Second number", "integer"),
        ),
        barred(
            "What is {a} times {b}?|Multiply {a} by {b}.|Calculate {a} times {b}.|{a} times {b}?"
            "|Compute {a} times {b}.|How much is {a} times {b}?|What do I get for {a} times {b}?"
            "|What is the product of {a} and {b}?|Multiply {a} with {b}.|{a} multiplied with {b}?"
            "|Please multiply {a} by {b}.|Work out the product of {a} and {b}."
            "|Please work out {a} times {b} for me.|Tell me {a} times {b}.|Can you multiply {a} by {b}?"
            "|Give me {a} times {b}.|I need {a} times {b}.|Do {a} times {b}.|How much do {a} times {b} make?"
            "|The product of {a} and {b}, please.",
            "What is {a} multiplied by {b}?|Work out {a} times {b}.",
        ),
        _words_result("result:number"),
    ),
    Kind(
        barred("find_contact|contact|phone_book|get_contact|lookup_person", "person_info|address_book"),
        ("Find the phone number of a person", "Look up a contact"),
        (Param("who", barred("name|person|contact|who", "full_name|individual"), "full_name", "The person"),),
        barred(
            "What is the phone number of {who}?|Find the number of {who}.|Look up {who} in my contacts."
            "|Phone number of {who}?|Give me the contact of {who}.|Do you have the number of {who}?"
            "|Search for {who} in my contacts.|Search the number of {who}.|Find {who} in my contacts."
            "|Which number has {who}?|What number does {who} have?|Tell me the phone number of {who}."
            "|I need the phone number of {who}.|I need the number of {who}.|Look for {who} in the phone book."
            "|Which is the phone number of {who}?|Do my contacts have {who}?|Look up the number of {who}."
            "|The phone number of {who}, please.|Show me the contact {who}.|How can I reach {who}?",
            "Search my contacts for {who}.|Which phone number has {who}?",
        ),
        _words_result("phone:number"),
    ),
)

# Kinds of tool that training never lists: they test how far the skill generalises.
UNSEEN_KINDS: tuple[Kind, ...] = (
    Kind(
        Lists((), ("rent_car", "car_rental")),
        ("Rent a car in a city",),
        (_CITY, Param("days", Lists((), ("days", "rental_days")), "small", "How many days", "integer")),
        Lists((), ("Rent a car in {city} for {days} days.", "I need a car in {city} for {days} days.")),
        _done,
    ),
    Kind(
        Lists((), ("water_plants", "irrigation")),
        ("Water the plants for some minutes",),
        (Param("minutes", Lists((), ("minutes", "run_minutes")), "small", "Minutes", "integer"),),
        Lists((), ("Water the plants for {minutes} minutes.", "Give the plants water for {minutes} minutes.")),
        _done,
    ),
    Kind(
        Lists((), ("paint_wall", "wall_painter")),
        ("Paint a wall in a colour",),
        (Param("colour", Lists((), ("colour", "paint_colour")), "colour", "The colour"),),
        Lists((), ("Paint the wall {colour}.", "I want the wall in {colour}.")),
        _done,
    ),
    Kind(
        Lists((), ("invite_guest", "guest_invitation")),
        ("Invite a guest to a party",),
        (
            Param("guest", Lists((), ("guest", "guest_name")), "person", "The guest"),
            Param("day", Lists((), ("day", "party_day")), "day", "The day of the party"),
        ),
        Lists((), ("Invite {guest} to the party on {day}.", "Please invite {guest} for {day}.")),
        _done,
    ),
    Kind(
        Lists((), ("block_card", "card_blocker")),
        ("Block a bank card",),
        (Param("card", Lists((), ("card", "card_number")), "code", "The number of the card"),),
        Lists((), ("Block my card {card}.", "I lost my card {card}, block it.")),
        _done,
    ),
    Kind(
        Lists((), ("buy_thing", "shop_order")),
        ("Buy a thing in the shop",),
        (Param("thing", Lists((), ("thing", "article")), "thing", "What to buy"),),
        Lists((), ("Buy me a {thing}.", "I need a new {thing}, buy one.")),
        _done,
    ),
)

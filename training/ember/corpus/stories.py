"""Short stories of four to six sentences about a hero, a place and a thing, which the user may choose."""

import random

from training.ember.corpus import words
from training.ember.corpus.conversation import Exchange, Expected, Lists, Split, barred, exchange
from training.ember.corpus.phrasing import fill, say

ASK = barred(
    "Tell me a story about a {animal}.|Tell me a short story about a {animal} called {name}."
    "|Write a story about a {animal}.|A story about {name} the {animal}, please."
    "|Can you tell a story with a {animal}?|I want a story about a {animal} named {name}."
    "|Make up a story about a {animal}.|Story about a {animal} in the {place}, please."
    "|Tell me a story about {name}, a {animal}.|Tell a tale of a {animal} that lives in the {place}."
    "|Invent a short story about a {animal} and a {thing}.|Tell me a story about a {animal} who finds a {thing}."
    "|Give me a bedtime story about a {animal} called {name}.",
    "Please tell me a story of a {animal} called {name}.|I would like a story about a {animal}."
    "|Could you write a short story about a {animal} named {name}?"
    "|Tell my child a story about a {animal} in the {place}.",
)
ASK_ANY = Lists(
    words.listed(
        "Tell me a story.|Tell me a short story.|A story, please.|Make up a story.|Can you tell me a story?"
        "|I want a story.|Write a short story.|Do you know a story?|Please tell me a bedtime story.",
        "|",
    ),
    (),  # no word of the answer could be checked
)
PLACES = words.listed("forest garden city valley village mountain desert harbour castle meadow island field cave river")
_BEGIN = (
    "Once there was a {trait} {animal} called {name} who lived in the {place}.",
    "In the {place} lived a {trait} {animal} called {name}.",
    "Long ago, a {trait} {animal} called {name} had a home in the {place}.",
)
_TRAITS = tuple(
    ["small", "brave", "shy", "clever", "lazy", "curious", "kind", "young", "old", "quick", "proud", "hungry"]
)
_WANT = (
    "One day {name} found a {thing} under a tree.",
    "One morning {name} saw a {thing} by the water.",
    "One evening {name} heard that a {thing} was lost.",
    "One day {name} dreamed of a {thing}.",
)
_TROUBLE = (
    "But a big storm came and carried the {thing} away.",
    "But the {thing} belonged to a {other}.",
    "But nobody knew what the {thing} was for.",
    "But a {other} wanted the {thing} too.",
)
_HELP = (
    "{name} asked a {other} for help, and together they walked all night.",
    "{name} was afraid, but did not give up.",
    "A {other} came by and showed {name} the way.",
    "{name} thought for a long time and made a plan.",
)
_END = (
    "In the end they shared the {thing}, and both were happy.",
    "At last {name} brought the {thing} home and slept well.",
    "From that day on, {name} was never alone.",
    "And so the {place} had a new friend, and everybody sang.",
    "When the sun came up, {name} smiled and went home.",
)


def story(rng: random.Random, split: Split) -> Exchange:
    """Return a request for a story, and a story that contains the words chosen in the request."""
    chosen = {
        "animal": words.value(rng, "animal", split),
        "name": words.person(rng, split),
        "place": rng.choice(PLACES),
        "thing": words.value(rng, "thing", split),
    }
    template = ASK_ANY.pick(rng, split) if split is Split.TRAIN and rng.random() < 0.2 else ASK.pick(rng, split)
    question = say(rng, split, template, chosen)
    values = dict(chosen)
    if "{animal}" not in template:
        values["animal"] = words.ANIMALS.pick(rng, Split.TRAIN)
    if "{name}" not in template:
        values["name"] = words.PEOPLE.pick(rng, Split.TRAIN)
    if "{thing}" not in template:
        values["thing"] = words.THINGS.pick(rng, Split.TRAIN)
    values["trait"] = rng.choice(_TRAITS)
    values["other"] = rng.choice([animal for animal in words.ANIMALS.train if animal != values["animal"]])
    parts = [rng.choice(part) for part in (_BEGIN, _WANT, _TROUBLE, _HELP, _END)]
    asked_for = tuple(chosen[slot] for slot in ("animal", "name") if "{" + slot + "}" in template)
    return exchange(question, " ".join(fill(part, values) for part in parts), Expected(holds=asked_for))

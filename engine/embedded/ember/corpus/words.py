"""The values sentences are filled with: names, colours, numbers, times, and made-up words.

Half of what training copies is made of syllables nobody has met, because a small model otherwise learns the lists and
not the copying. The held-out lists, and words with the held-out syllables, appear in the evaluation alone.
"""

import random
from collections.abc import Callable

from .conversation import Lists, Split


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator))


Maker = Callable[[random.Random, Split], str]

_ONSETS = listed("b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sh sk sl st t th tr v w y z")
_HELD_OUT_ONSETS = listed("bl cr fr gl kr pr sm sn sp sw tw vr")
_VOWELS = listed("a e i o u ai ea oo ou ia io")
_CODAS = listed(" b d g k l m n p r s t x nd rk lm st ss ck n r l", " ")

PEOPLE = Lists(
    listed("""
    Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Karen Leo Mary Noah Olga Paul Rosa Sam Tina Uma Victor
    Wendy Xavier Yara Zoe Ahmed Bella Carlos Diana Erik Fatima George Hannah Ivan Julia Kofi Laura Marco Nina Omar
    Priya Quinn Robert Sofia Thomas Ursula Vera Walter Yusuf Adam Alice Boris Chloe Dmitri Elena Frank Gina Henry Ines
    James Kate Liam Maria Nadia Oscar Petra Ravi Sarah Tom Viktor Will Ali Amir Aisha Beth Chen Dan Eva Finn Greta Hana
    Igor Joan Ken Lily Max Nora Otto Pia Rita Simon Tara Vince Lukas Jonas Mina Akira Yuki Mei Wei Jin Sara Peter John
    Lisa Mark Susan Linda Kevin Brian Jessica Emily Daniel Michael Rachel Amy Nick Tony Ella"""),
    listed("""Astrid Bruno Cecilia Desmond Esther Fergus Gwen Harold Imogen Jasper Keiko Lorenzo Marisol Nigel Ophelia
    Percy Rowan Selma Tobias Valeria Wilfred Zelda Matilda Giulia Ingrid Kwame"""),
)
COLOURS = Lists(
    listed(
        "red blue green yellow orange purple pink black white grey brown gold silver violet navy cyan lime cream ruby "
        "jade amber olive"
    ),
    listed("teal crimson magenta turquoise maroon indigo beige coral"),
)
FOODS = Lists(
    listed(
        "pizza pasta rice soup bread cheese salad curry noodles apples cake eggs fish beans toast tacos honey pie "
        "bananas stew"
    ),
    listed("sushi lasagna pancakes dumplings olives waffles risotto mango"),
)
ANIMALS = Lists(
    listed(
        "dog cat fox owl rabbit horse bear mouse goat duck turtle frog wolf hen sheep parrot snail bee otter "
        "fish hamster pony"
    ),
    listed("badger hedgehog raven beaver ferret llama"),
)
HOBBIES = Lists(
    listed(
        "chess tennis music reading running cooking swimming painting dancing football hiking singing cycling "
        "gardening fishing writing drawing skiing yoga sailing"
    ),
    listed("rowing pottery archery fencing climbing knitting surfing juggling"),
)
JOBS = Lists(
    listed(
        "teacher nurse doctor driver baker farmer pilot lawyer writer painter singer cook builder judge "
        "engineer plumber waiter dentist"
    ),
    listed("carpenter chemist librarian tailor sculptor architect gardener"),
)
THINGS = Lists(
    listed(
        "lamp chair table book phone bag shirt shoe cup bike desk clock hat knife pen box camera coat bottle mirror "
        "keyboard radio blanket ladder guitar"
    ),
    listed("kettle pillow hammer scarf basket umbrella notebook toaster"),
)
TASKS = Lists(
    listed(
        "buy milk;call mum;water the plants;pay the rent;feed the cat;send the report;book a flight;wash the car;"
        "clean the kitchen;fix the door;take out the bins;walk the dog;check the oven;read chapter two;"
        "write the letter;charge the phone;print the map;meet the team",
        ";",
    ),
    listed("return the books;sign the form;iron the shirts;order more paper;visit the bank;pack the tent", ";"),
)
PLACES = Lists(
    (
        *listed(
            "Paris London Rome Oslo Lima Cairo Tokyo Berlin Madrid Vienna Dublin Boston Chicago Delhi Seoul Sydney "
            "Lagos Nairobi Toronto Prague Warsaw Lisbon Athens Miami Denver Geneva Milan Lyon Porto Bergen Perth "
            "Dallas Munich Hamburg Kyiv Riga Hanoi Manila Quito Bogota Havana Dakar Accra Tunis"
        ),
        *listed("New York;San Diego;Hong Kong;Cape Town;Buenos Aires;Rio de Janeiro", ";"),
    ),
    (
        "Amsterdam",
        "Istanbul",
        "Zurich",
        "Seville",
        "Helsinki",
        "Osaka",
        "Seattle",
        "Montreal",
        "Melbourne",
        "Krakow",
        "Los Angeles",
        "Abu Dhabi",
        "Kuala Lumpur",
    ),
)
DAYS = Lists(listed("Monday Tuesday Thursday Friday Saturday today tomorrow"), ("Wednesday", "Sunday"))
LANGUAGES = Lists(
    listed("French German Spanish Italian Dutch Polish Greek Arabic Hindi Korean Russian Latin"),
    ("Japanese", "Swedish", "Turkish", "Portuguese"),
)
MONTHS = listed("January February March April May June July August September October November December")


def made_up(rng: random.Random, split: Split, syllables: int = 0) -> str:
    """A lowercase word of 1 to 3 syllables that no list holds."""
    onsets = _ONSETS if split is Split.TRAIN else _HELD_OUT_ONSETS
    word = ""
    for _ in range(syllables or rng.choice((1, 2, 2, 2, 3))):
        word += rng.choice(onsets) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        onsets = _ONSETS
    return word if len(word) > 2 else word + "zo"


def number(rng: random.Random, _split: Split = Split.TRAIN) -> str:
    return str(rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4))))


def time_of_day(rng: random.Random, _split: Split = Split.TRAIN) -> str:
    return f"{rng.randrange(24):02d}:{rng.choice((0, 15, 30, 45, rng.randrange(60))):02d}"


def date(rng: random.Random, _split: Split = Split.TRAIN) -> str:
    return f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}"


def code(rng: random.Random, _split: Split = Split.TRAIN) -> str:
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((1, 2, 2, 3))))
    return letters + "".join(rng.choice("0123456789") for _ in range(rng.choice((2, 3, 4))))


def _from_list(lists: Lists, made_up_share: float, capital: bool) -> Maker:
    def make(rng: random.Random, split: Split) -> str:
        if rng.random() < made_up_share:
            word = made_up(rng, split)
            return word.capitalize() if capital else word
        return lists.pick(rng, split)

    return make


def _email(rng: random.Random, split: Split) -> str:
    return f"{person(rng, split).lower()}@{made_up(rng, split)}.{rng.choice(('com', 'org', 'net'))}"


def _full_name(rng: random.Random, split: Split) -> str:
    return f"{person(rng, split)} {made_up(rng, split).capitalize()}"


person = _from_list(PEOPLE, 0.4, True)
VALUES: dict[str, Maker] = {
    "person": person,
    "full_name": _full_name,
    "colour": _from_list(COLOURS, 0.25, False),
    "food": _from_list(FOODS, 0.25, False),
    "animal": _from_list(ANIMALS, 0.1, False),
    "hobby": _from_list(HOBBIES, 0.2, False),
    "job": _from_list(JOBS, 0.2, False),
    "thing": _from_list(THINGS, 0.25, False),
    "task": _from_list(TASKS, 0.0, False),
    "city": _from_list(PLACES, 0.35, True),
    "day": _from_list(DAYS, 0.0, False),
    "language": _from_list(LANGUAGES, 0.15, True),
    "word": lambda rng, split: made_up(rng, split),
    "proper": lambda rng, split: made_up(rng, split).capitalize(),
    "number": number,
    "small": lambda rng, _split: str(rng.randrange(2, 60)),
    "time": time_of_day,
    "date": date,
    "code": code,
    "email": _email,
}


def value(rng: random.Random, kind: str, split: Split) -> str:
    return VALUES[kind](rng, split)

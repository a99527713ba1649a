"""The values that fill sentences: names, colours, numbers, times, and made-up words.

Many words in training consist of pieces and syllables that occur nowhere else, because otherwise a small model learns the lists instead of copying.
The held-out lists and `KEPT_WORDS` are used only by the evaluation.
"""

import random
from collections.abc import Callable

from training.ember.cities import CITIES
from training.ember.corpus.conversation import Lists, Split


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator))


Maker = Callable[[random.Random, Split], str]

_ONSETS = listed("b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sh sk sl st t th tr v w y z")
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
    listed(
        "Amsterdam|Istanbul|Zurich|Seville|Helsinki|Osaka|Seattle|Montreal|Melbourne|Krakow|Los Angeles|Abu Dhabi"
        "|Kuala Lumpur",
        "|",
    ),
)
DAYS = Lists(listed("Monday Tuesday Thursday Friday Saturday today tomorrow"), ("Wednesday", "Sunday"))
LANGUAGES = Lists(
    listed("French German Spanish Italian Dutch Polish Greek Arabic Hindi Korean Russian Latin"),
    ("Japanese", "Swedish", "Turkish", "Portuguese"),
)
MONTHS = listed("January February March April May June July August September October November December")


_PLAIN = listed(
    """
    ability account advice airline amount animal answer apple arrow artist autumn avenue bakery balance balcony ballot
    banner barrel basic battery beacon bishop blanket blossom border bottom branch breeze bridge bucket budget bundle
    butter button cabin cable camel candle canyon capital carbon career carpet castle caution ceiling central chapter
    charm cheap cherry circle citizen clever client cloth cluster coffee column comfort common compass concert contract
    copper corner cotton council country couple courage cousin cradle cream credit cricket crystal culture current
    curtain custom damage decade degree delight desert detail device diamond digital dinner direct discount district
    doctor dollar domain double dragon drawer dream drift eagle early echo edge effort eight elbow electric elegant
    empire energy engine enough entry equal escape evening event exact example exchange expert fabric factory faith
    famous feather feeling fellow fiction figure filter final finger flavour flight floor flower focus forest formal
    fortune forward foundation fragile frame freedom frequent fridge friend frozen future gallery garlic gather general
    gentle giant ginger glass glove golden grammar grand gravel guard guess guest habit handle harbour harvest hazard
    health heart heavy helmet height hidden history hollow honest hotel house human humble hunter iceberg image impact
    income index industry insect invoice iron island ivory jacket jewel journey jungle junior justice kernel kettle
    kingdom kitchen knight label ladder language laptop latitude laundry leader leather legend lemon lesson letter
    library liquid logic lottery luggage lunch machine magnet manual marble margin market master matter measure medal
    memory mental metal method middle mineral minute mirror mixture modern moment monitor monkey motion motor muscle
    museum mystery narrow nation nature needle network neutral noble normal notice novel nuclear number object ocean
    office onion opinion orbit orchard organ origin outdoor oven oxygen package palace panel paper parade parent
    partner passage patient pattern pearl pencil people pepper perfect permit phrase picnic picture pigeon planet
    plastic plate pocket poetry police polite portrait powder prefer premium present pretty prince prison private prize
    problem produce profit program promise proper public pulse puzzle quality quantity quarter question quote rabbit
    railway random rapid ratio reason recent record reduce region regular relief remote repair report reserve result
    reward rhythm ribbon ritual rocket rough round royal rubber sample sandal satin science scissors screen season
    second secret section segment senior sentence series service session shadow shelter shield shoulder signal silence
    simple single sister sketch smooth soldier source speech spider spirit sponsor square stable station statue steady
    stone storage stream street strong student studio subject sudden sugar summer supply surface switch symbol system
    talent target temple tender tennis theatre theory thread throat thunder ticket tiger timber tissue title tongue
    topic tower traffic transfer travel treasure triangle trouble tunnel twelve twenty umpire uncle uniform unique
    useful valley vendor venture version vessel victory village vintage violin virtual vision visitor vital volume
    voyage wallet warning water wealth weapon weather wedding weekend weight whisper window winter wisdom wonder wooden
    worker yellow yesterday young zebra zero"""
)


# Real words that the evaluation uses in place of the pool words and made-up words of training.
KEPT_WORDS = listed(
    """anchor bamboo beetle bonus breakfast cactus cello chimney cobalt comet coral crater dolphin domino ember falcon
    feast fiddle fossil galaxy gazelle granite hammock harmony hornet igloo jasmine jigsaw lagoon lantern lavender
    lobster lotus maple marathon meteor mosaic mustard nectar nutmeg oasis orchid oyster paddle panther parsley pebble
    pelican pilgrim pistachio plaza pollen quartz quiver radar raisin safari saffron salmon sapphire scarlet sequoia
    sparrow summit sunset tango thistle topaz tornado trumpet tulip turbine velvet volcano walnut willow wizard zephyr"""
)


_LISTS = (PEOPLE, COLOURS, FOODS, ANIMALS, HOBBIES, JOBS, THINGS, TASKS, PLACES, DAYS, LANGUAGES)
_HELD_OUT_WORDS = {word.lower() for one in _LISTS for phrase in one.held_out for word in phrase.split()}
_HELD_OUT_WORDS |= set(KEPT_WORDS)
_COUNTRIES = tuple(
    sorted(
        {word.lower() for city in CITIES for word in city.country.split() if word.isalpha() and len(word) > 3}
        - _HELD_OUT_WORDS
    )
)


def _pool() -> tuple[str, ...]:
    """Return real words to repeat whole or in pieces, without those reserved for the evaluation."""
    kept = _HELD_OUT_WORDS
    known = (*_PLAIN, *(word for one in _LISTS for phrase in one.train for word in phrase.split()), *MONTHS)
    return tuple(dict.fromkeys(word.lower() for word in known if word.lower() not in kept))


POOL = _pool()


def made_up(rng: random.Random, split: Split, syllables: int = 0) -> str:
    """Return a lowercase word for any purpose.

    In training it is a country or made of one, a word of the pool, pieces of such words, letters, or syllables, so that every token of the vocabulary
    is copied sometimes. With `syllables` it has that number of them. In the evaluation it is a word of KEPT_WORDS.
    """
    if split is Split.HELD_OUT:
        return rng.choice(KEPT_WORDS)
    draw = rng.random()
    if draw < 0.15 and not syllables:
        return _from_country(rng)
    if draw < 0.6 and not syllables:
        return rng.choice(POOL)
    if draw < 0.78 and not syllables:
        return _pieces(rng)
    if draw < 0.81 and not syllables:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.choice((3, 4, 5, 6))))
    word = "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(syllables or rng.choice((1, 2, 2)))
    )
    return word if len(word) > 2 else word + "zo"


def identifier(rng: random.Random, split: Split) -> str:
    """Return an identifier: one or two words, joined by an underscore."""
    return "_".join(made_up(rng, split) for _ in range(rng.choice((1, 1, 2))))


def _from_country(rng: random.Random) -> str:
    """Return a country or a word made of one, to teach copying its tokens: answers about facts do not."""
    word = rng.choice(_COUNTRIES)
    if rng.random() < 0.6:
        word += rng.choice(("ese", "an", "ish", "er", "ia", "s", "let", "land", "ic", "ist"))
    return word if word not in _HELD_OUT_WORDS else "norway"


def _pieces(rng: random.Random) -> str:
    word = ""
    for _ in range(rng.choice((2, 2, 3))):
        whole = rng.choice(POOL)
        length = rng.choice((1, 2, 3, 4, 5))
        start = rng.choice((0, rng.randrange(len(whole)), max(0, len(whole) - length)))
        word += whole[start : start + length]
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


def _from_list(lists: Lists, share: float, share_held_out: float, capital: bool) -> Maker:
    """Return a function that draws from a split's list or, with the given probability, makes up a word."""

    def make(rng: random.Random, split: Split) -> str:
        if rng.random() < (share if split is Split.TRAIN else share_held_out):
            word = made_up(rng, split)
            return word.capitalize() if capital else word
        return lists.pick(rng, split)

    return make


def _email(rng: random.Random, split: Split) -> str:
    return f"{person(rng, split).lower()}@{made_up(rng, split)}.{rng.choice(('com', 'org', 'net'))}"


def _full_name(rng: random.Random, split: Split) -> str:
    return f"{person(rng, split)} {made_up(rng, split).capitalize()}"


_DO = listed(
    "buy call find fix open close clean wash check read write print move sell take bring paint count lift cook order "
    "send keep watch hide draw push mend fill empty sort test show reset remove replace renew report request"
)
_WHICH = listed("the;the;the;the;a;my;our;two;some;more;all;no;that;every;new;old", ";")


def _task(rng: random.Random, split: Split) -> str:
    """Return a task, such as a verb and a thing; in training mostly made of arbitrary words."""
    if rng.random() < 0.2 or split is Split.HELD_OUT:
        return TASKS.pick(rng, split)
    verb = rng.choice(_DO) if rng.random() < 0.5 else rng.choice(POOL)
    draw = rng.random()
    if draw < 0.15:
        return f"{verb} {made_up(rng, split)}"
    thing = f"{rng.choice(_WHICH)} {made_up(rng, split)}{rng.choice(('', '', 's'))}"
    return f"{verb} {thing} {made_up(rng, split)}" if draw < 0.25 else f"{verb} {thing}"


def _day(rng: random.Random, split: Split) -> str:
    """Return a day; in training also dates and other words, since seven days do not teach copying."""
    if rng.random() < 0.5 or split is Split.HELD_OUT:
        return DAYS.pick(rng, split)
    return date(rng) if rng.random() < 0.2 else made_up(rng, split).capitalize()


def _place(rng: random.Random, split: Split) -> str:
    """Return a city, in training sometimes with a made-up name of two words."""
    if split is Split.TRAIN and rng.random() < 0.15:
        first = (
            rng.choice(("San", "Port", "New", "Saint", "La", "El", "Santa", "North")) if rng.random() < 0.4 else None
        )
        return f"{first or made_up(rng, split).capitalize()} {made_up(rng, split).capitalize()}"
    return _one_place(rng, split)


person = _from_list(PEOPLE, 0.3, 0.3, True)
_one_place = _from_list(PLACES, 0.25, 0.25, True)
VALUES: dict[str, Maker] = {
    "person": person,
    "full_name": _full_name,
    "colour": _from_list(COLOURS, 0.35, 0.25, False),
    "food": _from_list(FOODS, 0.35, 0.25, False),
    "animal": _from_list(ANIMALS, 0.35, 0.1, False),
    "hobby": _from_list(HOBBIES, 0.35, 0.2, False),
    "job": _from_list(JOBS, 0.35, 0.2, False),
    "thing": _from_list(THINGS, 0.35, 0.25, False),
    "task": _task,
    "city": _place,
    "day": _day,
    "language": _from_list(LANGUAGES, 0.35, 0.15, True),
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

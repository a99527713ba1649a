"""Sums and differences of numbers from 0 to 99, bare or wrapped in a small story.

Every answer first writes the sum down as digits (`17 + 25 = 42`), so one place in the text decides the result.
"""

import random

from . import words
from .conversation import Exchange, Expected, Lists, Split, exchange
from .phrasing import say

PLUS = Lists(
    (
        "What is {a} plus {b}?",
        "What is {a} + {b}?",
        "{a} + {b}",
        "{a} + {b} = ?",
        "Add {a} and {b}.",
        "{a} plus {b}?",
        "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?",
        "How much is {a} plus {b}?",
        "How much is {a} and {b}?",
        "What do you get when you add {a} and {b}?",
        "Compute {a} plus {b}.",
        "What is {a}+{b}?",
        "{a}+{b}",
        "Sum {a} and {b}.",
        "Tell me {a} plus {b}.",
        "If I add {b} to {a}, what do I get?",
        "What does {a} + {b} make?",
        "Solve {a} + {b}.",
        "Can you add {a} and {b}?",
        "Please work out {a} + {b}.",
        "{a} added to {b} is what?",
        "Give me the sum of {a} and {b}.",
        "Do you know what {a} plus {b} is?",
        "Count {a} and {b} together.",
    ),
    (
        "What is the result of {a} plus {b}?",
        "Could you work out {a} plus {b}?",
        "What does {a} plus {b} equal?",
        "How much do {a} and {b} make together?",
        "Please add {a} to {b}.",
        "Tell me the sum of {a} and {b}.",
    ),
)
MINUS = Lists(
    (
        "What is {a} minus {b}?",
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a} - {b} = ?",
        "Subtract {b} from {a}.",
        "{a} minus {b}?",
        "Calculate {a} - {b}.",
        "How much is {a} minus {b}?",
        "Compute {a} minus {b}.",
        "What is {a}-{b}?",
        "{a}-{b}",
        "Tell me {a} minus {b}.",
        "Take {b} away from {a}.",
        "What do you get when you subtract {b} from {a}?",
        "Solve {a} - {b}.",
        "What does {a} - {b} make?",
        "Please work out {a} - {b}.",
        "If I take {b} from {a}, what is left?",
        "{a} less {b} is what?",
        "Can you subtract {b} from {a}?",
        "What is {a} take away {b}?",
        "Do you know what {a} minus {b} is?",
    ),
    (
        "What is the result of {a} minus {b}?",
        "Could you work out {a} minus {b}?",
        "What does {a} minus {b} equal?",
        "Please subtract {b} from {a}.",
        "How much remains if I take {b} away from {a}?",
    ),
)
STORY_PLUS = Lists(
    (
        "I have {a} {things} and buy {b} more. How many {things} do I have?",
        "If I have {a} {things} and get {b} more, how many do I have?",
        "{who} has {a} {things} and finds {b} more. How many {things} does {who} have?",
        "There are {a} {things} on the table and {b} {things} in the box. How many are there in all?",
        "I picked {a} {things} and {who} picked {b}. How many did we pick together?",
        "{a} people are on the bus and {b} more get on. How many are on the bus?",
        "I read {a} pages today and {b} pages yesterday. How many pages is that?",
        "{who} gives me {b} {things} and I already had {a}. How many {things} do I have now?",
        "If you have {a} {things} and I have {b}, how many do we have together?",
    ),
    (
        "{who} owns {a} {things} and receives {b} more. How many {things} does {who} own now?",
        "I had {a} {things}, then I bought {b}. How many {things} are mine now?",
        "There are {a} {things} here and {b} {things} there. How many {things} in total?",
    ),
)
STORY_MINUS = Lists(
    (
        "I have {a} {things} and eat {b}. How many are left?",
        "If I have {a} {things} and eat {b}, how many are left?",
        "{who} has {a} {things} and loses {b}. How many {things} are left?",
        "I had {a} {things} and gave {b} to {who}. How many do I have?",
        "There are {a} {things} in the box and I take {b} out. How many remain?",
        "{who} had {a} {things} and sold {b}. How many remain?",
        "{a} people are on the bus and {b} get off. How many stay on the bus?",
        "I own {a} {things} and throw {b} away. How many do I keep?",
        "A book has {a} pages and I read {b}. How many pages are left?",
        "If you have {a} {things} and give me {b}, how many do you keep?",
    ),
    (
        "{who} owns {a} {things} and gives away {b}. How many {things} does {who} still have?",
        "I had {a} {things}, then {b} of them broke. How many {things} are left?",
        "From {a} {things} I sell {b}. How many {things} remain?",
    ),
)
THINGS = Lists(
    tuple(
        [
            "apples",
            "books",
            "coins",
            "eggs",
            "pens",
            "balls",
            "cards",
            "stones",
            "shells",
            "plums",
            "stamps",
            "nuts",
            "toys",
            "cups",
            "cookies",
            "marbles",
            "tickets",
        ]
    ),
    tuple(["pears", "buttons", "peaches", "candles", "grapes"]),
)


_BARE = {True: ("{a} + {b}", "{a} plus {b}?", "{a}+{b}"), False: ("{a} - {b}", "{a} minus {b}?", "{a}-{b}")}


def arithmetic(rng: random.Random, split: Split) -> Exchange:
    a, b = _operands(rng)
    plus = rng.random() < 0.5
    if rng.random() < 0.25:
        if not plus and b > a:
            a, b = b, a
        lists = STORY_PLUS if plus else STORY_MINUS
    else:
        lists = PLUS if plus else MINUS
    values = {"a": str(a), "b": str(b), "things": THINGS.pick(rng, split), "who": words.person(rng, split)}
    result = a + b if plus else a - b
    answer = f"{a} {'+' if plus else '-'} {b} = {result}"
    bare = split is Split.TRAIN and rng.random() < 0.35  # the cheapest words, so that more sums fit
    template = rng.choice(_BARE[plus]) if bare else lists.pick(rng, split)
    return exchange(
        say(rng, split, template, values, decorate=not bare), answer + ".", Expected(holds=(f"= {result}.",))
    )


def _operands(rng: random.Random) -> tuple[int, int]:
    if rng.random() < 0.2:
        return rng.randrange(20), rng.randrange(20)
    return rng.randrange(100), rng.randrange(100)

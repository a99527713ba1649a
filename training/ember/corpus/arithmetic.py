"""Sums and differences of numbers from 0 to 99, alone or in a short story.

Every answer first writes the calculation in digits (`17 + 25 = 42`), so that a single place in the text decides the result.
"""

import random

from training.ember.corpus import words
from training.ember.corpus.conversation import Exchange, Expected, Split, barred, exchange
from training.ember.corpus.phrasing import say

PLUS = barred(
    "What is {a} plus {b}?|What is {a} + {b}?|{a} + {b}|{a} + {b} = ?|Add {a} and {b}.|Add {a} to {b}."
    "|Can you add {a} to {b}?|Could you add {a} and {b}?|Could you tell me {a} plus {b}?"
    "|What is the total of {a} and {b}?|What do {a} and {b} make?|Work out {a} plus {b}."
    "|What does {a} plus {b} give?|I need the sum of {a} and {b}.|{a} plus {b}?|Calculate {a} + {b}."
    "|What is the sum of {a} and {b}?|How much is {a} plus {b}?|How much is {a} and {b}?"
    "|What do you get when you add {a} and {b}?|Compute {a} plus {b}.|What is {a}+{b}?|{a}+{b}|Sum {a} and {b}."
    "|Tell me {a} plus {b}.|If I add {b} to {a}, what do I get?|What does {a} + {b} make?|Solve {a} + {b}."
    "|Can you add {a} and {b}?|Please work out {a} + {b}.|{a} added to {b} is what?|Give me the sum of {a} and {b}."
    "|Do you know what {a} plus {b} is?|Count {a} and {b} together.|What is the total of {a} and {b}?"
    "|What does {a} plus {b} come to?|What is the outcome of {a} plus {b}?|Could you compute {a} plus {b}?"
    "|Could you add up {a} and {b}?|How much do I get for {a} plus {b}?|How much do {a} and {b} give?"
    "|Please add {a} and {b}.|Please sum {a} and {b}.|Add {a} to {b}.|The result of {a} + {b}?"
    "|What does {a} and {b} make?",
    "What is the result of {a} plus {b}?|Could you work out {a} plus {b}?|What does {a} plus {b} equal?"
    "|How much do {a} and {b} make together?|Please add {a} to {b}.|Tell me the sum of {a} and {b}.",
)
MINUS = barred(
    "What is {a} minus {b}?|What is {a} - {b}?|{a} - {b}|{a} - {b} = ?|Subtract {b} from {a}."
    "|Could you subtract {b} from {a}?|Could you tell me {a} minus {b}?|Work out {a} minus {b}."
    "|What does {a} minus {b} give?|What is left of {a} after taking away {b}?|I need {a} minus {b}."
    "|Take {b} off {a}.|How much is left if I take {b} from {a}?|{a} minus {b}?|Calculate {a} - {b}."
    "|How much is {a} minus {b}?|Compute {a} minus {b}.|What is {a}-{b}?|{a}-{b}|Tell me {a} minus {b}."
    "|Take {b} away from {a}.|What do you get when you subtract {b} from {a}?|Solve {a} - {b}."
    "|What does {a} - {b} make?|Please work out {a} - {b}.|If I take {b} from {a}, what is left?"
    "|{a} less {b} is what?|Can you subtract {b} from {a}?|What is {a} take away {b}?"
    "|Do you know what {a} minus {b} is?|What is the outcome of {a} minus {b}?|The result of {a} - {b}?"
    "|Could you compute {a} minus {b}?|Please take {b} from {a}.|Please compute {a} minus {b}."
    "|What does {a} minus {b} come to?|How much remains of {a} without {b}?"
    "|How much is left when {b} is taken away from {a}?",
    "What is the result of {a} minus {b}?|Could you work out {a} minus {b}?|What does {a} minus {b} equal?"
    "|Please subtract {b} from {a}.|How much remains if I take {b} away from {a}?",
)
STORY_PLUS = barred(
    "I have {a} {things} and buy {b} more. How many {things} do I have?"
    "|If I have {a} {things} and get {b} more, how many do I have?"
    "|{who} has {a} {things} and finds {b} more. How many {things} does {who} have?"
    "|There are {a} {things} on the table and {b} {things} in the box. How many are there in all?"
    "|I picked {a} {things} and {who} picked {b}. How many did we pick together?"
    "|In one bag are {a} {things}, in the other {b}. How many altogether?"
    "|{who} collected {a} {things} and then {b} more. How many in all?"
    "|I start with {a} {things}. Then I win {b}. How many do I have now?"
    "|{who} made {a} {things} and I made {b}. How many is that together?"
    "|We saw {a} {things} today and {b} yesterday. How many did we see?"
    "|First {a} {things} came, then {b}. How many came?"
    "|My box holds {a} {things} and I put in {b} more. How many are inside?"
    "|{a} {things} are red and {b} are blue. How many {things} are there?"
    "|I need {a} {things} for {who} and {b} for me. How many do I need?"
    "|{a} people are on the bus and {b} more get on. How many are on the bus?"
    "|I read {a} pages today and {b} pages yesterday. How many pages is that?"
    "|{who} gives me {b} {things} and I already had {a}. How many {things} do I have now?"
    "|If you have {a} {things} and I have {b}, how many do we have together?"
    "|{who} has {a} {things} and receives {b} more. How many {things} does {who} have now?"
    "|{who} owns {a} {things} and gets {b} more. How many {things} does {who} own?"
    "|There are {a} {things} here and {b} over there. How many {things} are there?"
    "|{a} {things} here and {b} {things} there: how many in total?"
    "|I had {a} {things} and bought {b} more. How many are mine?"
    "|I had {a} {things}, then I found {b}. How many {things} do I have now?"
    "|{who} keeps {a} {things} and buys another {b}. How many is that in total?"
    "|Yesterday I had {a} {things}. Today I got {b}. How many {things} now?"
    "|{a} {things} and {b} more {things}, what is the total?"
    "|With {a} {things} in one hand and {b} in the other, how many {things} in total?"
    "|My friend brings {b} {things} to my {a}. How many {things} are there now?"
    "|{who} received {a} {things} on Monday and {b} on Friday. How many in total?"
    "|Put {b} {things} next to {a} {things}. How many {things} do you see?"
    "|There were {a} {things}, then {b} were added. How many {things} are there now?"
    "|What is the total of {a} {things} and {b} {things}?"
    "|First I had {a} {things}, then I bought another {b}. How many {things} are mine?"
    "|I had {a} {things}, then somebody gave me {b}. How many {things} are mine now?"
    "|I had {a} {things}, then I got {b}. How many {things} do I own now?"
    "|I had {a} {things}, then {b} more came. How many {things} are there?"
    "|I counted {a} {things} here, {b} {things} there. How many {things} in total?"
    "|There are {a} {things} on the left and {b} {things} on the right. How many {things} in total?"
    "|Here are {a} {things}, there are {b} {things}. How many {things} in all?",
    "{who} owns {a} {things} and receives {b} more. How many {things} does {who} own now?"
    "|I had {a} {things}, then I bought {b}. How many {things} are mine now?"
    "|There are {a} {things} here and {b} {things} there. How many {things} in total?",
)
STORY_MINUS = barred(
    "I have {a} {things} and eat {b}. How many are left?|If I have {a} {things} and eat {b}, how many are left?"
    "|{who} has {a} {things} and loses {b}. How many {things} are left?"
    "|I had {a} {things} and gave {b} to {who}. How many do I have?"
    "|There are {a} {things} in the box and I take {b} out. How many remain?"
    "|{who} had {a} {things} and sold {b}. How many remain?"
    "|Out of {a} {things} I give away {b}. How many stay with me?"
    "|Of {a} {things}, {b} fall on the floor. How many are still on the table?"
    "|{b} of my {a} {things} got lost. How many do I still have?"
    "|At first there were {a} {things}, later {b} were stolen. How many are left?"
    "|I start with {a} {things}. Then I lose {b}. How many do I have now?"
    "|{who} bought {a} {things} and used {b}. How many {things} has {who} left?"
    "|{a} {things} were there, and {who} took {b}. How many were not taken?"
    "|There are {a} {things}. {b} of them are mine. How many are not mine?"
    "|We baked {a} and ate {b}. How many can we still eat?"
    "|{who} needs {a} {things} and has {b}. How many are missing?"
    "|{a} people are on the bus and {b} get off. How many stay on the bus?"
    "|I own {a} {things} and throw {b} away. How many do I keep?"
    "|A book has {a} pages and I read {b}. How many pages are left?"
    "|If you have {a} {things} and give me {b}, how many do you keep?"
    "|{who} owns {a} {things} and gives {b} away. How many {things} does {who} have now?"
    "|{who} has {a} {things} and gives {b} to me. How many {things} does {who} still have?"
    "|I had {a} {things}, then {b} of them got lost. How many {things} are left?"
    "|I had {a} {things} and {b} of them broke. How many are still whole?"
    "|I sell {b} of {a} {things}. How many {things} remain?"
    "|From my {a} {things} I give {b} to {who}. How many remain?"
    "|From {a} {things} we take {b}. How many {things} are left?"
    "|From the {a} {things} {who} ate {b}. How many {things} remain?"
    "|{a} {things} were sold except {b}. How many were sold?"
    "|{who} drops {b} of {a} {things}. How many {things} does {who} still hold?"
    "|Take {b} {things} out of {a} {things}. How many remain?"
    "|Yesterday I had {a} {things}. Today {b} are gone. How many {things} are left?"
    "|{who} started with {a} {things} and spent {b}. How many {things} are left now?"
    "|Of my {a} {things} I sell {b}. How many {things} do I still have?",
    "{who} owns {a} {things} and gives away {b}. How many {things} does {who} still have?"
    "|I had {a} {things}, then {b} of them broke. How many {things} are left?"
    "|From {a} {things} I sell {b}. How many {things} remain?",
)
THINGS = barred(
    "apples|books|coins|eggs|pens|balls|cards|stones|shells|plums|stamps|nuts|toys|cups|cookies|marbles|tickets",
    "pears|buttons|peaches|candles|grapes",
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
    # without a story, a sum has the fewest tokens, so training sees more sums
    bare = split is Split.TRAIN and rng.random() < 0.35
    template = rng.choice(_BARE[plus]) if bare else lists.pick(rng, split)
    return exchange(
        say(rng, split, template, values, decorate=not bare), answer + ".", Expected(holds=(f"= {result}.",))
    )


def _operands(rng: random.Random) -> tuple[int, int]:
    if rng.random() < 0.2:
        return rng.randrange(20), rng.randrange(20)
    return rng.randrange(100), rng.randrange(100)

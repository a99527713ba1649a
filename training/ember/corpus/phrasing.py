"""Variations of a sentence: greetings before it, thanks after it, lower case, no full stop, a typo.

Works on templates with `{slots}`. Values are never changed, because a changed value is a different fact.
"""

import random
import re
from collections.abc import Mapping

from training.ember.corpus import words
from training.ember.corpus.conversation import Split, barred

BEFORE = barred(
    "Hi, |Hello! |Hey, |Please tell me: |Quick question: |Ember, |Okay, |I wonder: |So, |Now, |Hi Ember! "
    "|Next question: |Please, |Hey there, |Good morning! |One more thing: |And |Well, |Sorry, |Another one: |Hello, "
    "|Thanks. |Great. |Alright, |Let me ask: |Let me ask something: |May I ask you: |Excuse the question: "
    "|Sorry to ask you, |Good evening, |Good day! |Good afternoon! |All right. |That is cool. |Nice. |Perfect. "
    "|Thank you. |Yes. |No, |Hmm, |Oh, |My next question: |You there, |Dear Ember, |Tell me, |Be so kind: |First, "
    "|Then ",
    "Hiya, |Excuse me, |Let me ask you: |Good evening! |Right, |Cool. ",
)
AFTER = barred(
    " Thanks!| Please.| Thank you.| Answer briefly.| I need it for a form.| Do you know?| Thx| Just curious."
    "| Thanks in advance.| Many thanks!| Thanks a lot!| Thank you very much.| It would help me much."
    "| I would like that.| I want to know.| That is all I would like.| I appreciate it.| Cheers, my friend!"
    "| Be quick.| It is urgent.| Help me please.| Can you do that?| Good luck!| Bye!| Is that okay?"
    "| I am in a hurry.| That is all.",
    " Cheers!| Much appreciated.| I would like to know.",
)
_SLOT = re.compile(r"(\{[a-z_0-9]+\})")


def say(rng: random.Random, split: Split, template: str, values: Mapping[str, str], decorate: bool = True) -> str:
    """Fill a template, with the noise of real typing outside of the values."""
    text = template
    if decorate and rng.random() < 0.22:
        before = BEFORE.pick(rng, split)
        text = before + (text if before[-2] in ".!" else _lower_first(text))
    if decorate and rng.random() < 0.12 and text[-1] in ".?!":
        text += AFTER.pick(rng, split)
    if rng.random() < 0.18:
        text = _lower_words(text)
    if rng.random() < 0.2:
        text = text.rstrip(".?!")
    if rng.random() < 0.05:
        text = _typo(rng, text)
    return fill(text, values)


def fill(template: str, values: Mapping[str, str]) -> str:
    return _SLOT.sub(lambda slot: values[slot.group()[1:-1]], template)


def _lower_first(text: str) -> str:
    return text if text.startswith(("I ", "I'", "{")) else text[0].lower() + text[1:]


def _lower_words(text: str) -> str:
    return "".join(part if _SLOT.fullmatch(part) else part.lower() for part in _SLOT.split(text))


def _typo(rng: random.Random, text: str) -> str:
    """Swap or drop one letter in one word of at least five letters."""
    places = [m for m in re.finditer(r"(?<![{\w])[a-z]{5,}(?![\w}])", text)]
    if not places:
        return text
    start, end = rng.choice(places).span()
    at = rng.randrange(start + 1, end - 1)
    if rng.random() < 0.5:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + text[at + 1 :]


FRAMES = (
    *("I heard that ", "As you know, ", "We know that ", "It seems that ", "They say ", "Also, ", "In addition, "),
    *("By the way, ", "Please note that ", "I think ", "Besides, ", "As far as I know, ", "Of course ", "And ", "But "),
    *("What is more, ", "It is true that ", "You should know: ", "Then, ", "So far ", "For now, ", "People say that "),
)
TAILS = (
    " as well",
    " too",
    " now",
    " these days",
    " by the way",
    " at the moment",
    ", of course",
    ", I think",
    " again",
)


def framed(rng: random.Random, template: str, share: float) -> str:
    """With probability `share`, add phrases to a clause that do not change its meaning."""
    if rng.random() >= share or not template.endswith(".") or ":" in template:
        return template
    if rng.random() < 0.65:
        return rng.choice(FRAMES) + _lower_first(template)
    return template[:-1] + rng.choice(TAILS) + "."


def blur(rng: random.Random, template: str, share: float, keep: bool = False) -> str:
    """With probability `share`, insert random words and, unless `keep`, replace or drop some words.

    So a model must find the meaning from the values and the remaining words, as in a phrasing that it has not seen.
    """
    if rng.random() >= share:
        return template
    out = []
    for word in template.split(" "):
        draw = rng.random()
        if draw < 0.12:
            out.append(rng.choice(words.POOL))
        if "{" in word or keep or draw < 0.7:
            out.append(word)
        elif draw < 0.9:
            out.append(rng.choice(words.POOL) + (word[-1] if word[-1] in ".?,:" else ""))
        elif word[-1] in ".?":
            out.append(word)
    return " ".join(out)

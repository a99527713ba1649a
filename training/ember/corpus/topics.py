"""Topics that a user can state and ask for: the phrasings of statements, questions and answers.

Most topics combine an owner (I, Anna, the) with a noun, so that the skill to learn is to find words again.
"""

import random
from dataclasses import dataclass

from training.ember.corpus import words
from training.ember.corpus.conversation import Lists, Split, barred

MINE = barred(
    "My {key} is {value}.|My {key} is {value}.|Remember that my {key} is {value}.|Note that my {key} is {value}."
    "|By the way, my {key} is {value}.|Just so you know, my {key} is {value}.|{value} is my {key}."
    "|Please remember: my {key} is {value}.|I have to tell you my {key}: {value}.|My {key}: {value}."
    "|Keep in mind that my {key} is {value}.|You should know that my {key} is {value}.|Remember my {key}: {value}."
    "|For my {key} I have {value}.|I picked {value} as my {key}.|I want to tell you that my {key} is {value}."
    "|Let me say that my {key} is {value}.|And my {key} is {value}.|Do remember that my {key} is {value}."
    "|Write this down: my {key} is {value}.|Never forget my {key}: {value}.",
    "Do not forget that my {key} is {value}.|I want you to know my {key} is {value}.|Also, my {key} is {value}."
    "|Let me tell you that my {key} is {value}.|Write down that my {key} is {value}.",
)
ASK_MINE = barred(
    "What is my {key}?|What is my {key}?|Tell me my {key}.|Do you remember my {key}?|What did I say my {key} was?"
    "|Which {key} did I tell you?|My {key}?|Remind me of my {key}.|I forgot my {key}. What is it?|What was my {key}?"
    "|Do you know my {key}?|Say my {key}.|Which {key} do I have?|Could you tell me my {key}?"
    "|Please tell me what my {key} is.|Which was my {key}?|You know my {key}, right?|Please say my {key} again."
    "|What have I said about my {key}?|I need my {key}.|What's my {key}?|Can you say my {key}?"
    "|Can you remind me of my {key}?|Please remind me of my {key}.|Do you still remember my {key}?"
    "|Do you still have my {key}?|What is my {key} again?|Tell me what my {key} is.|I would like to hear my {key}.",
    "Can you tell me my {key}?|What was my {key} again?|Please remind me what my {key} is."
    "|Do you still know my {key}?|Could you repeat my {key}?",
)
THEIRS = barred(
    "{owner}'s {key} is {value}.|The {key} of {owner} is {value}.|Remember that {owner}'s {key} is {value}."
    "|By the way, {owner}'s {key} is {value}.|Note that the {key} of {owner} is {value}."
    "|{owner} has {value} as {key}.|I know that {owner}'s {key} is {value}."
    "|{owner} told me that the {key} is {value}.",
    "Do not forget that {owner}'s {key} is {value}.|Also, {owner}'s {key} is {value}."
    "|Let me tell you that {owner}'s {key} is {value}.",
)
ASK_THEIRS = barred(
    "What is {owner}'s {key}?|What is the {key} of {owner}?|Tell me {owner}'s {key}."
    "|Do you remember {owner}'s {key}?|Which {key} does {owner} have?|What was {owner}'s {key}?|{owner}'s {key}?"
    "|Remind me of the {key} of {owner}.|Could you tell me {owner}'s {key}?|Please tell me what {owner}'s {key} is."
    "|I need {owner}'s {key}.|Please say the {key} of {owner} again.",
    "Can you tell me {owner}'s {key}?|What was the {key} of {owner} again?|Please remind me what {owner}'s {key} is.",
)
THE = barred(
    "The {key} is {value}.|Remember that the {key} is {value}.|By the way, the {key} is {value}."
    "|Note: the {key} is {value}.|Please remember: the {key} is {value}.|The {key}: {value}.|{value} is the {key}."
    "|Remember the {key}: {value}.|They told me the {key} is {value}.|We agreed that the {key} is {value}."
    "|And the {key} is {value}.|Write this down: the {key} is {value}.|Never forget the {key}: {value}.",
    "Do not forget that the {key} is {value}.|Also, the {key} is {value}.|Write down that the {key} is {value}.",
)
ASK_THE = barred(
    "What is the {key}?|Tell me the {key}.|Do you remember the {key}?|What did I say the {key} was?|The {key}?"
    "|Remind me of the {key}.|I forgot the {key}. What is it?|What was the {key}?|Which {key} did I give you?"
    "|Could you tell me the {key}?|Please tell me what the {key} is.|Please say the {key} again.|I need the {key}."
    "|You know the {key}, right?|Can you say the {key}?|Can you remind me of the {key}?|What is the {key} again?"
    "|Tell me what the {key} is.|Do you still know the {key}?|Repeat the {key}, please.",
    "Can you tell me the {key}?|What was the {key} again?|Please remind me what the {key} is."
    "|Could you repeat the {key}?",
)

_MY_KEYS = {
    "favourite colour": "colour",
    "favourite food": "food",
    "favourite animal": "animal",
    "favourite number": "number",
    "favourite city": "city",
    "favourite word": "word",
    "favourite day": "day",
    "lucky number": "number",
    "hobby": "hobby",
    "last name": "proper",
    "surname": "proper",
    "nickname": "proper",
    "home town": "city",
    "locker number": "number",
    "room number": "number",
    "house number": "number",
    "password": "word",
    "secret word": "word",
    "pin": "number",
    "flight number": "code",
    "order number": "code",
    "customer number": "number",
    "dog's name": "person",
    "cat's name": "person",
    "sister's name": "person",
    "brother's name": "person",
    "boss's name": "person",
    "teacher's name": "person",
    "best friend": "person",
    "seat": "code",
    "hotel": "proper",
    "street": "proper",
    "birthday": "date",
    "email": "email",
    "shoe size": "small",
    "user name": "word",
    "job": "job",
    "team": "proper",
    "car colour": "colour",
    "language": "language",
    "doctor": "person",
    "gym": "proper",
    "bank": "proper",
    "neighbour": "person",
    "desk number": "number",
    "ticket number": "code",
    "pet": "animal",
    "school": "proper",
    "mother's name": "person",
    "father's name": "person",
    "wifi name": "word",
    "badge": "code",
}
_THE_KEYS = {
    "meeting time": "time",
    "meeting room": "proper",
    "door code": "number",
    "wifi password": "word",
    "code word": "word",
    "train time": "time",
    "deadline": "date",
    "address": "proper",
    "budget": "number",
    "project name": "proper",
    "table number": "number",
    "gate": "code",
    "safe code": "number",
    "guest of honour": "person",
    "winner": "person",
    "party date": "date",
    "colour of the door": "colour",
    "name of the ship": "proper",
    "dinner": "food",
    "price": "number",
    "magic word": "word",
    "bus number": "number",
    "score": "number",
    "captain": "person",
    "name of the cat": "person",
}


@dataclass(frozen=True)
class Topic:
    """A topic that can be stated, asked and answered; a conversation has topics with different keys."""

    key: str
    statements: Lists
    questions: Lists
    answer: str
    not_told: str
    kind: str


_SPECIAL = (
    Topic(
        "name",
        barred(
            "I go by {value}.|It is me, {value}.|My parents named me {value}.|Everyone knows me as {value}."
            "|Hello, {value} here.|My name is {value}.|I am {value}.|I'm {value}.|Call me {value}."
            "|My name's {value}.|I am called {value}.|People call me {value}.|You can call me {value}."
            "|This is {value}.|{value} is my name.|Remember my name: {value}.|All call me {value}."
            "|My friends call me {value}.|The name I go by is {value}.|Let me say who I am: {value}."
            "|I introduce myself as {value}.|Hi, I'm {value}.|Please use my name, {value}.|My name: {value}."
            "|It's {value}.|Everybody calls me {value}.|My name would be {value}.",
            "They call me {value}.|The name is {value}.|Please call me {value}.|Let me introduce myself: I am {value}.",
        ),
        barred(
            "Can you say my name?|Which name is mine?|How do people call me?|What name did I tell you?"
            "|Could you tell me my name?|Please tell me what I am called.|What is my name?|What's my name?"
            "|Who am I?|Do you remember my name?|Tell me my name.|What am I called?|Do you know who I am?"
            "|What did I say my name was?|Do you know my name?|Say my name.|Which name did I give you?"
            "|Can you tell me what I am called?|Can you tell me who I am?|Tell me what I am called."
            "|Tell me who I am.|What is my name again?|Do you still know who I am?|What did I say I am called?"
            "|Please say my name.|Please tell me my name.|Remind me of my name.|I forgot my name."
            "|What do people call me?|My name, please.",
            "Can you tell me my name?|What was my name again?|Do you still know my name?|Please say what I am called.",
        ),
        "Your name is {value}.",
        "You have not told me your name.",
        "person",
    ),
    Topic(
        "home",
        barred(
            "My flat stands in {value}.|I have a house in {value}.|I was born in {value} and live there."
            "|I settled in {value}.|You find me in {value}.|I share a home in {value}."
            "|These years I stay in {value}.|I call {value} my home.|I live in {value}.|I'm from {value}."
            "|My home is in {value}.|I come from {value}.|I am living in {value}.|My house is in {value}."
            "|I moved to {value}.|My flat is near {value}.|My room is in {value}.|I now live in {value}."
            "|I live near {value}.|These days my home is {value}.|I have lived in {value} for years."
            "|I stay in {value}.|I am based in {value}.|We live in {value}.|I grew up and live in {value}."
            "|The city I live in is {value}.|I have a flat in {value}.",
            "My flat is in {value}.|These days I live in {value}.",
        ),
        barred(
            "Could you tell me where I live?|In which place do I live?|Where do I stay?|What is my city?"
            "|Please say where my home is.|Where do I live?|Which city do I live in?|Where is my home?"
            "|Do you know where I live?|In which city do I live?|Where did I say I live?|What city do I live in?"
            "|Can you tell me my city?|Tell me where I live.|Please tell me where I live."
            "|Can you say where I live?|Do you still know where I live?|Do you remember my city?"
            "|Where was it that I live?|Where do I have my home?|Where am I at home?|I forgot where I live."
            "|Remind me where I live.|What place do I live in?|Which city did I say I live in?"
            "|Where is it that I live?",
            "Can you tell me where I live?|Do you remember where I live?",
        ),
        "You live in {value}.",
        "You have not told me where you live.",
        "city",
    ),
    Topic(
        "work",
        barred(
            "I was trained as a {value}.|My profession: {value}.|I get paid as a {value}.|I became a {value}."
            "|My living comes from being a {value}.|I am employed as a {value}.|I work as a {value}."
            "|I am a {value}.|My job is {value}.|I earn my money as a {value}.|By trade I am a {value}."
            "|I make money as a {value}.|I live from my work as a {value}.|My profession is that of a {value}."
            "|I have the job of a {value}.|I'm a {value}.|I work here as a {value}.|I do the work of a {value}."
            "|My work is being a {value}.|For a living I am a {value}.|As a {value} I earn money.",
            "I make my living as a {value}.|My profession is {value}.",
        ),
        barred(
            "Could you tell me my job?|What do I do?|Which job do I have?|How do I earn my money?"
            "|Please say what my job is.|What do I do all day for money?|What is my job?|What do I do for work?"
            "|What do I work as?|Do you remember my job?|What did I say my job is?"
            "|What is it that I do for a living?|What do I live from?|How do I make a living?"
            "|Can you tell me my job?|Can you tell me what I do?|Tell me what my job is.|What is my profession?"
            "|Which work do I do?|What do I work?|What was my job again?|What was my job?|Do you know my job?"
            "|Do you still know what I do?|Tell me what I do for work.|Remind me of my job."
            "|For a living, what do I do?|What am I by profession?|What do I do as my job?",
            "What do I do for a living?|Can you tell me what my job is?",
        ),
        "You work as a {value}.",
        "You have not told me your job.",
        "job",
    ),
    Topic(
        "age",
        barred(
            "I have been alive for {value} years.|I just had my birthday and am {value}.|I turned {value} today."
            "|My years count {value}.|By May I will be {value} years old.|I am {value} years old."
            "|I'm {value} years old.|My age is {value}.|I turned {value} this year.|I am {value}."
            "|I just turned {value}.|Now I am {value} years old.|I am now {value}.|By now I am {value}."
            "|I became {value} this year.|I have reached {value} years.|I am of age {value}.|My age: {value}."
            "|{value} years old is what I am.|I have lived {value} years.|My age is now {value}.",
            "I have just turned {value}.|By now I am {value} years old.",
        ),
        barred(
            "Could you tell me my age?|Please say how old I am.|How many years old am I?"
            "|Which age did I tell you?|How old am I?|What is my age?|Do you remember how old I am?"
            "|Tell me my age.|What age am I?|Can you tell me my age?|Tell me how old I am."
            "|Do you know how old I am?|Do you know my age?|What was my age?|What is my age again?"
            "|How old did I say I am?|How old am I again?|Do you still know how old I am?|Please tell me my age."
            "|Remind me how old I am.|My age?",
            "Can you tell me how old I am?|What was my age again?",
        ),
        "You are {value} years old.",
        "You have not told me how old you are.",
        "small",
    ),
    Topic(
        "dog",
        barred(
            "Our dog listens to {value}.|I bought a dog and named it {value}.|My dog goes by {value}."
            "|The dog I own is {value}.|The dog is called {value}.|I have a dog called {value}."
            "|My dog is called {value}.|Our dog is named {value}.|My dog's name is {value}."
            "|I walk my dog {value} every day.|We have a dog named {value}.|The name of our dog is {value}."
            "|I own a dog named {value}.|I have a dog and its name is {value}.|My dog has the name {value}."
            "|My dog: {value}.|{value} is my dog.|{value} is the name of my dog.|We own a dog, {value}."
            "|I named my dog {value}.",
            "The name of my dog is {value}.|I own a dog called {value}.",
        ),
        barred(
            "Could you tell me the name of my dog?|Which name does my dog have?|Please say what my dog is called."
            "|What was my dog called?|What is my dog called?|What is the name of my dog?|What's my dog's name?"
            "|Do you remember my dog's name?|How is my dog called?|Can you tell me the name of my dog?"
            "|Tell me what my dog is called.|Tell me my dog's name.|What was my dog's name?"
            "|What is my dog's name?|What was the name my dog has?|Do you know the name of my dog?"
            "|Do you still know what my dog is called?|What name has my dog?|Remind me of my dog's name."
            "|How did I call my dog?|What is my dog called again?",
            "Can you tell me what my dog is called?|What was the name of my dog?",
        ),
        "Your dog is called {value}.",
        "You have not told me about a dog.",
        "person",
    ),
    Topic(
        "cat",
        barred(
            "Our cat listens to {value}.|I found a cat and named it {value}.|My cat goes by {value}."
            "|The cat I own is {value}.|The cat is called {value}.|I have a cat called {value}."
            "|My cat is called {value}.|Our cat is named {value}.|My cat's name is {value}."
            "|We have a cat named {value}.|The name of our cat is {value}.|I own a cat named {value}."
            "|I have a cat and its name is {value}.|My cat has the name {value}.|My cat: {value}."
            "|{value} is my cat.|{value} is the name of my cat.|We own a cat, {value}.|I named my cat {value}.",
            "The name of my cat is {value}.|I own a cat called {value}.",
        ),
        barred(
            "Could you tell me the name of my cat?|Which name does my cat have?|Please say what my cat is called."
            "|What was my cat called?|What is my cat called?|What is the name of my cat?|What's my cat's name?"
            "|Do you remember my cat's name?|How is my cat called?|Can you tell me the name of my cat?"
            "|Tell me what my cat is called.|Tell me my cat's name.|What was my cat's name?"
            "|What is my cat's name?|What was the name my cat has?|Do you know the name of my cat?"
            "|Do you still know what my cat is called?|What name has my cat?|Remind me of my cat's name."
            "|How did I call my cat?|What is my cat called again?",
            "Can you tell me what my cat is called?|What was the name of my cat?",
        ),
        "Your cat is called {value}.",
        "You have not told me about a cat.",
        "person",
    ),
    Topic(
        "meeting",
        barred(
            "Our meeting opens at {value}.|The meeting was set for {value}.|They planned the meeting for {value}."
            "|Meeting: {value}.|Be at the meeting at {value}.|The meeting is at {value}."
            "|My meeting starts at {value}.|We meet at {value}.|The meeting starts at {value}."
            "|Our meeting was moved to {value}.|I have a meeting at {value}.|Our meeting begins {value}."
            "|The meeting will begin at {value}.|I planned my meeting for {value}."
            "|The meeting is planned for {value}.|My meeting is at {value}.|At {value} the meeting begins."
            "|At {value} we have a meeting.|My meeting was put at {value}.|The time of the meeting is {value}."
            "|Meeting at {value}.",
            "The meeting begins at {value}.|My meeting is planned for {value}.",
        ),
        barred(
            "Could you tell me when the meeting is?|When will the meeting be?"
            "|For what time is the meeting planned?|When does our meeting begin?"
            "|Please say when the meeting starts.|When is the meeting?|At what time is the meeting?"
            "|When does the meeting start?|What time is my meeting?|When do we meet?"
            "|What time does the meeting start?|When does the meeting begin?|When does my meeting start?"
            "|When is my meeting?|When will my meeting begin?|Tell me when the meeting is."
            "|Can you tell me the time of the meeting?|Can you say when my meeting is?"
            "|Do you know when the meeting is?|When was the meeting?|Remind me when the meeting is."
            "|What time is the meeting?|What time did I say the meeting is?|When should I be at the meeting?",
            "When does my meeting begin?|Can you tell me when the meeting is?",
        ),
        "The meeting is at {value}.",
        "You have not told me when the meeting is.",
        "time",
    ),
    Topic(
        "food",
        barred(
            "I could eat {value} all day.|{value} is what I like to eat.|Give me some {value} and I am happy."
            "|For dinner I want {value}.|I always order {value}.|The best food is {value}."
            "|I enjoy eating {value}.|My plate is full of {value}.|I never say no to {value}.|I love {value}."
            "|I like {value} most.|My favourite food is {value}.|I love to eat {value}."
            "|Nothing tastes better than {value}.|I eat {value} every day.|The food I like is {value}."
            "|The food I love is {value}.|Best of all food I like {value}.|I like {value} best."
            "|I really like {value}.|I really love to eat {value}.|I like to eat {value}.|I like eating {value}."
            "|Of all food I love {value}.|I enjoy {value} for dinner.|My food is {value}.|What I eat is {value}."
            "|I am fond of {value} for lunch.",
            "The food I like best is {value}.|I really enjoy eating {value}.",
        ),
        barred(
            "Could you tell me what food I like?|Which food is my favourite?|What do I enjoy eating?"
            "|What did I say I like to eat?|Please say what I love to eat.|What do I love to eat?"
            "|What is my favourite food?|What food do I like?|What do I like to eat?|Which food do I love?"
            "|Can you tell me my favourite food?|Tell me what I like to eat.|Tell me what food I like."
            "|What did I say I eat?|What food did I tell you of?|What food do I like best?"
            "|Which food did I say I love?|Which food do I like?|What do I like eating?|What do I eat?"
            "|What was it that I like to eat?|Do you know what I like to eat?|Remind me what I like to eat."
            "|What is the food I like?|What was my favourite food?",
            "Can you tell me what I like to eat?|What food did I say I like?",
        ),
        "You like {value}.",
        "You have not told me what you like to eat.",
        "food",
    ),
    Topic(
        "colour",
        barred(
            "{value} is my favourite colour.|No colour is as good as {value}.|I paint everything {value}."
            "|My best colour is {value}.|I think {value} is the best colour.|The colour for me is {value}."
            "|I like the colour {value}.|{value} is the colour I like best.|My favourite colour is {value}."
            "|My favorite color is {value}.|The colour I love is {value}.|Of all colours I love {value}."
            "|I like {value} best of all colours.|The best colour I know is {value}."
            "|The best of all colours is {value}.|To me {value} is the best colour.|I prefer the colour {value}."
            "|The colour I like is {value}.|My colour is {value}.|I love the colour {value}."
            "|For me the best colour is {value}.|As a colour I like {value}.",
            "Of all colours I like {value} best.|The best colour is {value} to me.",
        ),
        barred(
            "Could you tell me my favourite colour?|Which colour is my favourite?|What colour did I say I like?"
            "|Which colour do I love?|Please say which colour I like.|What is my favourite colour?"
            "|Which colour do I like best?|What colour do I like?|What's my favorite color?"
            "|What is my favorite color?|Can you tell me which colour I like?|Can you say my favourite colour?"
            "|Tell me my favourite colour.|Tell me which colour I like.|Which colour did I tell you?"
            "|Which colour did I name?|Which colour do I like?|What colour do I love?"
            "|What colour was it that I like?|Which is my favourite colour?|Do you know my favourite colour?"
            "|Do you remember which colour I like?|Remind me of my favourite colour."
            "|What was my favourite colour?",
            "Can you tell me my favourite colour?|Which colour did I say I like?",
        ),
        "Your favourite colour is {value}.",
        "You have not told me your favourite colour.",
        "colour",
    ),
    Topic(
        "hobby",
        barred(
            "I spend my time on {value}.|I do a lot of {value}.|{value} is my hobby."
            "|I started with {value} as a hobby.|I have fun with {value}.|After work I do {value}."
            "|My free time goes into {value}.|I practise {value}.|For relaxing I go {value}.|I enjoy {value}."
            "|In my free time I do {value}.|My hobby is {value}.|On weekends I go {value}."
            "|I spend my evenings with {value}.|I like to relax with {value}.|To relax I do {value}."
            "|For fun there is {value}.|For fun I go {value}.|I do {value} for fun.|{value} is what I do for fun."
            "|I like {value} as a hobby.|I love {value} as a hobby.|As a hobby I have {value}.|I am into {value}."
            "|My hobby: {value}.|I fill my time with {value}.",
            "I relax with {value}.|For fun I do {value}.",
        ),
        barred(
            "Could you tell me my hobby?|What do I do for fun in my free time?|Which hobby did I tell you?"
            "|What do I like doing?|Please say what my hobby is.|What is my hobby?|What do I do in my free time?"
            "|Which hobby do I have?|What do I enjoy?|Do you remember my hobby?|Can you tell me what my hobby is?"
            "|Can you say my hobby?|Tell me my hobby.|Tell me what my hobby is.|What do I do for fun?"
            "|What do I like to do?|What do I like to do in my free time?|For fun, what do I do?"
            "|What was my hobby?|What is my hobby again?|Do you know my hobby?"
            "|Do you still know what I do for fun?|Remind me of my hobby.|What fun thing do I do?|My hobby?",
            "Can you tell me my hobby?|What do I like to do for fun?",
        ),
        "Your hobby is {value}.",
        "You have not told me your hobby.",
        "hobby",
    ),
)


def draw_topic(rng: random.Random, split: Split) -> Topic:
    draw = rng.random()
    if draw < 0.42:
        return rng.choice(_SPECIAL)
    if draw < 0.72:
        key, kind = _key(rng, split, _MY_KEYS)
        return _from(
            key, kind, key, MINE, ASK_MINE, f"Your {key} is {{value}}.", f"You have not told me your {key}.", ""
        )
    if draw < 0.87:
        key, kind = _key(rng, split, _THE_KEYS)
        return _from(
            f"the {key}", kind, key, THE, ASK_THE, f"The {key} is {{value}}.", f"You have not told me the {key}.", ""
        )
    owner = words.person(rng, split)
    key, kind = _key(rng, split, _MY_KEYS)
    return _from(
        f"{owner} {key}",
        kind,
        key,
        THEIRS,
        ASK_THEIRS,
        f"{owner}'s {key} is {{value}}.",
        f"You have not told me {owner}'s {key}.",
        owner,
    )


def _key(rng: random.Random, split: Split, keys: dict[str, str]) -> tuple[str, str]:
    if split is Split.TRAIN and rng.random() < 0.1:
        return words.made_up(rng, split), rng.choice(("word", "proper", "number", "code"))
    return rng.choice(tuple(keys.items()))


def _from(
    key: str, kind: str, noun: str, statements: Lists, questions: Lists, answer: str, not_told: str, owner: str
) -> Topic:
    def bind(lists: Lists) -> Lists:
        def put(template: str) -> str:
            return template.replace("{key}", noun).replace("{owner}", owner)

        return Lists(tuple(map(put, lists.train)), tuple(map(put, lists.held_out)))

    return Topic(key, bind(statements), bind(questions), answer, not_told, kind)

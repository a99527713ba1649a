"""Questions about cities of the table, and about cities that are not in it."""

import random

from training.ember.cities import CITIES, City
from training.ember.corpus import words
from training.ember.corpus.conversation import Exchange, Expected, Lists, Split, assistant, barred, exchange, user
from training.ember.corpus.phrasing import say

COUNTRY = barred(
    "Which country is {city} in?|What country is {city} in?|In which country is {city}?"
    "|What country does {city} belong to?|Tell me the country of {city}.|{city} is in which country?"
    "|Name the country of {city}.|What is the country of {city}?|Which nation is {city} part of?"
    "|Do you know which country {city} is in?|I am flying to {city}. Which country is that?"
    "|In what country can I find {city}?|Country of {city}?|What country would I be in if I visit {city}?"
    "|My friend lives in {city}. What country is that in?|The city of {city} lies in which country?"
    "|Give me the country for {city}.|Which country does {city} lie in?|{city}: which country?"
    "|What nation is {city} in?|Could you tell me what country {city} is in?|To which country does {city} belong?",
    "Please name the country where {city} is.|Which country has {city}?|{city} belongs to what country?"
    "|I forgot the country of {city}, what is it?|What country will I find {city} in?"
    "|Can you tell me in which country {city} lies?|I read about {city}. Which country is it in?",
)
CODE = barred(
    "What is the airport code of {city}?|Which airport code does {city} have?|Airport code for {city}?"
    "|Tell me the airport code of {city}.|What is the IATA code of {city}?|IATA code for {city}?"
    "|Give me the IATA code for {city}.|What is the airport code for {city}?|{city} airport code?"
    "|What are the three letters of the airport of {city}?|What code does the airport of {city} use?"
    "|I fly to {city}. What is the airport code?|Do you know the airport code of {city}?"
    "|What is the code of the airport in {city}?|Which code stands for {city} on my ticket?"
    "|What is {city}'s airport code?|What is the three-letter code of {city}?|Code of {city} airport?"
    "|Name the airport code of {city}.|Could you give me the airport code of {city}?"
    "|What does my luggage tag say for {city}?|How is the airport of {city} abbreviated?|{city}: which IATA code?"
    "|I fly to {city}; what is its airport code?|My flight goes to {city}. Which airport code is that?"
    "|We are going to {city}; tell me the airport code.|My plane flies to {city}; which code is that?",
    "Which IATA code belongs to {city}?|I need the airport code for {city}.|Can you tell me the IATA code of {city}?"
    "|My flight goes to {city}; which airport code is that?|What airport code should I type for {city}?"
    "|Please give the three-letter airport code for {city}.|What is the code for the airport of {city}?",
)
COORDINATES = barred(
    "What are the coordinates of {city}?|Coordinates of {city}?|Give me the coordinates of {city}."
    "|What is the latitude and longitude of {city}?|Tell me the latitude and longitude of {city}."
    "|At which coordinates does {city} lie?|Which latitude and longitude does {city} have?"
    "|Where on the globe is {city}, in degrees?|What are the degrees of {city} on a map?"
    "|On which latitude is {city}?|Latitude and longitude of {city}?|Do you know the coordinates of {city}?"
    "|Near which coordinates is {city}?|What is {city}'s latitude and longitude?|What is the longitude of {city}?"
    "|I need {city} in degrees.|Can you give the position of {city} in degrees?|What is the latitude of {city}?"
    "|Name the coordinates of {city}.|{city}: latitude and longitude?|Geographic coordinates of {city}?",
    "Please give the latitude and longitude for {city}.|What coordinates does {city} have?"
    "|Can you tell me the coordinates of {city}?|I need the coordinates for {city}."
    "|How many degrees of latitude and longitude does {city} have?"
    "|Where is {city} in degrees of latitude and longitude?",
)
WHERE = barred(
    "Where is {city}?|Where do I find {city}?|Say where {city} is.|In what part of the world is {city}?"
    "|Tell me where {city} is.|Where on the map is {city}?|Where does {city} lie?|Where can I find {city}?"
    "|Where is {city} located?|Where in the world is {city}?|Do you know where {city} is?"
    "|Can you tell me where {city} is?|I am looking for {city}. Where is it?|Where exactly is {city}?"
    "|Whereabouts is {city}?",
    "Where would I find {city}?|Where on earth is {city}?|Could you say where {city} is?|Tell me where {city} lies.",
)
ABOUT = barred(
    "Tell me about {city}.|What do you know about {city}?|What should I know about {city}?"
    "|I want to learn about {city}.|Say what you know of {city}.|Some facts about {city}, please."
    "|Inform me about {city}.|Give me all you have on {city}.|I am interested in {city}."
    "|Could you tell me about {city}?|What is there to know about {city}?|Describe {city}."
    "|What can you say about {city}?|Give me the facts about {city}.|I am going to {city}. Tell me about it."
    "|Everything about {city}, please.|Say something about {city}.|What is {city}?",
    "What can you tell me about {city}?|Share what you know of {city}.|Give me some facts on {city}.",
)
REVERSE = barred(
    "Which city has the airport code {code}?|What city is {code}?|Which city is {code}?|What does {code} stand for?"
    "|Which airport is {code}?|{code} is the code of which city?|My ticket says {code}. Which city is that?"
    "|Which city does the airport code {code} belong to?|What is {code}?|Where do I land if I fly to {code}?"
    "|Decode the airport code {code}.|The airport code {code}: which city?|Tell me the city with the code {code}."
    "|Which place has the IATA code {code}?|What city does IATA code {code} mean?|City for {code}?"
    "|Where is the airport {code}?|Name the city with airport code {code}.|I saw {code} on a bag. Which city is it?"
    "|Which city do they mean by {code}?|What is meant by the code {code}?|Which place is meant, {code}?"
    "|My ticket reads {code}; which city is that?|The tag on my bag is {code}; what city is it?"
    "|{code} is on my bag; where does it go?",
    "What city uses the airport code {code}?|Which city is meant by {code}?"
    "|The IATA code {code} belongs to what city?|My bag is tagged {code}; what city is that?"
    "|Please tell me which city has the code {code}.|What place is the airport code {code}?",
)
_INTENTS = {"country": COUNTRY, "code": CODE, "coordinates": COORDINATES, "where": WHERE, "about": ABOUT}
_FOLLOW_UPS = {
    "country": barred(
        "And which country is it in?|Which country is that in?|What country is it in?|And the country?",
        "And what country is that?",
    ),
    "code": barred(
        "And its airport code?|What is its airport code?|And the IATA code?|Which airport code does it have?",
        "And what is the airport code?",
    ),
    "coordinates": barred(
        "And its coordinates?|What are its coordinates?|And the latitude and longitude?|Where does it lie in degrees?",
        "And what are the coordinates?",
    ),
}
_ELSEWHERE = {
    "same": barred(
        "And {city}?|What about {city}?|And for {city}?|How about {city}?|{city}?", "And what about {city}?"
    ),
}
NAMES = frozenset(city.name for city in CITIES)
CODES = frozenset(city.code for city in CITIES)


def answer(intent: str, city: City) -> str:
    return {
        "country": f"{city.name} is in {city.country}.",
        "code": f"The airport code of {city.name} is {city.code}.",
        "coordinates": f"{city.name} lies near {city.compass}.",
        "where": f"{city.name} is in {city.country}, near {city.compass}.",
        "about": f"{city.name} is in {city.country}, near {city.compass}. Its airport code is {city.code}.",
        "reverse": f"{city.code} is the airport code of {city.name}, {city.country}.",
    }[intent]


def expected(intent: str, city: City) -> Expected:
    holds = {
        "country": (city.country,),
        "code": (city.code,),
        "coordinates": (city.compass,),
        "where": (city.country, city.compass),
        "about": (city.country, city.compass, city.code),
        "reverse": (city.name, city.country),
    }[intent]
    return Expected(holds=holds, lacks=("do not know",))


def facts(rng: random.Random, split: Split) -> Exchange:
    """Return a question about one city, sometimes with a follow-up that only says "its" or "and Oslo?"."""
    draw = rng.random()
    if draw < 0.10:
        return _unknown(rng, split)
    city = rng.choice(CITIES)
    if draw < 0.25:
        code = city.code.lower() if split is Split.TRAIN and rng.random() < 0.1 else city.code
        question = say(rng, split, REVERSE.pick(rng, split), {"code": code})
        return exchange(question, answer("reverse", city), expected("reverse", city))
    intent = rng.choices(("country", "code", "coordinates", "where", "about"), (3, 4, 5, 2, 1.5))[0]
    first = exchange(_ask(rng, split, intent, city), answer(intent, city), expected(intent, city))
    return first if rng.random() < 0.6 else _followed(rng, split, intent, city, first)


def _followed(rng: random.Random, split: Split, intent: str, city: City, first: Exchange) -> Exchange:
    if rng.random() < 0.5:
        intent = rng.choice([other for other in _FOLLOW_UPS if other != intent])
        question = say(rng, split, _FOLLOW_UPS[intent].pick(rng, split), {}, decorate=False)
    else:
        city = rng.choice(CITIES)
        question = say(rng, split, _ELSEWHERE["same"].pick(rng, split), {"city": city.name}, decorate=False)
    return Exchange((*first.messages, user(question), assistant(answer(intent, city))), expected(intent, city))


def _ask(rng: random.Random, split: Split, intent: str, city: City) -> str:
    name = city.name.lower() if split is Split.TRAIN and rng.random() < 0.12 else city.name
    return say(rng, split, _INTENTS[intent].pick(rng, split), {"city": name})


def _unknown(rng: random.Random, split: Split) -> Exchange:
    if rng.random() < (0.4 if split is Split.TRAIN else 0.25):
        code = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(3))
        while code in CODES:
            code = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(3))
        question = say(rng, split, REVERSE.pick(rng, split), {"code": code})
        return exchange(question, f"I do not know the airport code {code}.", Expected(holds=("do not know", code)))
    name = (
        UNKNOWN_CITIES.pick(rng, split)
        if split is Split.HELD_OUT or rng.random() < 0.4
        else words.made_up(rng, split).capitalize()
    )
    while name in NAMES:
        name = words.made_up(rng, split, 3).capitalize()
    intent = rng.choice(tuple(_INTENTS))
    question = say(rng, split, _INTENTS[intent].pick(rng, split), {"city": name})
    return exchange(question, f"I do not know a city called {name}.", Expected(holds=("do not know", name)))


UNKNOWN_CITIES = Lists(
    words.listed(
        """Tampere;Uppsala;Ghent;Bruges;Utrecht;Leiden;Oxford;Cambridge;York;Bath;Galway;Limerick;Dijon;Reims;
        Brest;Mannheim;Kiel;Bonn;Mainz;Padua;Siena;Parma;Toledo;Granada;Leon;Braga;Coimbra;Lund;Bodo;Turku;
        Tartu;Lublin;Plzen;Pecs;Maribor;Mostar;Ohrid;Patras;Iasi;Kharkiv;Omsk;Samara;Sochi;Konya;Batumi;
        Tabriz;Mosul;Haifa;Hebron;Multan;Surat;Indore;Mysore;Kandy;Pokhara;Sylhet;Bago;Pattaya;Hue;Ipoh;
        Bandung;Davos;Lucerne;Tulsa;Omaha;Boise;Fresno;Reno;Memphis;Albany;Buffalo;Tucson;El Paso;Regina;
        Quebec;Puebla;Merida;Leon;Ponce;Arequipa;Rosario;Salta;Natal;Belem;Santos;Giza;Fez;Oran;Benghazi;
        Kumasi;Ibadan;Kano;Benin City;Kisumu;Arusha;Beira;Bulawayo;Soweto;Geelong;Dunedin;Kobe;Kyoto;Nara;
        Daegu;Tianjin;Xian;Suzhou;Gold Coast;Long Beach;Baton Rouge;Santa Fe;Cedar Rapids""",
        ";",
    ),
    words.listed(
        "Groningen|Norwich|Grenoble|Rostock|Ravenna|Zaragoza|Szeged|Tomsk|Erzurum|Madurai|Chiang Rai|Spokane"
        "|Saskatoon|Veracruz|Trujillo|Maseru|Ballarat|Okayama|Fort Worth",
        "|",
    ),
)

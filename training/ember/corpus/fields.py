"""The fields of texts about a person, an object or an event, and their possible names in a schema.

Clauses of booleans are those for yes, then `#`, then those for no. `{s}` stands for the subject, `{v}` for the value.
"""

from dataclasses import dataclass

from training.ember.corpus.conversation import Lists, barred


@dataclass(frozen=True)
class Field:
    names: Lists
    kind: str
    clauses: Lists
    json_type: str = "string"
    choices: tuple[str, ...] = ()


_PERSON = (
    Field(
        barred("age|years|age_years", "how_old"),
        "small",
        barred(
            "{s} has been alive for {v} years.|{s} reached {v} years.|{s} has turned {v}."
            "|{s} has been around for {v} years.|{v} is the age of {s}.|{s} celebrates {v} years."
            "|{s} was born {v} years ago.|Age: {v}.|{s} will soon be {v}.|At the moment {s} is {v}."
            "|{s} is {v} years old.|{s} is {v}.|{s} is aged {v}.|{s} just turned {v}.|The age is {v}."
            "|{s} lived through {v} winters.|At the age of {v}, {s} is doing well.|{s} became {v} last month."
            "|{s} has {v} years behind him.|{s} just reached the age {v}.|{s} is now in year {v} of life."
            "|The years of {s}: {v}.|With {v} years, {s} is still young.|{s} feels young at {v}."
            "|We know that {s} is {v} years of age.|{s} has seen {v} summers.|On the last birthday {s} was {v}."
            "|{s} says the age is {v}.|{s} will be {v} this year.|For {v} years {s} has lived.",
            "{s} has reached the age of {v}.|{s} has lived for {v} years.",
        ),
        "integer",
    ),
    Field(
        barred("city|home|lives_in|town|location", "residence|home_city"),
        "city",
        barred(
            "{s} stays in {v}.|{s} moved to {v}.|{s} calls {v} home.|You find {s} in {v}.|{s} settled in {v}."
            "|{s} was raised in {v}.|{s} is at home in {v}.|{s} owns a house in {v}.|{s} lives and works in {v}."
            "|The address is in {v}.|{v} is where {s} lives.|{s} has an office in {v}.|{s} lives in {v}."
            "|{s} comes from {v}.|{s} is from {v}.|{s} has a flat in {v}.|Home is {v}.|{s} now resides near {v}."
            "|The house of {s} is in {v}.|{s} has a home in {v}.|{s} has got a house near {v}."
            "|{s} stays with friends in {v}.|{s} spends the year in {v}.|{s} returned to {v}."
            "|{s} rents a room in {v}.|{s} bought a house in {v}.|{s} is based in {v}.|{v} is home to {s}."
            "|{s} found a flat in {v}.|{s} wants to stay in {v}.|You can visit {s} in {v}.|{s} never left {v}."
            "|The family of {s} lives in {v}.|{s} writes to us from {v}.",
            "{s} resides in {v}.|{s} has a house in {v}.",
        ),
    ),
    Field(
        barred("job|occupation|work|profession", "trade|job_title"),
        "job",
        barred(
            "{s} trained as a {v}.|{s} is known as a {v}.|By day {s} is a {v}.|{s} has become a {v}."
            "|{s} found work as a {v}.|Job: {v}.|{s} was hired as a {v}.|{s} gets paid as a {v}."
            "|{s} makes money as a {v}.|{s} is paid as a {v}.|{s} has a place as a {v}."
            "|{s} earns a living as a {v}.|Everyone needs a {v} like {s}.|{s} works as a {v}.|{s} is a {v}."
            "|{s} earns money as a {v}.|The job is {v}.|{s} is now employed, a {v}."
            "|A firm employed {s} as their {v}.|{s} makes a good {v}.|{s} lives from work as a {v}."
            "|{s} makes a good living, being a {v}.|{s} has a job as a {v}.|{s} started as a {v}."
            "|{s} wants to stay a {v}.|{s} is the {v} of the town.|The work of {s}: {v}."
            "|Being a {v} is what {s} does.|{s} learned to be a {v}.|{s} has the job of a {v}.|{s} is our {v}."
            "|They pay {s} as a {v}.|{s} is a good {v}.|{s} serves as a {v}.|By trade {s} is a {v}."
            "|{s} acts as a {v}.|{s} is employed here as a {v}.|{s} is employed, as a {v}."
            "|{s} was employed as a {v}.|The living {s} makes is that of a {v}.|{s} makes a fine living as a {v}.",
            "{s} makes a living as a {v}.|{s} is employed as a {v}.",
        ),
    ),
    Field(
        barred("hobbies|likes|interests", "pastimes|activities"),
        "hobby",
        barred(
            "{s} loves {v}.|{s} is keen on {v}.|{s} spends hours on {v}.|In the evening {s} does {v}."
            "|{s} cannot live without {v}.|{s} relaxes with {v}.|Interests: {v}.|After work it is {v}."
            "|{s} is mad about {v}.|{s} is good at {v}.|For {s} there is nothing like {v}.|For fun {s} does {v}."
            "|{s} is happy with {v}.|{s} likes {v}.|{s} enjoys {v}.|Hobbies: {v}.|The hobbies are {v}."
            "|{s} spends weekends with {v}.|{s} grew fond of {v}.|Very fond of {v}, is {s}.|{s} has fun with {v}."
            "|{s} finds {v} fun.|There is much {v} in the life of {s}.|For {s} there is only {v}."
            "|{s} has time for {v}.|{s} fills the days with {v}.|{s} dreams of {v}.|{s} is into {v}."
            "|{s} never tires of {v}.|{s} adores {v}.|{s} started with {v}.|{s} practises {v}."
            "|The free time of {s} is for {v}.|{s} takes joy in {v}.|{s} talks about {v} all day."
            "|On Sundays there is {v}.|{s} knows a lot about {v}.|{s} is very fond of {v}.|{s} is so fond of {v}."
            "|We are all fond of {v}, and so is {s}.|{s} was always fond of {v}.|What {s} is fond of is {v}.",
            "{s} is fond of {v}.|For fun there is {v}.",
        ),
        "array",
    ),
    Field(
        barred("member|is_member|subscribed|active", "has_membership|signed_up"),
        "",
        barred(
            "{s} is a member.|{s} pays the club.|{s} counts as a member.|{s} is part of the club."
            "|The club knows {s}.|{s} holds a club card.|{s} has joined the club.|{s} is in the club."
            "|{s} is one of our members.|{s} belongs to us.|The club counts {s} in.|{s} signed up for the club."
            "|{s} got into the club.|{s} has paid the club.|{s} stays in the club.|We have {s} as a member."
            "|{s} is a member now.|{s} carries a club card.|{s} does belong to our club.#{s} is not a member."
            "|{s} does not pay the club.|{s} does not count as a member.|{s} is not part of the club."
            "|{s} left the club.|The club does not know {s}.|{s} has no club card.|{s} has not joined the club."
            "|{s} is not in the club.|{s} is not one of our members.|{s} does not belong to us."
            "|The club does not count {s} in.|{s} has not signed up for the club.|{s} did not get into the club."
            "|{s} has not paid the club.|{s} does not stay in the club.|We do not have {s} as a member."
            "|{s} is no member.|{s} carries no club card.|{s} does not belong to our club."
            "|{s} is no longer in the club.",
            "{s} belongs to the club.#{s} does not belong to the club.",
        ),
        "boolean",
    ),
    Field(
        barred("married|is_married", "has_spouse"),
        "",
        barred(
            "{s} is married.|{s} has a wedding ring.|{s} found a partner.|{s} married last year."
            "|{s} has a partner.|{s} got married.|{s} is a married person.|{s} has been married for years."
            "|{s} said yes and married.|{s} wears a ring.|Yes, {s} is married.|{s} has a husband or a wife."
            "|{s} did marry.#{s} is not married.|{s} has no partner.|{s} never married.|{s} lives alone."
            "|{s} has not found a partner.|{s} is single.|{s} did not get married.|{s} is not a married person."
            "|{s} has never been married.|{s} said no and has not yet married.|{s} wears no ring."
            "|No, {s} is not married.|{s} has no husband and no wife.|{s} did not marry."
            "|{s} has not been married.",
            "{s} has married.#{s} has not married.",
        ),
        "boolean",
    ),
    Field(
        barred("email|mail|contact", "e_mail|mail_address"),
        "email",
        barred(
            "You can mail {v}.|Send it to {v}.|{s} uses {v}.|Answers go to {v}.|Ask at {v}.|{s} writes from {v}."
            "|Contact: {v}.|The inbox is {v}.|Email: {v}.|The email is {v}.|Write to {v}.|Mail goes to {v}."
            "|{s} reads what you send to {v}.|You reach {s} by mail at {v}.|{s} reads {v} each day."
            "|Reach out to {v}.|The mail of {s} is {v}.|Please mail {s} at {v}.|{s} has the address {v}."
            "|{s} can be reached at {v}.|The address is {v}.|Questions go to {v}.|Send a mail to {v}."
            "|{s} gets mail at {v}.|For mail use {v}.|{s} gave us {v}.|The mail box is {v}.|Drop a line to {v}.",
            "{s} reads mail at {v}.|Reach {s} at {v}.",
        ),
    ),
    Field(
        barred("favorite_color|colour|color|favourite_colour", "best_colour"),
        "colour",
        barred(
            "{s} picks {v}.|{s} paints in {v}.|Colour: {v}.|{s} wants everything in {v}.|{s} chose {v}."
            "|{v} is the colour of {s}.|The favourite colour is {v}.|{s} likes the colour {v}.|{s} wears {v}."
            "|The colour is {v}.|{s} prefers things in {v}.|{s} prefers {v} to all others."
            "|The colour {s} prefers is {v}.|{s} loves the colour {v}.|{s} goes for {v}.|{s} looks good in {v}."
            "|The colour of {s} is {v}.|{s} likes {v} best.|{s} dresses in {v}.|The best colour for {s} is {v}."
            "|{s} always takes {v}.|{s} likes it {v}.|For {s} it must be {v}.|{s} has chosen the colour {v}.",
            "{s} prefers the colour {v}.",
        ),
    ),
    Field(
        barred("phone|number|phone_number", "telephone"),
        "number",
        barred(
            "Number: {v}.|Dial {v}.|{s} answers at {v}.|You reach us under {v}.|Ring {v}."
            "|The phone number is {v}.|Phone: {v}.|Call {v}.|The telephone of {s} is {v}.|Telephone: {v}."
            "|{s} has the telephone {v}.|Call {s} under {v}.|{s} has the number {v}.|The number is {v}."
            "|The number of {s} is {v}.|You can ring {v}.|Call us on {v}.|{s} picks up at {v}.|By telephone: {v}."
            "|{s} gave the number {v}.|You can call {v}.|Please dial {v}.",
            "The telephone is {v}.",
        ),
        "integer",
    ),
    Field(
        barred("language|speaks", "mother_tongue"),
        "language",
        barred(
            "{s} learned {v}.|{s} writes {v}.|{s} thinks in {v}.|At home it is {v}.|{s} sings in {v}."
            "|{s} understands {v}.|{s} studied {v}.|Language: {v}.|{s} speaks {v}.|The language is {v}."
            "|{s} talks in {v}.|{s} grew up hearing {v}.|{s} grew up in a house that spoke {v}."
            "|As a child {s} grew up speaking {v}.|{s} learned to speak {v}.|{s} knows {v}.|{s} reads {v}."
            "|{s} can speak {v}.|{s} speaks {v} at home.|The language of {s} is {v}.|{s} was taught {v}."
            "|With {s} you speak {v}.|{s} teaches {v}.|{s} uses {v} at work.|{s} prays in {v}."
            "|Please write to {s} in {v}.|{s} grew up speaking {v}.|{s} grew up with two parents who spoke {v}."
            "|In the house where {s} grew up they spoke {v}.|{s} grew up in a family with {v}."
            "|Growing up, {s} spoke {v}.|{s} grew up among people who speak {v}.|{s} grew up on {v}."
            "|{v} is what {s} grew up with.|{s} grew up with parents who speak {v}."
            "|{s}, who grew up with {v}, came by.|Having grown up with {v}, {s} still thinks in it."
            "|With {v} at home, {s} grew up happily.|As a child {s} heard and spoke {v}."
            "|{s}, who grew up with {v}, wrote to us.|Both parents spoke {v}, and so {s} grew up with it."
            "|We know {s}, who grew up with {v}.|Since {s} grew up with {v}, please use it."
            "|It is {v} that {s} grew up with.|People like {s} grew up with {v} at home.",
            "{s} grew up with {v}.",
        ),
    ),
    Field(
        barred("level|rank|status", "grade"),
        "",
        barred(
            "{s} got to {v}.|{s} has the rank {v}.|{s} made it to {v}.|They gave {s} the level {v}."
            "|{s} is ranked {v}.|Status: {v}.|The card of {s} says {v}.|The level is {v}.|{s} is at level {v}."
            "|Level: {v}.|{s} reached {v}.|{s} now has the level {v}.|{s} has come up to {v}."
            "|The level of {s} is {v}.|{s} plays at the level {v}.|{s} is on {v}.|The rank of {s} is {v}."
            "|The rank is {v}.|{s} is {v} in our list.|{s} has {v} status.|{s} holds {v} status."
            "|{s} counts as {v}.|They moved {s} to {v}.|{s} was raised to {v}.",
            "{s} has reached the level {v}.",
        ),
        "string",
        ("basic", "silver", "gold", "beginner", "expert"),
    ),
)
_OBJECT = (
    Field(
        barred("price|cost|amount", "price_eur"),
        "number",
        barred(
            "We ask {v} for it.|It is yours for {v}.|You get it for {v} euros.|{v} euros is what it costs."
            "|The {s} goes for {v}.|We charge {v}.|Cost: {v}.|It costs {v} euros.|The price is {v}."
            "|The {s} costs {v}.|Price: {v}.|It will cost you {v}.|Pay {v} and it is yours."
            "|For {v} euros it is yours.|They want {v} for it.|We sell it at {v}.|It sells at {v} euros."
            "|We sold one for {v}.|{v} euros and no less.|The cost is {v}.|The amount is {v}."
            "|The amount to pay is {v}.|One of them is {v} euros.|You will pay {v} euros.|Our price is {v}."
            "|To buy it you need {v} euros.|The {s} is worth {v}.|It is worth {v} euros.|Now only {v} euros."
            "|We let it go for {v}.|It comes at {v} euros.",
            "You pay {v} for it.|The {s} sells for {v}.",
        ),
        "integer",
    ),
    Field(
        barred("color|colour|paint", "shade"),
        "colour",
        barred(
            "It was painted {v}.|We have it in {v}.|Colour: {v}.|It looks {v}.|A {s} in {v}.|You get it in {v}."
            "|It has a {v} finish.|It is {v}.|The colour is {v}.|The {s} is {v}.|It comes in {v}."
            "|It has the colour of {v}.|The colour of the {s} is {v}.|The {s} was painted {v}."
            "|The {s} comes in {v}.|Its colour is {v}.|The {s} looks {v}.|The {s} shines in {v}.|We made it {v}."
            "|The paint is {v}.|Its paint is {v}.|They painted the {s} {v}.|We only have it in {v}."
            "|The colour we have is {v}.|The {s} is all {v}.|Outside it is {v}.",
            "The {s} has the colour {v}.",
        ),
    ),
    Field(
        barred("quantity|count|pieces|stock", "how_many"),
        "small",
        barred(
            "{v} are there.|We keep {v} here.|Stock: {v}.|{v} wait in the store.|We counted {v}.|Only {v} remain."
            "|We made {v} of them.|There are {v} pieces.|We have {v} of them.|Quantity: {v}.|{v} are in stock."
            "|{v} pieces wait for you.|{v} of them are left.|We still have {v}.|There are {v} left."
            "|{v} more are there.|We own {v} pieces.|{v} pieces lie here.|We have {v} left.|The store has {v}."
            "|The store keeps {v} pieces.|You find {v} of them here.|We got {v} pieces.|The count is {v}."
            "|The quantity is {v}.|There were {v} of them.|{v} are ready.|Just {v} pieces.",
            "{v} pieces are left.",
        ),
        "integer",
    ),
    Field(
        barred("in_stock|available|for_sale", "can_be_bought"),
        "",
        barred(
            "It is available.|We can send it today.|You can have it.|It can be ordered.|The {s} can be had."
            "|It is in stock.|You can buy it now.|We sell the {s} now.|The {s} is for sale."
            "|You can get the {s} today.|The {s} is ready to be sold.|Buy it while you can.|Yes, you can buy it."
            "|Everyone can buy the {s}.|The {s} can be sent.|It can be had.|You may buy it."
            "|It is there for you to buy.|The {s} is in the store.|It is ready to buy.#It is not available."
            "|We cannot send it.|You cannot have it.|It cannot be ordered.|The {s} cannot be had."
            "|It is out of stock.|It is sold out.|We do not sell the {s} now.|The {s} is not for sale."
            "|You cannot get the {s} today.|The {s} is not to be sold.|You cannot buy it now."
            "|No, you cannot buy it.|Nobody can buy the {s}.|The {s} cannot be sent.|It cannot be had."
            "|You may not buy it.|It is not there to buy.|The {s} is not in the store.|All of them are gone.",
            "The {s} can be bought.#The {s} cannot be bought.",
        ),
        "boolean",
    ),
    Field(
        barred("size|fit", "how_large"),
        "",
        barred(
            "It is a {v} one.|The {s} is {v}.|We only have {v}.|It measures {v}.|You get it in {v}."
            "|The size is {v}.|Size: {v}.|It is of {v} size.|Its size is {v}.|The size of the {s} is {v}."
            "|Of all sizes we have {v}.|It comes in {v}.|The {s} fits {v}.|It has the size {v}.|This one is {v}."
            "|We sell it in size {v}.|Take it in {v}.|It is rather {v}.|The {s} we have is {v}."
            "|I would call it {v}.|It is a {v} {s}.|You see a {v} {s}.|The fit is {v}.|It comes out {v}.",
            "The {s} comes in size {v}.",
        ),
        "string",
        ("small", "medium", "large", "tiny", "huge"),
    ),
    Field(
        barred("brand|maker|company", "manufacturer"),
        "proper",
        barred(
            "{v} built it.|It was designed by {v}.|We get it from {v}.|It is a {v}.|{v} stands behind it."
            "|Brand: {v}.|The label says {v}.|It is made by {v}.|The brand is {v}.|{v} makes it.|Maker: {v}."
            "|The firm {v} made it.|It comes from {v}.|The {s} comes from {v}.|The firm is {v}."
            "|The firm behind it is {v}.|{v} made the {s}.|The maker is {v}.|{v} is the maker."
            "|The company is {v}.|It is a product of {v}.|The {s} is by {v}.|{v} produced it.|It was made at {v}."
            "|The company {v} sells it.|The brand on it is {v}.|You know the brand {v}.|The {s} was built by {v}.",
            "It comes from the firm {v}.",
        ),
    ),
    Field(
        barred("code|sku|id|item_code", "article"),
        "code",
        barred(
            "Look for {v}.|It is listed as {v}.|You find it under {v}.|The tag reads {v}.|Item {v}."
            "|We call it {v}.|The code is {v}.|Code: {v}.|Its number is {v}.|We filed it as {v}.|Filed as {v}."
            "|You find it filed at {v}.|It has the number {v}.|It has the code {v}.|The {s} has the code {v}."
            "|Its code is {v}.|Its tag is {v}.|The number of the {s} is {v}.|Ask for {v}.|Our list calls it {v}."
            "|In the book it is {v}.|The item is {v}.|Look under {v}.|It goes by {v}.|Order it as {v}."
            "|{v} is its code.|We know it as {v}.",
            "It is filed under {v}.",
        ),
    ),
    Field(
        barred("tags|features|keywords", "labels"),
        "word",
        barred(
            "Labels: {v}.|It is known for {v}.|Think of {v}.|Its words are {v}.|People say {v}.|Tags: {v}."
            "|The tags are {v}.|It is tagged {v}.|It carries {v}.|Its labels: {v}.|The labels on it are {v}."
            "|We gave it the labels {v}.|Our tags for it are {v}.|It has the tags {v}.|Words for it: {v}."
            "|The features are {v}.|Its features: {v}.|Keywords: {v}.|It goes with {v}.|You could say {v}."
            "|We would tag it {v}.|It was tagged {v}.|Key words are {v}.",
            "It carries the labels {v}.",
        ),
        "array",
    ),
    Field(
        barred("owner|seller|person", "belongs_to"),
        "person",
        barred(
            "{v} has it now.|It was bought by {v}.|Ask {v} about it.|{v} keeps it.|Owner: {v}."
            "|It is in the hands of {v}.|It belongs to {v}.|The owner is {v}.|{v} owns it.|{v} sells it."
            "|The owner is named {v}.|The owner is someone called {v}.|{v} is the owner.|It is owned by {v}."
            "|Someone called {v} has it.|The seller is {v}.|The seller is called {v}.|{v} wants to sell it."
            "|{v} got it.|It was left to {v}.|The {s} is in the house of {v}.|The {s} is owned by {v}."
            "|The {s} belongs to {v}.|{v} brought it.|Contact {v} for it.",
            "Its owner is called {v}.",
        ),
    ),
)
_EVENT = (
    Field(
        barred("day|date|weekday", "on_day"),
        "day",
        barred(
            "We start on {v}.|See you {v}.|Day: {v}.|Mark {v}.|It was moved to {v}.|Keep {v} free.|It is on {v}."
            "|The day is {v}.|It takes place on {v}.|Come on {v}.|It will happen {v}.|What happens {v} is this."
            "|We do it on {v}.|The date is {v}.|The event is on {v}.|We meet on {v}.|Be there {v}.|It starts {v}."
            "|It begins on {v}.|The big day is {v}.|We planned it for {v}.|Come {v}.|It was set for {v}."
            "|{v} is the day.|On {v} we start.|You should be free on {v}.|We hope to see you on {v}.",
            "It happens on {v}.",
        ),
    ),
    Field(
        barred("time|start|start_time|begins", "starting_at"),
        "time",
        barred(
            "We open at {v}.|From {v} on.|Time: {v}.|Come at {v}.|The first guests come at {v}.|It goes from {v}."
            "|It starts at {v}.|The time is {v}.|It begins at {v}.|Be there at {v}.|Doors: {v}."
            "|The door opens {v}.|We open the doors around {v}.|The hall opens at {v}.|It all starts at {v}."
            "|We begin at {v}.|The start is at {v}.|Start: {v}.|It will start at {v}.|Guests may come from {v}."
            "|{v} is the time.|The clock says {v} when we start.|Please be there by {v}.|Do not come after {v}."
            "|From {v} we are open.|We wait until {v}.",
            "The doors open at {v}.",
        ),
    ),
    Field(
        barred("place|city|location|venue", "takes_place_in"),
        "city",
        barred(
            "Travel to {v}.|See you in {v}.|City: {v}.|{v} is the place.|We booked a hall in {v}."
            "|It comes to {v}.|You find us in {v}.|It is in {v}.|The place is {v}.|We meet in {v}."
            "|It takes place in {v}.|We hold it in {v}.|It is held near {v}.|We will be in {v}."
            "|It will be in {v}.|The city is {v}.|The event is in {v}.|All of it is in {v}.|Come to {v}."
            "|You must go to {v}.|The venue is in {v}.|The hall is in {v}.|We chose {v} for it."
            "|It was moved to {v}.|{v} will see it.|The party goes to {v}.|Our place is {v}."
            "|The event shall be held in {v}.|They will hold it in {v} this year.|It has been held in {v} before."
            "|It is to be held in {v}.|As it will be held in {v}, book early.",
            "It will be held in {v}.",
        ),
    ),
    Field(
        barred("guests|people|attendees|invited", "participants"),
        "person",
        barred(
            "We asked {v}.|You will meet {v}.|Guests: {v}.|On the list are {v}.|{v} said yes.|We wait for {v}."
            "|Together with {v}.|The guests are {v}.|Invited are {v}.|{v} will come.|With {v}.|Expect {v} there."
            "|We are expecting {v}.|Expected guests: {v}.|We have invited {v}.|We invited {v}.|{v} will be there."
            "|{v} are coming.|{v} want to come.|You can meet {v}.|Guests will be {v}.|Those who come: {v}."
            "|The people are {v}.|We hope for {v}.|We see {v} there.|Our guests are {v}.|With us will be {v}."
            "|{v} will join.",
            "We expect {v}.",
        ),
        "array",
    ),
    Field(
        barred("seats|places|capacity|tickets", "chairs"),
        "number",
        barred(
            "We have {v} chairs.|Up to {v} people can come.|The room takes {v}.|Capacity: {v}."
            "|We put out {v} chairs.|There are {v} seats.|It has {v} places.|Seats: {v}."
            "|There is room for {v} people.|The hall holds {v}.|The hall is for {v} people.|We have {v} seats."
            "|It has {v} seats in all.|{v} seats are there.|You find {v} seats.|{v} people can sit.|{v} can come."
            "|There is space for {v}.|The room has {v} places.|We sell {v} tickets.|There are {v} tickets."
            "|The capacity is {v}.|It seats {v}.|We can take {v} people.|There are {v} chairs in the hall.",
            "The hall has {v} seats.",
        ),
        "integer",
    ),
    Field(
        barred("free|is_free|no_fee", "costs_nothing"),
        "",
        barred(
            "It is free.|Nobody pays.|There is nothing to pay.|It costs nothing.|No guest has to pay."
            "|Entry is free.|You pay nothing.|Nobody needs to pay.|None of you has to pay."
            "|Nobody will have to pay a thing.|Nobody is asked for money.|No one pays.|You do not pay."
            "|You do not have to pay.|No money is needed.|We ask for no money.|Nobody buys a ticket."
            "|Everybody comes in free.|All can come for free.|Everybody may come without money.|It is for free."
            "|There is no fee.|Nobody has to buy a ticket.|The event is free.#It is not free.|Everybody pays."
            "|It costs money.|All guests have to pay.|Each of us has to pay.|Entry is not free.|You have to pay."
            "|Everybody needs to pay.|Every one of you has to pay.|Everybody will have to pay."
            "|Everybody is asked for money.|Everyone pays.|You do pay.|You all have to pay.|Money is needed."
            "|We ask for money.|Everybody buys a ticket.|Nobody comes in free.|None can come for free."
            "|Nobody may come without money.|It is not for free.|There is a fee.|Everybody has to buy a ticket."
            "|The event is not free.",
            "Nobody has to pay.#Everybody has to pay.",
        ),
        "boolean",
    ),
    Field(
        barred("host|organizer|contact_person", "run_by"),
        "person",
        barred(
            "{v} runs it.|{v} leads the evening.|Ask {v}.|Host: {v}.|It is the idea of {v}.|{v} takes care of it."
            "|{v} is the host.|The host is {v}.|It is organised by {v}.|{v} invites you.|Hosted by {v}."
            "|The hosts are led by {v}.|{v} is hosting.|{v} hosts it.|Our host is {v}.|It is run by {v}."
            "|It is led by {v}.|It is planned by {v}.|The one to ask is {v}.|{v} planned it."
            "|{v} has organised it.|{v} is in charge.|The organizer is {v}.|For questions there is {v}."
            "|You may ask {v}.|{v} opens the evening.|Everything is hosted by {v}.|An evening hosted by {v}."
            "|As always, hosted by {v}.|This time {v} is the one who hosts."
            "|It was hosted by {v} before, and is again.|Since it is hosted by {v}, it will be good."
            "|All of it is being hosted by {v}.|It is to be hosted by {v} this year.",
            "It is hosted by {v}.",
        ),
    ),
    Field(
        barred("kind|type|category", "sort"),
        "",
        barred(
            "We plan a {v}.|Think of a {v}.|This {v} is for all.|Kind: {v}.|It started as a {v}.|It is a {v}."
            "|It will be a {v}.|Type: {v}.|The kind is {v}.|You may call it a {v}.|I would call it a {v}."
            "|It is called a {v}.|We have a {v}.|It is just a {v}.|We do a {v}.|It is planned as a {v}."
            "|A {v} it is.|This is a {v}.|What kind? A {v}.|The type is {v}.|We want a {v}.|Come to our {v}."
            "|It turns into a {v}.|The {v} is for everyone.|It was a {v} last year too.",
            "They call it a {v}.",
        ),
        "string",
        ("concert", "party", "meeting", "dinner", "lecture", "workshop"),
    ),
    Field(
        barred("food|menu|meals", "dishes"),
        "food",
        barred(
            "We cook {v}.|Enjoy {v}.|On the table: {v}.|Try the {v}.|The kitchen makes {v}.|Food: {v}."
            "|There will be {v}.|We serve {v}.|The menu: {v}.|You can have {v}.|To eat there is {v}.|We eat {v}."
            "|Eat {v} with us.|You get {v}.|There is {v} for all.|The food is {v}.|For food there is {v}."
            "|We have {v}.|Have some {v}.|The meal: {v}.|We bring {v}.|You will like the {v}."
            "|The table is full of {v}.|Our cook makes {v}.|They give us {v}.|We can all eat {v}."
            "|You eat {v} there.|Eat {v} as much as you like.|If you like, you can eat {v} there."
            "|All of you can eat {v}.",
            "You can eat {v}.",
        ),
        "array",
    ),
)
DOMAINS = (
    (
        barred("name|person|customer", "full_name|client"),
        "person",
        _PERSON,
        barred(
            "Say hello to {v}.|Please welcome {v}.|I would like to present {v}.|Today we meet {v}."
            "|Have you met {v}?|Our customer is {v}.|We have a guest, {v}.|I know {v}.|Here comes {v}."
            "|This is {v}.|The name is {v}.|Name: {v}.|Meet {v}.|{v} wrote to us.|We talked to {v}."
            "|Let me present {v}.|Let us meet {v}.|Allow me to introduce {v}.|May I introduce {v}?"
            "|A new guest is {v}.|A new member is {v}.|Our new colleague is {v}.|The new customer is {v}."
            "|I introduce {v}.|Let me tell you about {v}.|A friend of mine is {v}.|Say hi to {v}."
            "|Somebody called {v} came.|There is a client named {v}.|The client is {v}.|We have a new one: {v}."
            "|Next is {v}.|Here we have {v}.|A person named {v} called.|Let me name {v}.|I want to introduce {v}."
            "|Let us introduce {v}.|Let me write about {v}.|This one is {v}.|Our new client is {v}."
            "|A client of ours is {v}.|Another client is {v}.|A new customer is {v}.|I met {v}."
            "|You should meet {v}.|{v} is new here.|{v} came to see us.|Look who is here: {v}.|The person is {v}."
            "|The customer is called {v}.|We know {v}.|Think of {v}.",
            "Let me introduce {v}.|A new client is {v}.",
        ),
    ),
    (
        barred("item|product|name|thing", "article_name|object"),
        "thing",
        _OBJECT,
        barred(
            "I have a {v}.|There is a {v}.|Buy a {v}.|This {v} is for you.|Have a look at our {v}."
            "|You need a {v}.|New: a {v}.|They brought a {v}.|We make a {v}.|We sell a {v}.|Here is a {v}."
            "|Item: {v}.|For sale: a {v}.|The product is a {v}.|I bought a {v}.|Look at my {v}.|Look at the {v}."
            "|See this {v}.|We can offer you a {v}.|They offer a {v}.|My offer is a {v}.|Take this {v}."
            "|Think of a {v}.|A {v} came in.|We found a {v}.|Let me show you a {v}.|It is a {v}."
            "|We offer you the {v}.|On offer: a {v}.|We have a {v}.|We want to sell a {v}.|The {v} is on offer."
            "|Look at that {v}.|Look here, a {v}.|This is a {v}.|Our {v} is new.|You may want a {v}."
            "|A {v} is for sale.|The thing is a {v}.|The item is a {v}.|One {v}.|Somebody left a {v}."
            "|They want a {v}.|A fine {v}.|That {v} over there.",
            "We offer a {v}.|Look at this {v}.",
        ),
    ),
    (
        barred("event|title|name", "event_name|occasion"),
        "proper",
        _EVENT,
        barred(
            "We invite you to {v}.|Save the date for {v}.|Welcome to {v}.|{v} is here again.|You will love {v}."
            "|This year we do {v}.|Everyone talks about {v}.|The event is called {v}.|Come to {v}."
            "|We present {v}.|Event: {v}.|{v} is coming.|Do come to {v}.|Do not forget {v}."
            "|You must not miss {v}.|Join {v}.|Be part of {v}.|Take part in {v}.|Let us go to {v}."
            "|We look forward to {v}.|Soon there is {v}.|Let me tell you of {v}.|Visit {v}.|They planned {v}."
            "|It is time for {v}.|Do not be late for {v}.|Nobody should miss {v}."
            "|You would miss a lot without {v}.|Please join {v}.|Join in at {v}.|Join us, it is {v}."
            "|Join our event, {v}.|{v} is back.|{v} is the event.|The event is {v}.|We call it {v}."
            "|The title is {v}.|Its name is {v}.|Go to {v}.|Be there for {v}.|Get ready for {v}.|Think of {v}."
            "|We have planned {v}.|They invite us to {v}.",
            "Do not miss {v}.|Join us for {v}.",
        ),
    ),
)

"""Open-ended chat answers: seeded (user message, answer) pairs with choices that depend on each other.

A template is a pair of patterns. In a pattern `[a|b]` picks one alternative (nesting allowed), and `{slot}` names a row
of a bank: the first use in a scene draws the row, later uses repeat it, so what is stated early comes back.
`{animal.home}` reads another column of the same row, `{animal2}` a second, different row, `{Animal}` capitalises.
Pronouns are columns of the drawn name (`{he}`, `{his}`, `{him}`, `{was}`, `{has}`, `{s}`); "a" becomes "an" by itself.
Only people are ever called he, she or they.
"""

import random
import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

Row = dict[str, str]
Template = Callable[[random.Random], tuple[str, str]]


def _table(columns: str, rows: str) -> list[Row]:
    """Rows are separated by ';' or newlines, cells by ','. The first column is what `{bank}` alone shows."""
    names = columns.split()
    cells = [[cell.strip() for cell in row.split(",")] for row in re.split(r"[;\n]", rows) if row.strip()]
    return [{"": row[0]} | dict(zip(names, row, strict=True)) for row in cells]


def _words(words: str) -> list[Row]:
    return _table("word", words.replace(",", ";"))


_FORMS = {
    "he": dict(he="he", his="his", him="him", was="was", has="has", iz="is", s="s", es="es"),
    "she": dict(he="she", his="her", him="her", was="was", has="has", iz="is", s="s", es="es"),
    "they": dict(he="they", his="their", him="them", was="were", has="have", iz="are", s="", es=""),
}
_NAMES = dict(
    he="Tom Ben Max Leo Paul Omar Hugo Ivan Karl Finn",
    she="Anna Mia Lucy Emma Rosa Nina Vera Clara Ruth Dana",
    they="Alex Robin Kim Jules Quinn",
)
PRONOUNS: dict[str, str] = {name: pronoun for pronoun, names in _NAMES.items() for name in names.split()}
"""Name -> subject pronoun; every name in this module is here once."""

# fmt: off
BANKS: dict[str, list[Row]] = {
    "name": [{"": name, **_FORMS[pronoun]} for name, pronoun in PRONOUNS.items()],
    "animal": _table("one many home food sound moved young", """
        fox, foxes, den, berries, barked, crept, cub; owl, owls, tree, mice, hooted, flew, chick
        cat, cats, basket, fish, meowed, jumped, kitten; dog, dogs, kennel, meat, barked, ran, puppy
        duck, ducks, pond, bread, quacked, swam, chick; bear, bears, cave, honey, growled, climbed, cub
        horse, horses, stable, hay, neighed, galloped, foal; frog, frogs, pond, flies, croaked, hopped, tadpole
        rabbit, rabbits, burrow, carrots, squeaked, hopped, kit; goat, goats, barn, grass, bleated, climbed, kid
        eagle, eagles, nest, fish, cried, flew, chick; mouse, mice, hole, cheese, squeaked, crept, pup"""),
    "color": _words("red, blue, green, yellow, orange, white, black, brown, golden, purple"),
    "size": _words("small, tiny, big, huge, old, young"),
    "place": _table("place at see do road", """
        beach, at the beach, waves, swim in the sea, sandy path
        forest, in the forest, tall trees, pick mushrooms, dark path
        river, by the river, old boats, catch fish, muddy track; park, in the park, wide lawns, fly a kite, quiet lane
        market, at the market, busy stalls, buy fruit, narrow street
        farm, on the farm, green fields, feed the hens, muddy track
        mountain, on the mountain, steep rocks, climb to the top, stony path
        lake, by the lake, calm water, row a boat, sandy path
        island, on the island, white birds, look for shells, stony path
        village, in the village, stone houses, visit the mill, narrow street"""),
    "weather": _table("weather plural gear felt sky do noise", """
        heavy rain, is, umbrella, wet, gray, stay inside, drummed on the roof
        strong wind, is, warm coat, cold, cloudy, close the windows, shook the doors
        thick fog, is, lamp, lost, pale, drive slowly, hid the road
        deep snow, is, pair of boots, frozen, white, clear the path, covered the street
        bright sunshine, is, sun hat, hot, blue, drink water, lit up the hills
        loud thunder, is, radio, scared, dark, stay away from trees, woke the whole town
        light showers, are, rain jacket, damp, gray, take a jacket, came and went
        dark clouds, are, umbrella, gloomy, gray, bring in the washing, filled the sky"""),
    "job": _table("job makes shop tool did", """
        baker, cakes, bakery, oven, baked; farmer, beans, farm, tractor, grew; tailor, coats, workshop, needle, sewed
        painter, pictures, studio, brush, painted; cook, soups, kitchen, pan, cooked
        potter, bowls, workshop, wheel, shaped
        writer, books, library, pen, wrote; carpenter, tables, workshop, saw, built
        gardener, roses, garden, spade, planted
        florist, bouquets, flower shop, ribbon, tied; singer, songs, theater, microphone, sang"""),
    "hobby": _table("ing do past need place", """
        painting, paint, painted a picture, brush, studio; fishing, fish, caught a fish, rod, lake
        baking, bake, baked a cake, oven, kitchen; running, run, ran a race, pair of shoes, park
        singing, sing, sang a song, song book, hall; reading, read, read a novel, good book, library
        swimming, swim, swam a mile, towel, pool; gardening, garden, planted a tree, spade, garden
        dancing, dance, danced a waltz, pair of shoes, hall; cycling, cycle, rode a bike, helmet, park"""),
    "object": _words("""
        lamp, kite, bag, ring, key, map, clock, letter, umbrella, apple, hat, drum, book, bell, egg,
        coin"""),
    "wear": _table("wear is this a need", """
        boots, are, these, a pair of, wet ground; scarf, is, this, a, cold mornings
        gloves, are, these, a pair of, cold hands; jacket, is, this, a, windy days
        sandals, are, these, a pair of, hot sand; hat, is, this, a, strong sun
        socks, are, these, a pair of, long walks; towel, is, this, a, swimming
        raincoat, is, this, a, rainy days; sunglasses, are, these, a pair of, bright days
        sweater, is, this, a, cool nights; shoes, are, these, a pair of, rough paths"""),
    "gear": _table("gear is need", """
        a tent, is, sleeping outside; a map, is, finding the way; matches, are, making a fire
        snacks, are, the long road
        a camera, is, taking pictures; batteries, are, the lamp; a water bottle, is, the hike
        cards, are, quiet evenings"""),
    "feeling": _table("feeling did why do", """
        happy, smiled, something good happened, share it with a friend; sad, cried, something was lost, talk to a friend
        proud, stood tall, hard work paid off, tell your family; angry, frowned, something was unfair, count to ten
        tired, yawned, the day was long, go to bed early; nervous, trembled, something new is coming, breathe slowly
        lonely, sighed, nobody is near, call an old friend; bored, sighed, nothing is new, start a new hobby"""),
    "joy": _table("joy did", """
        happy, smiled; proud, stood tall; glad, laughed; calm, hummed a song; excited, jumped up and down
        thankful, said thank you"""),
    "gloom": _words("sad, angry, upset, lonely, disappointed, worried"),
    "mate": _words("friend, cousin, neighbor, teacher, old friend, classmate"),
    "kin": _words("friend, cousin, neighbor, teacher, brother, sister, aunt, uncle"),
    "city": _words("Norvale, Redport, Oakton, Millbay, Eastham, Lorwick, Sandby, Greyford"),
    "sight": _table("sight do", """
        old castle, climb the tower; art museum, look at the paintings; harbor, watch the ships
        botanical garden, smell the flowers
        stone bridge, take a picture; city library, read a book; main square, listen to the music; zoo, see the animals
        night market, buy a gift; cathedral, hear the bells"""),
    "dish": _words("""
        tomato soup, fried fish, rice and beans, apple pie, noodles, grilled cheese, mushroom stew,
        egg salad, pancakes, fresh bread"""),
    "drink": _table("drink temp", """
        tea, hot; coffee, hot; cocoa, hot; lemonade, cold; apple juice, cold; iced water, cold"""),
    "day": _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "season": _table("season air tree do", """
        spring, mild, buds open on every branch, plant seeds; summer, warm, leaves are thick and green, swim in the lake
        autumn, cool, leaves turn red and fall, gather apples; winter, cold, branches are bare, build a snowman"""),
    "event": _table("event bring do", """
        birthday party, present, eat cake; picnic, blanket, play games; wedding, bouquet, dance all night
        garden party, chair, light lanterns; dinner, bottle of juice, share a meal
        concert, ticket, listen to music"""),
    "trait": _table("trait as", """
        brave, faced every danger; kind, helped every neighbor; clever, solved every puzzle
        patient, waited without a word
        honest, never told a lie; careful, checked everything twice; cheerful, laughed all day
        curious, asked many questions"""),
    "material": _words("wood, stone, glass, silver, paper, iron, clay"),
    "transport": _table("by verb stop", """
        train, take, station; bus, catch, stop; boat, board, harbor; bike, ride, gate; plane, catch, airport"""),
    "part": _table("part adj use", """
        tail, long, keep its balance; ears, large, hear in the dark; eyes, round, see at night
        wings, wide, glide over the trees
        claws, sharp, dig deep holes; fur, thick, stay warm; legs, strong, jump over streams"""),
    "fault": _table("did fix", """
        broke your cup, buy you a new one; lost your book, find another copy; missed your call, call you tonight
        forgot your birthday, bring you a late present; came late to dinner, be on time next week
        spilled tea on your coat, pay for the cleaning"""),
    "verdict": _table("loved great end rating again", """
        loved, wonderful, made me smile, five, I would go back tomorrow
        liked, good, was worth the time, four, I would gladly go again
        did not mind, average, was only fine, three, I may go again one day
        disliked, dull, felt too long, two, I will not go again
        hated, terrible, made me angry, one, I will never go again"""),
    "genre": _table("genre about mood", """
        mystery, a missing ring, tense; romance, a secret letter, sweet; comedy, a foolish king, funny
        adventure, a lost island, thrilling; horror, an empty house, scary; fairy tale, a magic bell, gentle"""),
    "option": _table("option is pro con best", """
        cats, are, are quiet and clean, ignore you at times, small homes
        dogs, are, are loyal and playful, need long walks, active people
        bikes, are, are cheap and healthy, get you wet in the rain, short trips
        cars, are, are fast and dry, cost a lot of money, long trips
        trains, are, are calm and safe, run late at times, busy people
        books, are, are deep and rich, take many hours, slow evenings
        films, are, are short and lively, leave little to imagine, tired people
        gardens, are, are green and peaceful, need daily care, patient people
        city life, is, is lively and full of choice, is noisy at night, young workers
        village life, is, is quiet and friendly, is far from shops, calm families"""),
    "hour": _words("six, seven, eight, nine, ten"),
    "count": _table("count n", "two, 2; three, 3; four, 4; five, 5"),
    "why": _table("why start then end", """
        leaves fall, the days get short and cold, the tree stops feeding its leaves, the stems grow weak and break
        it rains, the sun warms the sea and water rises, the water cools and forms clouds, the drops grow heavy and fall
        bread rises, yeast eats the sugar in the dough, it makes small bubbles of gas, the bubbles lift the dough
        we have night and day, the earth spins around once, one side faces the sun, the other side lies in the dark
        ice floats, water grows as it freezes, the ice becomes lighter than water, the water pushes the ice up
        we sleep, the body works hard all day, the brain gets tired and slow, sleep repairs the body and clears the mind
        birds fly south, the cold kills the insects, food becomes hard to find, the birds travel to warm places
        onions make us cry, the knife cuts the onion open, a sharp gas rises to the eyes, tears wash the gas away
        iron rusts, water sits on the iron, air and water attack the metal, a red crust grows on the surface
        we see rainbows, sunlight enters a drop of rain, the drop bends the light, the colors spread across the sky"""),
    "quiz": _table("answer hint1 hint2 hint3", """
        clock, I have hands but no arms, I have a face but no eyes, I run all day but never move
        river, I have a mouth but never speak, I have a bed but never sleep, I run but have no legs
        book, I have many leaves but no branches, I have a spine but no bones, I tell stories but have no voice
        needle, I have an eye but cannot see, I am thin but never hungry, I pull a long tail of thread
        candle, I am tall when I am young, I am short when I am old, I fear the wind
        map, I have rivers but no water, I have cities but no houses, I have forests but no trees
        egg, I must be broken to be used, I have a shell but live on land, I hide gold inside a white wall
        shadow, I follow you in the sun, I leave you in the dark, I copy all your moves
        umbrella, I go up when the rain comes down, I am a roof without a house, I close when the sun is out"""),
}
_TIPS = {
    "sleeping better": """
        go to bed early, your body learns the time; turn off the screen, your eyes can rest
        drink less coffee, your heart stays calm; open the window, the air stays fresh
        read a quiet book, your mind slows down; keep the room dark, nothing wakes you up""",
    "saving money": """
        write down what you spend, nothing is forgotten; cook at home, you need no restaurant
        walk to work, you pay for no bus; buy used clothes, the price stays low
        make a shopping list, you buy only what you need; wait one day, you avoid a bad choice""",
    "learning a language": """
        learn ten words a day, your list grows fast; speak with a partner, you lose your fear
        listen to songs, your ear gets used to it; label things at home, the words stay with you
        read short stories, you see real sentences; repeat old lessons, you forget less""",
    "growing plants": """
        water the soil in the morning, the roots drink all day; choose a sunny spot, the leaves get light
        use good soil, the roots find food; pull out the weeds, nothing steals the water
        start with herbs, you see results soon; cut dead leaves, the plant stays healthy""",
    "making friends": """
        smile at people, others feel welcome; join a club, you meet people every week
        ask kind questions, others feel heard; keep your promises, others can trust you
        invite someone for tea, you have time to talk; listen more than you speak, you learn what matters""",
    "getting fit": """
        walk every day, your legs get strong; stretch in the morning, your back stays loose
        drink more water, your body works well; eat fresh vegetables, you gain energy
        rest on Sunday, your muscles can heal; train with a friend, you never give up""",
    "studying": """
        make a clear plan, you know what comes next; take short breaks, your mind stays fresh
        turn off your phone, nothing disturbs you; explain it to a friend, you find the gaps
        write short notes, you remember more; study in the morning, your head is clear""",
}
for _topic, _rows in _TIPS.items():
    BANKS[f"tip of {_topic}"] = _table("tip so", _rows)
BANKS["topic"] = _words(", ".join(_TIPS))
_DISHES = {
    "soup": """
        carrot, carrots, peel; onion, onions, chop; potato, potatoes, peel; tomato, tomatoes, wash
        leek, leeks, slice; mushroom, mushrooms, slice""",
    "salad": """
        tomato, tomatoes, slice; cucumber, cucumbers, peel; egg, eggs, boil; pepper, peppers, chop
        olive, olives, drain; radish, radishes, wash""",
    "pie": """
        apple, apples, slice; pear, pears, peel; plum, plums, halve; peach, peaches, peel
        egg, eggs, beat; lemon, lemons, squeeze""",
    "smoothie": """
        banana, bananas, peel; apple, apples, chop; mango, mangos, peel; orange, oranges, squeeze
        pear, pears, chop; kiwi, kiwis, peel""",
}
for _dish, _rows in _DISHES.items():
    BANKS[f"part of {_dish}"] = _table("one many prep", _rows)
BANKS["course"] = _table("course pot cook minutes serve", """
    soup, large pot, simmer, 30, serve it hot with bread; salad, big bowl, toss, 2, serve it cold with oil
    pie, baking dish, bake, 40, serve it warm with cream; smoothie, blender, blend, 1, pour it into tall glasses""")
# fmt: on


class _Slot(NamedTuple):
    key: str  # what the scene remembers, e.g. "animal2"
    bank: str  # where to draw it, e.g. "animal"
    column: str
    capital: bool


_PERSON_SLOT = re.compile(r"(he|his|him|was|has|iz|s|es)(\d*)")


def _slot(text: str) -> _Slot:
    key, _, column = text.partition(".")
    capital, key = key[0].isupper(), key[0].lower() + key[1:]
    if match := _PERSON_SLOT.fullmatch(key):
        key, column = "name" + match[2], match[1]
    return _Slot(key, key.rstrip("0123456789"), column, capital)


@cache
def _compile(pattern: str) -> list:
    """Nested lists: a str is literal, a _Slot is drawn or repeated, a tuple of lists is a choice."""
    stack: list[list] = [[[]]]  # a stack of alternatives being built
    tokens = iter(re.split(r"([\[\]|{}])", pattern))
    for token in tokens:
        if token == "[":
            stack.append([[]])
        elif token == "|":
            stack[-1].append([])
        elif token == "]":
            choice = tuple(stack.pop())
            stack[-1][-1].append(choice)
        elif token == "{":
            stack[-1][-1].append(_slot(next(tokens)))
            assert next(tokens) == "}", pattern
        elif token:
            stack[-1][-1].append(token)
    assert len(stack) == 1 and len(stack[0]) == 1, f"unbalanced brackets in {pattern!r}"
    return stack[0][0]


_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]|honest)")


class Scene:
    """One drawn situation: remembers every slot, so that all patterns filled from it agree."""

    def __init__(self, rng: random.Random, **fixed: Row) -> None:
        self.random, self.rows = rng.random, fixed

    def row(self, key: str, bank: str | None = None) -> Row:
        """The row bound to `key`, drawn now if there is none; different from every row drawn so far."""
        if key not in self.rows:
            rows = BANKS[bank or key]
            row = rows[int(self.random() * len(rows))]
            while any(row is other for other in self.rows.values()):
                row = rows[int(self.random() * len(rows))]
            self.rows[key] = row
        return self.rows[key]

    def some(self, bank: str, count: int) -> list[Row]:
        """`count` different rows, in the order drawn."""
        rows = list(BANKS[bank])
        return [rows.pop(int(self.random() * len(rows))) for _ in range(count)]

    def turn(self, pattern: str, **rows: Row) -> str:
        """Fill with these rows in place of the ones bound so far."""
        self.rows.update(rows)
        return self(pattern)

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def __call__(self, pattern: str) -> str:
        out: list[str] = []
        self._fill(_compile(pattern), out)
        return _ARTICLE.sub(r"\1n ", "".join(out))

    def _fill(self, parts: list, out: list[str]) -> None:
        for part in parts:
            if part.__class__ is str:
                out.append(part)
            elif part.__class__ is tuple:
                self._fill(part[int(self.random() * len(part))], out)
            else:
                row = self.rows.get(part.key) or self.row(part.key, part.bank)
                word = row[part.column]
                out.append(word[0].upper() + word[1:] if part.capital and word else word)


# Shared pieces, inserted into patterns with <piece>.
_PIECES = dict(
    tell="[Tell me|Write|Please write|Let me hear|I would like] a [short |little |]story",
    write="[Write|Please write|Help me write|I want|I need]",
    once="[One day|One morning|One evening|Last week|Last {day}|In {season}|One night]",
    happy_end="[At the end of the day|In the end|That night|Then] {he} {was} [very |so |]{joy}[ and {joy.did}|]",
    storm="[Suddenly|Then|Soon] {weather} {weather.noise}",
    sign="[Yours|Best wishes|With love|Take care|Your friend],\n{name}",
    dear="[Dear|Hello|Hi] {name2},",
    me="[I am {name9}, a {job9} from {city9}.|My name is {name9} and I live in {city9}.|Hello, this is {name9}.]",
    hi="[Hi {name9}!|Hello {name9}!|Good day, {name9}!]",
)

_PATTERNS = r"""
story_lost_pet: <tell> about {name} and a [lost {animal}|{color} {animal}|{size} {animal}].
  > {name} had a {size} {color} {animal}. <once>, the {animal} {animal.moved} away. {name} looked for it {place.at}, but
    saw only {place.see}. [{He} called and called.|{He} {was} very {gloom}.|{He} asked a {kin} for help.] Then something
    {animal.sound} in [a|an old] {animal.home}. It was the {color} {animal}! {name} gave it some {animal.food}.
    <happy_end>.
story_found_object: <tell> about {name} [who finds|finding] a {color} {object}[ {place.at}|].
  > <once>, {name} went [to walk|for a walk] {place.at}. Between the {place.see} {he} saw a {color} {object} made of
    {material}. [{name} took it to {his} {kin}.|{He} picked it up and showed it to {his} {kin}.] The {kin} said, "[That
    {object} is mine.|I lost that {object} in {season}.|Only a {trait} person can find this {object}.]" {name}
    {trait.as} and [gave it back|kept the {color} {object}]. <happy_end>.
story_storm: <tell> about {name} in [the |]{weather}.
  > <once>, {name} the {job} walked from the {job.shop} to the {place}. The sky was {weather.sky}. <storm>. {name} had
    no {weather.gear}, so {he} felt {weather.felt}. A {trait} {kin} gave {him} a {weather.gear} [and a cup of
    {drink.temp} {drink}|and some {dish}]. After an hour {he} did not feel {weather.felt} any more. [Now {name} always
    takes a {weather.gear}.|The next day {he} bought a {color} {weather.gear}.]
story_new_job: <tell> about {name} who [becomes|wants to be] a {job}.
  > {name} wanted to be a {job}. <once>, {he} went to the {job.shop} and asked for work. The old {job} {trait.as} and
    gave {him} a {job.tool}. At first {name} {was} {feeling}, because the {job.tool} was [heavy|old|strange]. But {he}
    {job.did} {job.makes} every day. After [two|three|five] [weeks|months|years], [everyone {place.at}|the whole town of
    {city}] [loved|wanted] {his} {job.makes}. {name} {was} a {trait} {job}[ at last|].
story_animal_friend: <tell> about {name} and a {animal}[ {place.at}|].
  > {name} lived {place.at} with a {trait} {kin}. <once>, a {size} {animal} {animal.moved} out of its {animal.home}.
    {He} gave the {animal} some {animal.food}, and the {animal} {animal.sound}. Every {day} {name} came back with more
    {animal.food}. <storm>, and {he} {was} {weather.felt}. The {size} {animal} showed {him} the way home[ along the
    {place.road}|]. Since then {name} and the {animal} are friends.
story_birthday: [<tell> about the birthday of {name}.|It is the birthday of {name}. <tell>.]
  > [It was {day}, the birthday of {name}.|On {day} {name} had a birthday.] {He} woke up [early|late] and {was}
    {feeling}. {His} {kin} [made|brought] {dish} and a cup of {drink.temp} {drink}. Then {he} opened a {color} box.
    Inside was a {object} made of {material}. "This {object} is from {name2}," said the {kin}. {name} put the {object}
    [on the table|by the window] and [{feeling.did}|said thank you].
story_lesson: [<tell> with a lesson about {name}.|<tell> that shows why we should be {trait}. The hero is {name}.]
  > {name} was a {job} in {city}. All people said {he} {was} {trait}, because {he} {trait.as}. <once>, a {kin} asked,
    "[Why are you so {trait}?|Does it help to be {trait}?]" {name} answered, "[If|When] you are {trait}, [life is
    easier|the world is brighter|friends will come]." That day a {size} {animal} was lost {place.at}. {name} {trait.as}
    and brought it home to its {animal.home}. The lesson is simple: be {trait}.
story_contest: <tell> about {name} [in a {hobby} contest|who loves {hobby}].
  > {name} loved {hobby}. Every {day} {he} went to the {hobby.place} with a {color} {hobby.need}. <once>, there was a
    {hobby} contest in {city}. {name} {was} {feeling}. {He} {hobby.past}, and {name2} {hobby.past} too. [The judges
    chose {name}.|The judges chose {name2}.] The prize was a {object} made of {material}. Both went home from the
    {hobby.place} with a new friend.
bedtime_story: <me> [Tell me a bedtime story|I cannot sleep. Tell me a story|Write a good night story] about a {size}
    {animal}.
  > <hi> [Once|Long ago] there was a {size} {color} {animal}. It lived in a {animal.home} {place.at}. The {animal} ate
    {animal.food} in the morning and slept at noon. <once>, it met a {size2} {color2} {animal2}. The {animal2}
    {animal2.sound}, and the {animal} {animal.sound} back. It gave the {animal2} some {animal.food}. [At night|When the
    moon rose] the {color} {animal} and the {color2} {animal2} slept side by side. Good night!
story_first_day: <tell> about the first day of {name} [as a {job}|at the {job.shop}].
  > On {day} {name} started as a {job}. {He} {was} [very |a little |]{feeling}. The {job.shop} smelled of
    [{drink}|{material}] and was full of {job.makes}. {name} took the {job.tool}, but the {job.tool} fell on the floor.
    "Do not worry," said {name2}, "my first day was like that too." By the evening {he} {job.did} [good|fine|beautiful]
    {job.makes}. {name2} was proud of {name}.
story_two_friends: <tell> about [two friends, {name} and {name2}|{name} and {name2}].
  > {name} and {name2} were friends, but {name} was {trait} and {name2} was {trait2}. <once>, {name} wanted to
    {place.do}. {name2} wanted to {place2.do}. {name} said {he} would bring {his} {color} {object}. {name2} said {he2}
    would bring {his2} {color2} {object2}. [First the friends went to the {place}, then to the {place2}.|So the friends
    met at the {sight}.] <storm>. {name} {trait.as}, for {he} {was} {trait}. {name2} {trait2.as}, for {he2} {was2}
    {trait2}. [The {color} {object} and the {color2} {object2} got wet.|In the evening {name2} had the {object}, and
    {name} had the {object2}.]
dialogue_feelings: <write> a dialogue: {name} is {feeling} and talks to {name2}.
  > {name2}: [What is wrong|How are you], {name}? You look {feeling}. / {name}: Yes, I am {feeling}, because
    {feeling.why}. / {name2}: Then you should {feeling.do}. / {name}: [I tried that on {day}.|Does that help?] /
    {name2}: [Let us|Then let us] {place.do}. If there {weather.plural} {weather}, I bring a {weather.gear}. / {name}:
    [Thank you|Good idea], {name2}. I will {feeling.do}, and then we meet {place.at}. / {name2}: See you {place.at},
    {name}!
continue_story: Continue [this|the] story: {name} opened the door and saw a {color} {animal}.
  > The {color} {animal} {animal.sound}. {name} {was} {feeling}, so {he} {feeling.did}. ["Who are you?" {he} asked.|"Do
    you want {animal.food}?" {he} asked.] The {animal} {animal.moved} [out of the house|through the door] and {name}
    followed it [along the {place.road}|to the {place}]. There, between {place.see}, stood a {animal.home} of
    {material}. Inside sat a {animal.young}, as {color} as the {animal}. {name} gave some {animal.food} to the
    {animal.young}. <happy_end>.
advice_feeling: <me> [I feel {feeling}. What can I do?|I am [so |]{feeling} today. Any advice?|What should I do when I
    am {feeling}?]
  > <hi> [It is normal to feel {feeling}.|Many people feel {feeling} at times.] Often you feel {feeling} because
    {feeling.why}. [Here is my advice|You can try this]: first, {feeling.do}. Then make a cup of {drink.temp} {drink}
    and think about {hobby}. If you still feel {feeling}, [go for a walk {place.at}|{hobby.do} for an hour|visit your
    {kin}]. [Tomorrow is a new day.|I hope this helps.]
advice_weather: <me> [There {weather.plural} {weather} outside. What should I do?|The radio says {weather} for {day}.
    Any advice?|How do I prepare for {weather}?]
  > <hi> [If there {weather.plural} {weather}|In {weather}], {weather.do}[ and do not go to the {place}|]. If you must
    go out, take a {weather.gear}, or you will be {weather.felt}. The sky will be {weather.sky} [all day|until the
    evening]. At home you can enjoy {hobby} or make {dish}. [And drink something {drink.temp}, like {drink}.|A cup of
    {drink.temp} {drink} is good too.]
advice_gift: [What gift can I give my {mate}?|I need a present for my {mate}.] [{name} loves {hobby}.|The name is
    {name}, and {he} love{s} {hobby}.]
  > [If {name} loves {hobby}|Since {name} enjoys {hobby}], give {him} a {hobby.need}. [Choose|Take] a {color} one,
    because {color} [is a cheerful color|looks nice in the {hobby.place}]. Another idea is a {object} made of
    {material}. {He} can use the {hobby.need} in the {hobby.place}. Wrap it in {color2} paper and write a card for
    {him}. Your {mate} will be happy.
letter_friend: <write> a letter from {name} to {name2}[ about {hobby}| about the {place}|].
  > <dear> / [How are you?|I hope you are well.|Thank you for your letter.] I am {place.at} now and I see {place.see}
    every day. There {weather.plural} {weather} today, so I feel {weather.felt}. [Yesterday|On {day}] I {hobby.past}. Do
    you still like {hobby}, {name2}? [Come and visit me in {season}.|Please visit me soon.] We can {place.do}. / <sign>
thank_you_note: <write> a thank you note from {name} to {name2} for the {object}.
  > <dear> / [Thank you|Many thanks] for the {color} {object}. [It is beautiful.|I love it.|I was so happy to see it.]
    The {object} now stands [on my desk|by my window|in my kitchen], next to a {color2} {object2}. [My {kin} likes the
    {color} color too.|Even my {animal} likes it.] You are a {trait} friend, {name2}. [Let us drink {drink} on {day}.|I
    will make {dish} for you on {day}.] / <sign>
email_work: <write> an email to {name2} about a meeting on {day}. [I am {name}.|My name is {name}.]
  > Subject: Meeting on {day} / <dear> / [Can we meet on {day} at the {job.shop}?|I would like to meet on {day} at the
    {job.shop}.] [We need to talk about|Our topic is] the {job.makes} for {city}. Please bring the {color} {object} and
    the new {job.tool}. [If {day} is bad for you, we can meet on {day2}.|If you cannot come on {day}, please call me.]
    [{Drink} and {dish} will be there.|I will bring {dish}.] / <sign>
apology: <write> an apology to {name2} because I {fault}. [I am {name}.|My name is {name}.]
  > <dear> / [I am so sorry|I want to say sorry] that I {fault}. I was [tired|busy|ill] on {day}[, but that is no
    excuse|, and I did not think]. [You must have felt {gloom}.|I understand if you are {gloom}.] I will {fault.fix}.
    [Can we meet {place.at}|May I invite you to eat {dish}]? I promise to be more {trait}. / <sign>
invitation: <write> an invitation to a {event} on {day}[ {place.at}|]. [I am {name}.|From {name}.]
  > [Dear friends|Hello all|Dear guests], / [you are invited|please come] to my {event} on {day}. [It will be|We meet]
    {place.at} at {hour}. We will {event.do} and {place.do}. There will be {dish} and {drink.temp} {drink}. Please bring
    a {event.bring}[ and a {weather.gear}, in case of {weather}|]. [Tell me by {day2} if you can come to the {event}.|I
    hope to see you {place.at}!] / <sign>
postcard: <write> a postcard from {name} in {city} to {name2}.
  > <dear> / [greetings|hello] from {city}! [The weather is strange|What weather]: {weather} and a {weather.sky} sky. I
    am a bit {weather.felt}, but I have a {weather.gear}. Today I went to the {sight} to {sight.do}. Tomorrow I will see
    the {sight2} and {sight2.do}. The {dish} in {city} [is great|tastes good|is famous]. [I bought you a {object}.|I
    miss you.] / <sign>
email_complaint: <write> a complaint to a shop. The {wear} I bought {wear.is} broken. [I am {name}.|Sign as {name}.]
  > Dear shop owner, / on {day} I bought {wear.a} {color} {wear} in your shop in {city}. The {wear} {wear.is} [already
    |]broken. [{Wear.this} {wear} {wear.is} no good for {wear.need}.|I need {wear.this} {wear} for {wear.need}.] [I feel
    {gloom} about this.|I was {gloom} when I saw it.] Please send me {wear.a} new {color} {wear} by {day2}, or give me
    my money back. [If not, I will buy my next {wear} in another shop.|Thank you for your help.] / Yours, / {name}
place_description: [Describe|Write about|Tell me about] a [{size} |]{place}[ in {season}| in {weather}|].
  > The {place} is [quiet|lively|lovely] in {season}. The air is {season.air}, and {season.tree}. A {place.road} leads
    to {place.see}. [A {color} {animal} sits near its {animal.home}.|There are many {animal.many} here.] When there
    {weather.plural} {weather}, the sky is {weather.sky} and people are {weather.felt}. You can {place.do} or just
    listen. [In {season} I love this {place}.|It is the best {place} in {season}.]
room_description: [Describe|Write about] the [room|house] of {name}[ the {job}|].
  > {name} is a {job}, and {his} room shows it. On the [wall|door] hangs a {color} {job.tool}. The table is made of
    {material}, and the chair is made of {material} too. By the window stands a {color2} {object}. {He} got the {object}
    from {name2}. [In the corner a {animal} sleeps in a {animal.home}.|It smells of {drink}.] {name} loves {color}
    things, but the {object} is {color2}.
character_profile: [Invent|Create|Describe] a character [named|called] {name}[ who is {trait}|].
  > Name: {name} / Job: {job} / Home: {city} / Pet: a {color} {animal} / {name} is {trait}. Once {he} {trait.as}. {He}
    work{s} at a {job.shop} with a {job.tool}. In {his} free time {he} like{s} {hobby}. The {color} {animal} waits at
    home in its {animal.home}. {name} feeds it {animal.food}. {His} dream is to {place.do} in {season}.
invented_animal: [Invent|Imagine|Make up] a [new |]animal that is [part {animal} and part {animal2}|{color} and {size}].
  > [Meet|This is] the {color} {animal}-{animal2}. It is {size} and lives in a {animal.home}. It eats {animal.food} like
    a {animal} and {animal2.food} like a {animal2}. It has {part.adj} {color} {part} to {part.use}, and {part2.adj}
    {part2} to {part2.use}. Its {animal.young} is {color2}, but turns {color} in {season}. The {animal}-{animal2} is
    {trait}: [last {day}|in old tales] it {trait.as}.
pros_and_cons: <me> [What are the pros and cons of {option}?|Tell me the good and bad sides of {option}.]
  > <hi> [Here are the pros and cons of {option}.|There are good and bad sides to {option}.] / Pros: {option}
    {option.pro}. [People are {joy} with {option}.|Many people in {city} love {option}.] / Cons: {option} {option.con}.
    [If you dislike that, try {option2}.|{Option2} might suit you better, because {option2} {option2.pro}.] / In short,
    {option} {option.is} best for {option.best}.
compare_two: <me> [Compare {option} and {option2}.|Which is better, {option} or {option2}?|{Option} or {option2}?]
  > <hi> [Both have good sides.|It depends on you.] {Option} {option.pro}, [while|but] {option2} {option2.pro}. On the
    other hand, {option} {option.con}, and {option2} {option2.con}. {Option} {option.is} best for {option.best}.
    {Option2} {option2.is} best for {option2.best}. [I would choose {option}, because {option} {option.pro}.|I would
    choose {option2}, since nothing else is as good for {option2.best}.]
dialogue_plans: <write> a dialogue between {name} and {name2} about [{day}|plans for {day}].
  > {name}: [Hi|Hello|Good morning], {name2}! What will you do on {day}? / {name2}: [Hi|Hello], {name}. I want to
    {place.do}. [Will you come?|Come with me!] / {name}: [I would love to.|Good idea.] But the radio says {weather}. /
    {name2}: [Then|In that case] we take a {weather.gear}. Or we {hobby.do}. / {name}: I will bring {dish}. / {name2}:
    And I will bring {drink.temp} {drink}. See you on {day}, {name}!
dialogue_shop: <write> a dialogue in a shop. {name} buys [a {object}|{wear.a} {wear}] from {name2}.
  > {name2}: [Good morning|Hello]. [Can I help you?|What do you need?] / {name}: I need {wear.a} {wear} for {wear.need}.
    / {name2}: [{Wear.this} {color} {wear} {wear.is} good.|{Wear.this} {color} {wear} {wear.is} made for {wear.need}.] /
    {name}: {Color} is not my color. Do you have {wear.a} {color2} {wear}? / {name2}: Yes, here. {Wear.this} {color2}
    {wear} {wear.is} [cheap|new|warm]. / {name}: [Great|Good]. And a {color} {object}, please. / {name2}: {Wear.a}
    {color2} {wear} and a {color} {object}. Thank you!
dialogue_lost: <write> a [short |]dialogue where {name} asks {name2} the way to the {sight}.
  > {name}: [Excuse me|Hello], where is the {sight}? / {name2}: [Go to|First find] the {sight2} and turn [left|right].
    Then {transport.verb} the {transport}. / {name}: [So first the {sight2}, then the {transport}? / {name2}: Yes, that
    is right.|And where is the {transport.stop}? / {name2}: That is easy.] The {transport.stop} is next to a {color}
    house. / {name}: Thank you! I want to {sight.do}. / {name2}: The {sight} is [lovely|quiet|busy] on {day}. [Have
    fun!|Goodbye!]
poem_heads: <me> <write> a poem about [the {place}|{season}].
  > <hi> / In {season} I see the {color} {animal} {place.at}, / In {season} I see {place.see} in {weather}, / In
    {season} I [hear|follow] the {animal2} that {animal2.sound}, / [In {season} I remember my {kin}|In {season} I am
    {feeling}], / And when {season} is over, the {color} {animal} goes back to its {animal.home}.
poem_color: <me> <write> a poem about the color {color}.
  > <hi> / {Color} is the {object} on my table, / {Color} is the {animal} in its {animal.home}, / {Color} {wear.is} the
    {wear} of my {kin}, / {Color} is [{season}|the sky] {place.at}, / [I am {feeling}, and {feeling} is {color}
    too.|When I am {feeling}, I dream of {color}.|Not {color2}, never {color2}, only {color}.]
poem_animal: <me> <write> a [short |]poem about a {animal}[ and a {animal2}|].
  > <hi> / O {animal}, {size} {animal}, your {animal.home} is {season.air}, / O {animal}, {color} {animal}, you look for
    {animal.food}, / O {animal2}, {size2} {animal2}, your {animal2.home} is near, / O {animal2}, {color2} {animal2}, you
    look for {animal2.food}. / [In {season}|On {day}] the {animal} and the {animal2} meet {place.at}, / and the {color}
    one and the {color2} one [sleep|play|sing] until night.
explain_why: <me> [Explain why {why}.|Can you explain why {why}?|I want to know why {why}.]
  > <hi> [Good question!|Here is a simple answer.|That is easy to explain.] First, {why.start}. [Then|Next|After that],
    {why.then}. Finally, {why.end}. [That is why {why}.|So this is the reason why {why}.] [You can see it best in
    {season}, when the air is {season.air}.|You can read more about it in the library of {city}.|A {trait} {job} told me
    this {place.at}.]
explain_job: <me> [What does a {job} do?|Explain the work of a {job}.|I want to be a {job}. What is it like?]
  > <hi> A {job} works at a {job.shop}[ from {day} to {day2}|]. The most important tool is the {job.tool}. First, the
    {job} cleans the {job.tool}. Then the {job} makes {job.makes} [all day|until noon]. Finally, the {job.makes} go to
    the people of {city}. A good {job} must be {trait}. [If you are not {trait}, it is hard to make {job.makes}.|It can
    make you {joy}, but the {job.shop} is never dull.]
start_hobby: <me> [How do I start {hobby}?|I want to try {hobby}. What do I need?|Is {hobby} a good hobby?]
  > <hi> [{Hobby} is a great hobby for {trait} people.|Good choice! {Hobby} makes people {joy}.] First, buy a
    {hobby.need}. [A {color} one is fine.|It need not be new.] Then go to the {hobby.place} [every {day}|on {day}] with
    a {kin}. Finally, {hobby.do} [for ten minutes|for half an hour] each day. {name} started {hobby} in {season}, and
    {he} {hobby.past} [last week|last {day}]. Enjoy your {hobby}!
book_review: <write> a review of a {genre} book. [I {verdict} it.|The hero is {name}.|]
  > I {verdict} this {genre}. It is about {genre.about} and a {trait} {job} named {name}. {name} {trait.as}, and that is
    why {he} {was} the right hero for a {genre}. The start is {genre.mood}, and the end {verdict.end}. [My favorite part
    is {place.at}, where {he} found {genre.about}.|In one part {he} met a {color} {animal}.] All in all, a
    {verdict.great} book. I give it {verdict.rating} [stars|points].
film_review: [Did you like|What do you think of|Review] the film "The {Color} {Object}"?
  > "The {Color} {Object}" is a {genre} about {genre.about}. {name} plays a {job}, and {he} {was} {verdict.great}. The
    mood is {genre.mood}, as a {genre} should be. I {verdict} the part {place.at}, where {he} gave the {color} {object}
    to a {animal}. The music {verdict.end}. My rating for "The {Color} {Object}" is {verdict.rating} of five.
restaurant_review: <write> a review of a restaurant in {city}. [I {verdict} it.|I ate {dish}.|]
  > [On {day}|Last {day}] we ate in a [small|new|old] restaurant in {city}. I {verdict} it. The {dish} was
    {verdict.great}, and the {drink} was {drink.temp}[ as it should be|]. The waiter was {trait}: the waiter {trait.as}.
    My {kin} had {dish2} and was {feeling}. The evening {verdict.end}. {Verdict.rating} of five stars. {verdict.again}.
riddle_object: <me> [Tell me|Give me|Do you know] a riddle[ about a {quiz}|].
  > <hi> [Here is a riddle.|Listen carefully.|Try this one.] [{quiz.hint1}. {quiz.hint2}. {quiz.hint3}.|{quiz.hint3}.
    {quiz.hint1}.|{quiz.hint2}. {quiz.hint3}. {quiz.hint1}.|{quiz.hint1}. {quiz.hint2}.] What am I? [The answer is|It
    is] a {quiz}. [Many people guess a {object}, but a {object} cannot do that.|If you said a {quiz}, you are clever.]
riddle_animal: <me> [Give me an animal riddle.|Make a riddle about a {animal}.|Do you know a riddle about an animal?]
  > <hi> [Who am I?|Guess the animal.] I live in a {animal.home} and I like {animal.food}. Last night I {animal.sound}
    and {animal.moved} to the {place}. My child is called a {animal.young}. I am {size}, and today I am {color}. [I am
    not a {animal2}, for I do not eat {animal2.food}.|A {animal2} is not my friend.] The answer: a {color} {animal}!
weather_report: <me> [What is the weather in {city}[ on {day}|]?|[Give me the|Write a] weather report for {city}[ on
    {day}|].]
  > <hi> Here is the weather for {city} on {day}. In the morning there {weather.plural} {weather}, and the sky is
    {weather.sky}. Take a {weather.gear} and {weather.do}. In the afternoon there {weather2.plural} {weather2}, and the
    sky turns {weather2.sky}. [You may feel {weather.felt} first and {weather2.felt} later.|Then you need a
    {weather2.gear}.] [In the evening {weather} will come back.|The night is {season.air}, as it should be in {season}.]
introduce_self: [Write an introduction for {name}|Help me introduce myself. I am {name}|Introduce yourself as {name}][,
    a {job}|][ from {city}|].
  > [Hello|Hi|Good day]! My name is {name} and I am a {job} from {city}. I work at a {job.shop} and make {job.makes}. In
    my free time I like {hobby}. [Last {day}|In {season}] I {hobby.past} in the {hobby.place}. I live with a {color}
    {animal}. [The {animal} loves {animal.food}.|The {animal} sleeps in its {animal.home}.] People say I am {trait}.
    [Nice to meet you!|I hope to hear from you.]
introduce_person: [Introduce|Please introduce] my {mate} {name}[, who is a {job}|, who loves {hobby}|].
  > [This is|Please meet] my {mate} {name}. {name} is a {job}, and {he} make{s} the best {job.makes} in {city}. {He}
    {iz} {trait}: last {season} {he} {trait.as}. {His} hobby is {hobby}, so {he} {iz} often in the {hobby.place}[ with
    {his} {hobby.need}|]. At home {he} {has} a {size} {animal} and give{s} it {animal.food}. If you are {feeling}, talk
    to {him}. My {mate} will help you.
faq_shop: <write> [a FAQ|questions and answers] for a {job.shop}[ in {city}|].
  > Q: When is the {job.shop} open? / A: We are open from {day} to {day2}, from {hour} on. / Q: What do you sell? / A:
    We sell {job.makes}, all made by {name}, our {job}. / Q: Can I watch {name} work? / A: Yes, {he} show{s} the
    {job.tool} to guests on {day}. / Q: Can I pay for {job.makes} by card? / A: [Yes, of course.|No, only with
    coins.|Only from {day} to {day2}.]
faq_pet: <me> [I have a new {animal}. What should I know?|Answer common questions about {animal.many}.|How do I care for
    a {animal}?]
  > <hi> / Q: What do {animal.many} eat? / A: {Animal.many} eat {animal.food}[ and drink fresh water|]. / Q: Where
    should my {animal} sleep? / A: A {animal} sleeps best in a {size} {animal.home}. / Q: What is a young {animal}
    called? / A: A young {animal} is a {animal.young}. / Q: Can a {animal} live with a {animal2}? / A: [Yes, if each has
    its own place: a {animal.home} and a {animal2.home}.|No, because a {animal2} might eat the {animal.food}.]
summary_story: Summarize: {name} is a {job} in {city}. On {day} {he} found a {color} {object} {place.at}. {He} gave it
    to {name2}. Now {name2} is {feeling}.
  > [In short|Summary|To sum up]: {name}, a {job} from {city}, found a {object} {place.at} on {day} and gave it to
    {name2}. The {object} was {color}. {name2} {feeling.did} and is now {feeling}. [The main person is {name}, and {he}
    {iz} a {trait} {job}.|So the {color} {object} went from {name} to {name2}.]
questions_about_text: {name} has a {color} {animal}. It eats {animal.food} {place.at}. {name} likes {hobby}. [Write
    three questions and answers.|Make a quiz about this text.]
  > 1. What color is the {animal} of {name}? It is {color}. / 2. Where does the {animal} eat {animal.food}? [It eats
    {animal.food} {place.at}.|{Place.at}, near {place.see}.] / 3. What does {name} like? {He} like{s} {hobby}, so {he}
    may need a {hobby.need}. / [Bonus: Can the {color} {animal} {hobby.do}? No, but it can watch {him}.|Bonus: Who owns
    the {color} {animal}? {name} does, and {he} {iz} {joy} about it.]
news_report: <write> a news report about [a {animal} in {city}|{name} from {city}].
  > {city}, {day}. A {size} {animal} [surprised|scared] the people of {city} [this morning|last night]. The {animal}
    {animal.moved} into a {job.shop} and ate all the {animal.food}. {name}, a {job}, was there. {He} {was} {feeling} and
    {feeling.did}. [Then {he} brought the {animal} back to its {animal.home}.|Then {he} called the zoo with {his}
    phone.] By {day2} the {job.shop} will sell {job.makes} again. The {size} {animal} is well.
speech: <write> a [short |]speech for the {event} of {name}. [{He} {iz} my {mate}.|]
  > Dear guests, [welcome to|thank you for coming to] the {event} of {name}. {name} is my {mate}, and I know that {he}
    {iz} {trait}. When {he} {was} young, {he} {trait.as}. Later {he} became a {job} and {job.did} {job.makes} in {city}.
    [We all love {his} {job.makes}.|We all know {his} old {job.tool}.] Today we {event.do}. {name}, here is a {color}
    {object} for you. [Raise your glass of {drink}!|To {name}, the most {trait} {job} of {city}!]
pet_name: <me> [What should I call my {color} {animal}?|I need a name for a {color} {animal}.]
  > <hi> [How about|You could take] "{Color}", because your {animal} is {color}. If it lives in a {animal.home} of
    {material}, "{Material}" is a fine name. If it loves {animal.food}, call it "{Animal.food}". A {trait} {animal}
    could be "{Trait}". My {kin} has a {color2} {animal2} called "{Color2}". [I like "{Color}" best.|For a {animal}, I
    would choose "{Trait}".|I would take "{Material}".]
weekend_plan: [What can {name} do this weekend?|Plan a weekend for {name}.|Make a weekend plan for {name}, who likes
    {hobby}.]
  > Saturday: {name} can {hobby.do} in the {hobby.place}. {He} need{s} a {hobby.need}. For lunch {he} can eat {dish}. /
    Sunday: If there {weather.plural} {weather}, {he} should {weather.do} and read about {hobby}. If not, {he} can go to
    the {place} and {place.do}[ with {his} {kin}|]. [After {hobby} and {dish}|After such a weekend], {name} will feel
    {joy}.
"""


def _parse(text: str) -> dict[str, tuple[str, str]]:
    """`name: user pattern`, then `  > answer pattern`, each folded; ` / ` is a line break, `<piece>` one of _PIECES."""
    text = re.sub(r"\n {4}", " ", text.strip())
    for piece, pattern in _PIECES.items():
        text = text.replace(f"<{piece}>", pattern.replace("\n", " / "))
    blocks = re.findall(r"^(\w+): (.*)\n  > (.*)$", text, flags=re.M)
    return {name: (user, answer.replace(" / ", "\n")) for name, user, answer in blocks}


def _patterned(user: str, answer: str) -> Template:
    def template(rng: random.Random) -> tuple[str, str]:
        scene = Scene(rng)
        return scene(user).strip(), scene(answer)  # the user message first: what it fixes, the answer must honour

    return template


def _greeted(template: Template) -> Template:
    """The user gives a name first, and the answer greets it: for templates with few user messages."""
    me, hi = _PIECES["me"] + " ", _PIECES["hi"] + " "

    def greeted(rng: random.Random) -> tuple[str, str]:
        scene = Scene(rng)
        lead, reply = scene(me), scene(hi)
        user, answer = template(rng)
        return lead + user, reply + answer

    return greeted


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _amounts(scene: Scene, bank: str, count: int) -> tuple[list[Row], list[int], list[str]]:
    """Different ingredients, how many of each, and each name in the matching number."""
    parts = scene.some(bank, count)
    amounts = [1 + scene.below(4) for _ in parts]
    return parts, amounts, [part["one" if n == 1 else "many"] for part, n in zip(parts, amounts, strict=True)]


def advice_list(rng: random.Random) -> tuple[str, str]:
    scene = Scene(rng)
    user = scene("[Give me|I need|Please give me] {count} tips for {topic}.")
    tips = scene.some(f"tip of {scene.row('topic')['']}", int(scene.row("count")["n"]))
    style = ("{Tip}, so {tip.so}.", "{Tip}. Then {tip.so}.", "If you {tip}, {tip.so}.")[scene.below(3)]  # for all tips
    lines = [scene.turn(style, tip=tip) for tip in tips]
    head = scene("[Here are {count} tips for {topic}:|{Count} tips for {topic}:|Sure! These {count} tips may help:]")
    tail = "[If you have little time, just {tip}.|The best tip is this: {tip}.|Start on {day}, and all will be easy.]"
    return user, f"{head}\n{_numbered(lines)}\n{scene.turn(tail, tip=tips[scene.below(len(tips))])}"


def recipe(rng: random.Random) -> tuple[str, str]:
    """The ingredients come back in the steps in the order listed, singular or plural as listed."""
    scene = Scene(rng)
    parts, amounts, names = _amounts(scene, f"part of {scene.row('course')['']}", 2 + scene.below(2))
    user = scene("[How do I make a {course} with PART?|Give me a {course} recipe.|Write a {course} recipe for {name}.]")
    needs = ", ".join(f"{amount} {name}" for amount, name in zip(amounts, names, strict=True))
    steps = [f"{part['prep'].capitalize()} the {name}." for part, name in zip(parts, names, strict=True)]
    steps.append(scene(f"Put the {', the '.join(names[:-1])} and the {names[-1]} in a {{course.pot}}."))
    steps.append(scene("{Course.cook} [|everything |the {course} ]for {course.minutes} minutes."))
    steps.append(scene("Finally, {course.serve}."))
    head = scene("[{Color} {course}|{Season} {course}|My {course}]\n")
    return user.replace("PART", parts[0]["many"]), f"{head}You need: {needs}.\n{_numbered(steps)}"


def travel_plan(rng: random.Random) -> tuple[str, str]:
    scene = Scene(rng)
    days = 2 + scene.below(3)
    scene.rows["count"] = BANKS["count"][days - 2]
    user = scene("[Plan a trip to {city} for {count} days.|I have {count} days in {city}. Make a plan.]")
    start = "Day 1: {Transport.verb} the {transport} to {city}. [Eat {dish}|Take a walk] and see the {sight}."
    lines = [scene(start)]
    middle = "Visit the {sight0} and {sight0.do}. [Eat {dish0} in the evening|Then drink {drink0} {place.at}]."
    lines += [f"Day {day}: " + scene(middle.replace("0", str(day))) for day in range(2, days)]
    last = "Go back to the {sight} to {sight.do}. Then {transport.verb} the {transport} home"
    lines.append(f"Day {days}: " + scene(last + " [with a {object} as a gift|from the {transport.stop}]."))
    return user, scene("[Here is a plan for {count} days in {city}:|{Count} days in {city}:]\n") + "\n".join(lines)


def packing_list(rng: random.Random) -> tuple[str, str]:
    scene = Scene(rng)
    user = scene("[What should I pack for|What do I need for|What is useful for] the {place} in {season}?")
    items = scene.some("wear", 2 + scene.below(2))
    line = "{Wear.a} [new |good |]{wear}: {wear.this} {wear.is} for {wear.need}."
    lines = [scene.turn(line, wear=item) for item in items]
    lines.append(scene("{Gear}, which {gear.is} good for {gear.need}."))
    lines.append(scene("A {weather.gear}, because there {weather.plural} often {weather}."))
    head = scene("[For the {place} in {season}, pack this:|In {season} the air is {season.air}. Pack this:]\n")
    tail = scene.turn("\n[Do not forget the {wear}!|The {wear} {wear.is} most important.]", wear=items[0])
    return user, head + _numbered(lines) + tail


def daily_schedule(rng: random.Random) -> tuple[str, str]:
    scene = Scene(rng)
    user = scene("[Make|Write] a [daily schedule|plan for {day}] for {name}, [the {job}|who is a {job}].")
    tasks = (
        "[Get up|Wake up] and drink {drink}", "[Eat {dish}|Feed the {animal}]",
        "Go to the {job.shop} and clean the {job.tool}",
        "[Make|Sell] {job.makes}", "Lunch [with {name2}|{place.at}]", "[More {job.makes}|Clean the {job.tool} again]",
        "[{Hobby} in the {hobby.place}|Walk home]", "[Read|Feed the {animal}] and go to bed",
    )  # fmt: skip
    hour, lines = 6 + scene.below(3), []
    for task in tasks:
        lines.append(f"{hour}:{scene('[00|15|30] ' + task)}")
        hour += 1 + scene.below(2)
    return user, scene("[Schedule|Plan|A day] for {name}:\n") + "\n".join(lines)


def week_plan(rng: random.Random) -> tuple[str, str]:
    scene = Scene(rng)
    start, days = scene.below(4), 3 + scene.below(3)
    first, *middle, last = [day[""] for day in BANKS["day"]][start : start + days]
    user = scene(f"[Plan my {{hobby}} week|Make a {{hobby}} plan|I want to learn {{hobby}}] from {first} to {last}.")
    lines = [scene(f"{first}: buy a {{hobby.need}} and {{hobby.do}} for 10 minutes.")]
    task = "[{hobby.do} for MIN minutes|MIN minutes of {hobby}] [in the {hobby.place}|{place0.at}]."
    for i, day in enumerate(middle, 2):
        lines.append(f"{day}: " + scene(task.replace("0", str(i)).replace("MIN", str(10 * i))))
    lines.append(f"{last}: " + scene("rest, and [eat {dish}|drink {drink.temp} {drink}] with your {kin}."))
    return user, "\n".join(lines) + scene(f" You did {days - 1} days of {{hobby}}!")


def shopping_list(rng: random.Random) -> tuple[str, str]:
    scene = Scene(rng)
    user = scene("[Write|Make] a shopping list for a {event} on {day}. [I want a {course}.|We need a {course}.]")
    _, amounts, names = _amounts(scene, f"part of {scene.row('course')['']}", 3)
    lines = [scene(f"{n} {name} for the {{course}}") for n, name in zip(amounts, names, strict=True)]
    lines += [scene("[a|one] {color} {event.bring}"), scene("{drink} to drink {drink.temp}")]
    tail = scene("{course}[, enough for all guests|]. [Buy everything|Go shopping] before {day}.")
    head = scene("For the {event} on {day} you need:\n")
    return user, f"{head}{_numbered(lines)}\nThat is {sum(amounts)} pieces for the {tail}"


def team_story(rng: random.Random) -> tuple[str, str]:
    """A story with as many helpers as the user asks for, each coming back with the thing first brought."""
    scene = Scene(rng)
    n = 2 + scene.below(2)
    scene.rows["count"] = BANKS["count"][n - 2]
    user = scene("Write a story about {count} [animals|friends from the {place}] who build a house.")
    text = scene("{Count} animals wanted to build a house {place.at}.")
    for pattern in (
        " The {animal0} brought {color0} {material0}.",
        " From the {material0} the {animal0} made {color0} [walls|doors|windows].",
    ):
        text += "".join(scene(pattern.replace("0", str(i))) for i in range(1, n + 1))
    text += scene(" [In {season}|By {day}] the {size} house was ready.")
    text += scene(" [Then {weather} {weather.noise}, but the house was strong.|The {count} animals {joy.did}.]")
    return user, text


TEMPLATES: dict[str, Template] = (
    {name: _patterned(*patterns) for name, patterns in _parse(_PATTERNS).items()}
    | {template.__name__: template for template in (recipe, daily_schedule, week_plan, shopping_list)}
    | {template.__name__: _greeted(template) for template in (advice_list, travel_plan, packing_list, team_story)}
)
"""Template name -> rng -> (user message, answer)."""

"""Word problems of two to five steps with worked solutions; numbers are whole and at most 200.

A problem is a few lines of text (PROBLEMS), or a short function where steps repeat; either fills a `Sheet` of facts,
calculations and a question. `write` turns any sheet into a message and an answer in one of six styles. Words are drawn
again for every sentence; names, letters and totals carry through.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

MAX_NUMBER = 200


class Person(NamedTuple):
    name: str
    she: str
    her: str

    def __str__(self) -> str:
        return self.name


WOMEN = [Person(name, "she", "her") for name in "Mara Nina Ada Ruth Lena Ivy Clara Zoe Eva Rosa".split()]
MEN = [Person(name, "he", "his") for name in "Tom Ben Omar Leo Paul Hugo Max Sam Finn Carl".split()]
BANKS = {
    bank: [word.strip() for word in words.split(",")]
    for bank, words in {
        "things": "apples, pears, stamps, marbles, coins, cards, books, pencils, shells, buttons, cookies, lemons",
        "goods": "apples, pears, cups, books, pencils, lamps, chairs, plates, hats, shirts, candles, maps",
        "kin": "sister, brother, friend, teacher, neighbor, cousin",
        "spot": "in the garden, at the market, near the river, in the kitchen, at school, in the park",
        "crew": "baker, farmer, painter, machine, printer, robot",
        "task": "homework, dinner, a walk, a game, a film, a lesson",
        "shape": "garden, room, field, yard, wall, floor",
        "hall": "hall, theater, bus, school, church",
        "goes": "rides, drives, walks, runs",
        "counts": "counts, sells, collects, paints",
    }.items()
}
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 10: "a tenth"}


def calculate(left: int, op: str, right: int) -> int | None:
    """left op right; None where it is no whole number."""
    if op == "/":
        return left // right if right and left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[op]


class Step(NamedTuple):
    why: str  # a clause, as in "Mara buys 5 apples"
    left: int
    op: str
    right: int
    result: int
    means: str  # a clause, as in "Mara has 17 apples"

    @property
    def equation(self) -> str:
        return f"{self.left} {self.op} {self.right} = {self.result}"


class Slots(dict):
    """What the braces of a text stand for: numbers set by the problem; people and words drawn at their first use.

    {A} and {B} are people of different pronouns; {goods} and {goods2} are two words of one bank; {a_part} and {percent}
    say the number `parts` in words.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.people: list[Person] = []  # those a pronoun may stand for

    def __missing__(self, key: str) -> object:
        if key in ("A", "B"):
            women = self.rng.random() < 0.5 if not self.people else self.people[0] in MEN
            self.people.append(self.rng.choice(WOMEN if women else MEN))
            value: object = self.people[-1]
        elif key.startswith("a_part"):
            value = PARTS[self[key.replace("a_part", "parts")]]
        elif key == "percent":
            value = 100 // self["parts"]
        elif key == "her":
            value = self["A"].her
        else:
            taken = self.values()
            value = self.rng.choice([word for word in BANKS[key.rstrip("234")] if word not in taken])
            if key in ("kin", "spot"):
                return value  # a new one every time
        self[key] = value
        return value


class Sheet:
    """A problem under construction."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.slots = rng, Slots(rng)
        self.facts: list[str] = []
        self.steps: list[Step] = []
        self.question, self.unit = "", ""
        self.suits = True  # False once a number is no whole number from 2 to MAX_NUMBER

    def say(self, text: str) -> str:
        """Fill a text: one alternative of each [a|b], then the {slots}."""
        text = re.sub(r"\[([^\]]*)\]", lambda match: self.rng.choice(match[1].split("|")), text)
        return text.format_map(self.slots)

    def know(self, fact: str) -> str:
        """State a fact in the message."""
        self.facts.append(self.say(fact))
        return self.facts[-1]

    def calc(self, why: str, left: int, op: str, right: int, means: str) -> int:
        """left op right, done because of `why`; "#" in `means` stands for the result."""
        if op in "+*" and self.rng.random() < 0.3:
            left, right = right, left
        result = calculate(left, op, right)
        self.suits &= result is not None and all(2 <= number <= MAX_NUMBER for number in (left, right, result))
        result = result or 2
        self.steps.append(Step(why, left, op, right, result, self.say(means).replace("#", str(result))))
        return result

    def ask(self, question: str, unit: str) -> None:
        self.question, self.unit = self.say(question), self.say(unit)


# Problems in text. First line: numbers and their ranges (or choices). Then, a line each:
#   fact                                   a sentence of the message
#   fact > name = a op b > meaning         the same, and the step it leads to
#   (why) > name = a op b > meaning        a step the reader has to think of; (=1) is the first fact
#   let name = a op b                      a number nobody mentions
#   ? question > unit
# A line that begins with four spaces goes on with the one before.

BASKET = """
n 2-9, p 2-9, m 2-9, q 2-9, k 2-9, r 2-9, off 2-9, people 2-6, parts 2/4/5/10, bill 20/50/100/200
{A} [buys|takes] {n} {goods} [for|at] {p} dollars each > one = n * p > the {goods} cost # dollars
{A} [buys|takes] {m} {goods2} [for|at] {q} dollars each > two = m * q > the {goods2} cost # dollars
(we pay for both) > total = one + two > the bill is # dollars
? How much does {A} pay? > dollars"""
ONE_GOOD = "\n".join(BASKET.split("\n")[:3]).replace("one =", "total =")
CHANGE = """
{A} [pays with|gives the seller] {bill} dollars > rest = bill - total > {A} gets # dollars back
? How much money does {A} get back? > dollars"""
DISCOUNT = """
[the shop takes {percent} percent off the bill|there is a discount of {percent} percent]
({percent} percent is one part in {parts}) > off = total / parts > the discount is # dollars
(the discount comes off the bill) > rest = total - off > {A} pays # dollars
? How much does {A} pay? > dollars"""
SAVINGS = """
start 5-60, each 2-12, weeks 3-9, price 5-60
{A} [has|starts with] {start} dollars
{A} [saves|puts away] {each} dollars [a|every] week for {weeks} weeks > saved = each * weeks > {A} saves # dollars
(=1) > total = start + saved > {A} has # dollars
? How many dollars does {A} have now? > dollars"""
TRIP = """
speed 3-20, hours 2-6, slow 2-12, later 2-5, more 5-60
{A} {goes} [|for ]{hours} hours at {speed} miles per hour > way = speed * hours > the way is # miles"""
TWO_LEGS = """
[then|after that] {A} {goes} {later} hours at {slow} miles per hour > second = slow * later > the second way is # miles
(we want both ways together) > whole = way + second > the whole way is # miles
? How far does {A} go? > miles"""
CREW = """
fast 3-12, slow 2-9, hours 2-7, number 2-5
[a {crew} makes|one {crew} can make] {fast} {goods} [an|in one] hour"""
CREW_HOURS = """
they [work for|need] {hours} hours > all = both * hours > they make # {goods}
? How many {goods} do they make? > {goods}"""
TASKS = """
one 2-9, two 10-45, three 10-45, four 10-55, free 2-40
{A} [needs {two} minutes for|spends {two} minutes on] {task}
{A} [needs {three} minutes for|spends {three} minutes on] {task2} > sum = two + three > the time so far is # minutes
{A} [needs {four} minutes for|spends {four} minutes on] {task3} > total = sum + four > the time so far is # minutes"""
AGES = """
age 4-30, gap 2-12, times 2-4, years 2-10
{A} is [{age} years old|now {age}]"""
OLDER = "\n{B} is {gap} years older than {A} > other = age + gap > {B} is # years old"
BOTH_AGES = """
(we want both ages together) > sum = age + other > both ages together are # years
? What is the sum of the two ages? > years"""
SIDES = """
long 4-20, wide 2-10, price 2-5, parts 2-6, cut 2-6, side 2-6
[a {shape} is {long} meters long and {wide} meters wide|the sides of a {shape} are {long} and {wide} meters]"""
AREA = SIDES + "\n(the area is the length times the width) > size = long * wide > the {shape} has # square meters"


def _days(*days: str) -> str:
    """A count for each day, added up."""
    lines = [", ".join(f"n{i} 3-30" for i in range(len(days))) + ", more 3-40, days " + f"{len(days)}-{len(days)}"]
    for i, day in enumerate(days):
        fact = f"[{{A}} {{counts}} {{n{i}}} {{things}} on {day}|on {day} {{A}} {{counts}} {{n{i}}} {{things}}]"
        total = "n0" if i == 1 else "total"
        lines.append(fact + (f" > total = {total} + n{i} > the total after {day} is # {{things}}" if i else ""))
    return "\n".join([*lines, "? How many {things} are there in all? > {things}"])


AVERAGE = """
(there are {days} days) > average = total / days > the average is # {things} a day
? What is the average for a day? > {things}"""
CONVERT = """
n 2-12, extra 2-20, less 2-15, factor FACTOR-FACTOR
the WHAT [is|measures] {n} BIG and {extra} SMALL
(each of the {n} BIG is {factor} SMALL) > part = n * factor > {n} BIG are # SMALL
(there are {extra} SMALL more) > total = part + extra > the WHAT is # SMALL
[then|after that] {less} SMALL are taken off > left = total - less > # SMALL are left
? How many SMALL are left? > SMALL"""
UNITS = {
    "hours": ("minutes", 60, "work"), "weeks": ("days", 7, "holiday"), "dozens": ("eggs", 12, "basket"),
    "feet": ("inches", 12, "board"), "days": ("hours", 24, "voyage"), "yards": ("feet", 3, "rope"),
}  # fmt: skip


def _convert(big: str) -> str:
    small, factor, what = UNITS[big]
    return CONVERT.replace("BIG", big).replace("SMALL", small).replace("FACTOR", str(factor)).replace("WHAT", what)


RED = """
parts 2/3/4/5/10, parts2 2/3/4/5/10, times 2-20, more 2-20
let total = parts * times
[{A} has {total} {things}|there are {total} {things} on the table of {A}]
{a_part} of [them|the {things}] are red > red = total / parts > # {things} are red"""
NOT_RED = """
(the red ones come off) > rest = total - red > # {things} are not red
? How many {things} are not red? > {things}"""
TWO_PILES = """
n 5-50, gap 2-20, lost 2-20, three 3-3
{A} [has|owns] {n} {things}
{B} has WORDS {A} > other = n SIGN > {B} has # {things}
(we want both together) > total = n + other > both have # {things}
? How many {things} do they have together? > {things}"""
MORE = TWO_PILES.replace("WORDS", "{gap} more {things} than").replace("SIGN", "+ gap")
FEWER = TWO_PILES.replace("WORDS", "{gap} fewer {things} than").replace("SIGN", "- gap")
TIMES = TWO_PILES.replace("WORDS", "3 times as many {things} as").replace("SIGN", "* three")
LOST = """
[both lose {lost} {things} in all|they give away {lost} {things}]
    > left = total - lost > both have # {things} left"""
ROWS = """
rows 3-12, seats 3-12, empty 2-20, gone 2-20
[a {hall} has {rows} rows|there are {rows} rows in a {hall}]
each row has {seats} seats > all = rows * seats > the {hall} has # seats
[{empty} seats are empty|nobody sits on {empty} seats] > taken = all - empty > # seats are taken
? How many seats are taken? > seats"""

PROBLEMS: dict[str, str] = {
    "shop_two_goods": BASKET,
    "shop_three_goods": BASKET + """
{A} [buys|takes] {k} {goods3} [for|at] {r} dollars each > three = k * r > the {goods3} cost # dollars
(we pay for the {goods3} too) > sum = total + three > the bill is # dollars""",
    "shop_change": ONE_GOOD + CHANGE,
    "shop_two_goods_change": BASKET + CHANGE,
    "shop_discount": ONE_GOOD + DISCOUNT,
    "shop_two_goods_discount": BASKET + DISCOUNT,
    "shop_split_bill": BASKET + """
[{people} people share the bill equally|the bill is split among {people} people]
    > part = total / people > each person pays # dollars
? How much does each person pay? > dollars""",
    "shop_coupon": BASKET + "\n{A} [has|uses] a coupon of {off} dollars > rest = total - off > {A} pays # dollars",
    "savings_total": SAVINGS,
    "savings_spend": SAVINGS + """
{A} [spends {price} dollars on|pays {price} dollars for] a bike > left = total - price > {A} has # dollars left
? How many dollars does {A} have left? > dollars""",
    "trip_two_legs": TRIP + TWO_LEGS,
    "trip_average_speed": TRIP + TWO_LEGS + """
(the two times add up) > time = hours + later > the whole time is # hours
(the speed is the way by the time) > average = whole / time > the average speed is # miles per hour
? What is the average speed? > miles per hour""",
    "trip_way_back": TRIP + """
{A} [comes back the same way|makes the way back] at {slow} miles per hour
    > back = way / slow > the way back takes # hours
(we want both times together) > time = hours + back > the whole trip takes # hours
? How long does the whole trip take? > hours""",
    "trip_to_go": TRIP + """
let whole = way + more
the [whole way is {whole} miles|town is {whole} miles away] > left = whole - way > {A} has # miles to go
? How many miles does {A} still have to go? > miles""",
    "work_together": CREW + """
[a {crew2} makes|one {crew2} can make] {slow} {goods} [an|in one] hour
    > both = fast + slow > both make # {goods} an hour""" + CREW_HOURS,
    "work_crew": CREW + """
[there are {number} of them|{number} of them work at once]
    > both = fast * number > all make # {goods} an hour""" + CREW_HOURS,
    "work_rest": CREW + """
let done = slow * number
let rest = fast * hours
let need = done + rest
[we need {need} {goods} and have {done} already|{done} of {need} {goods} are done]
    > missing = need - done > # {goods} are missing
(=1) > time = missing / fast > the rest takes # hours
? How many hours does the rest take? > hours""",
    "clock_time_left": TASKS + """
let all = total + free
[{A} has|there are] {all} minutes in all > left = all - total > {A} has # minutes left
? How many minutes does {A} have left? > minutes""",
    "clock_end": TASKS.replace("one 2-9", "start 5-30, hour 60-60") + """
{A} [begins|starts] {start} minutes after noon > end = start + total > {A} is done # minutes after noon
(one hour has 60 minutes) > past = end - hour > {A} is done # minutes after one
? How many minutes after one is {A} done? > minutes""",
    "ages_older": AGES + OLDER + BOTH_AGES,
    "ages_younger": AGES + OLDER.replace("older", "younger").replace("+", "-") + BOTH_AGES,
    "ages_times": AGES + "\n{B} is {times} times as old as {A} > other = age * times > {B} is # years old" + BOTH_AGES,
    "ages_later": AGES + OLDER + """
[we look {years} years ahead|{years} years go by] > age = age + years > {A} will be # years old
(=3) > other = other + years > {B} will be # years old""" + BOTH_AGES.replace("ages?", "ages then?"),
    "rectangle_fence": SIDES + """
(we need a long and a short side) > half = long + wide > half of the way around is # meters
(there are two sides of each kind) > size = half + half > the way around the {shape} is # meters
[each meter costs {price} dollars|the price is {price} dollars a meter]
    > cost = size * price > the fence costs # dollars
? How much does the fence cost? > dollars""",
    "rectangle_cost": AREA + """
[each square meter costs {price} dollars|the price is {price} dollars a square meter]
    > cost = size * price > the work costs # dollars
? How much does the work cost? > dollars""",
    "rectangle_pond": AREA + """
[inside is a pond of {cut} by {side} meters|a pond of {cut} by {side} meters is inside]
    > pond = cut * side > the pond has # square meters
(the pond comes off) > left = size - pond > # square meters are left
? How many square meters are left? > square meters""",
    "rectangle_parts": AREA + """
[the {shape} is cut into {parts} equal parts|{parts} people share the {shape} equally]
    > part = size / parts > each part has # square meters
? How big is each part? > square meters""",
    "tally_total": _days("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
    "tally_goal": _days("Monday", "Tuesday", "Wednesday") + """
let goal = total + more
[the goal is|{A} wants] {goal} {things} > missing = goal - total > # {things} are missing
? How many {things} are missing? > {things}""",
    "average_three_days": _days("Monday", "Tuesday", "Wednesday") + AVERAGE,
    "average_four_days": _days("Monday", "Tuesday", "Wednesday", "Thursday") + AVERAGE,
    "average_missing_score": """
mean 8-30, one 5-30, two 5-30, three 3-3
[the average of 3 scores of {A} is {mean}|{A} has 3 scores with an average of {mean}]
    > sum = mean * three > the sum of the scores is #
[two of|the first two of] the scores are {one} and {two} > known = one + two > the known scores make #
(the rest is the missing score) > score = sum - known > the third score is #
? What is the third score? > points""",
    **{f"convert_{big}": _convert(big) for big in UNITS},
    "fraction_rest": RED + NOT_RED,
    "fraction_more": RED + """
{A} [paints {more} more {things} red|adds {more} red {things}] > sum = red + more > # {things} are red now
? How many {things} are red now? > {things}""",
    "fraction_of_the_rest": RED + NOT_RED + """
{a_part2} of the [rest|other {things}] are blue > blue = rest / parts2 > # {things} are blue
(we want red and blue together) > sum = red + blue > # {things} are red or blue
? How many {things} are red or blue? > {things}""",
    "compare_more": MORE, "compare_fewer": FEWER, "compare_times": TIMES,
    "compare_more_lost": MORE + LOST, "compare_times_lost": TIMES + LOST,
    "rows_taken": ROWS,
    "rows_leave": ROWS + """
[then|later] {gone} people leave > still = taken - gone > # people are still there
? How many people are still there? > people""",
}  # fmt: skip


class Line(NamedTuple):
    fact: str
    name: str = ""
    terms: tuple[str, ...] = ()
    means: str = ""


@cache
def parse(text: str) -> tuple[list[tuple[str, list[int]]], list[Line]]:
    """Numbers with the values they may have, and the lines of a problem."""
    first, *rest = text.strip().replace("\n    >", " >").split("\n")
    numbers = []
    for name, values in (entry.split() for entry in first.split(", ")):
        low, _, high = values.partition("-")
        numbers.append((name, list(range(int(low), int(high) + 1)) if high else [int(x) for x in values.split("/")]))
    lines = []
    for line in rest:
        fact, *step = line.split(" > ")
        if fact.startswith("let "):
            fact, step = "let", [fact.removeprefix("let "), ""]
        if fact.startswith("? "):
            lines.append(Line("?", means=fact.removeprefix("? "), name=step[0]))
        elif step:
            name, terms = step[0].split(" = ")
            lines.append(Line(fact, name, tuple(terms.split()), step[1]))
        else:
            lines.append(Line(fact))
    return numbers, lines


def problem(s: Sheet, text: str) -> None:
    numbers, lines = parse(text)
    slots = s.slots
    slots.update((name, s.rng.choice(values)) for name, values in numbers)
    for fact, name, terms, means in lines:
        if fact == "?":
            s.ask(means, name)
        elif not terms:
            s.know(fact)
        else:
            left, op, right = terms
            if fact == "let":
                slots[name] = calculate(slots[left], op, slots[right])
                continue
            if fact.startswith("(="):
                why = s.facts[int(fact[2:-1]) - 1]
            else:
                why = s.say(fact[1:-1]) if fact.startswith("(") else s.know(fact)
            slots[name] = s.calc(why, slots[left], op, slots[right], means)


# Problems whose steps repeat.

CHANGES = {
    "buy": ("+", "buys {n} [more {things}|{things} {spot}]"),
    "find": ("+", "[finds|picks up] {n} {things} {spot}"),
    "receive": ("+", "[gets|receives] {n} {things} from {her} {kin}"),
    "give": ("-", "[gives|hands] {n} {things} to {her} {kin}"),
    "lose": ("-", "[loses|drops] {n} {things} {spot}"),
    "sell": ("-", "sells {n} [{things} {spot}|of the {things}]"),
    "double": ("*", "[doubles the number of {things}|gets as many {things} again]"),
    "triple": ("*", "triples the number of {things}"),
    "halve": ("/", "[gives away|sells] half of the {things}"),
    "share": ("/", "[shares|splits] the {things} equally among {n} friends"),
    "pack": ("/", "[packs|puts] the {things} into bags of {n}"),
    "price": ("*", "[sells everything for {n} dollars a piece|asks {n} dollars for each]"),
}
STORIES = (
    "buy give", "find lose buy", "receive sell", "buy buy give", "lose share", "double give", "give triple",
    "buy halve find", "find pack", "receive give share", "sell double lose", "give lose find buy", "halve halve",
    "lose find price", "pack price", "buy pack price",
)  # fmt: skip
ROW_RULES = {"add": "+", "subtract": "-", "double_add": "*+", "add_subtract": "+-"}


def story(s: Sheet, changes: str) -> None:
    """A pile of things that changes, step by step."""
    rng, total = s.rng, s.rng.randint(8, 60)
    holder, count, question = "{A} has", "{things}", "does {A} have now"
    s.know(f"{{A}} [has|starts with] {total} {{things}}")
    for change in changes.split():
        op, phrase = CHANGES[change]
        highest = {"/": 6, "*": 9}.get(op, 25)
        s.slots["n"] = {"double": 2, "triple": 3, "halve": 2}.get(change) or rng.randint(2, highest)
        if change == "share":
            holder, question = "each friend gets", "does each friend get"
        elif change in ("pack", "price"):
            count = "bags" if change == "pack" else "dollars"
        total = s.calc(s.know("{A} " + phrase), total, op, s.slots["n"], f"{holder} # {count}")
    s.ask(f"How many {count} {question}?", count)


def sequence(s: Sheet, ops: str) -> None:
    """A row of numbers; the operations of the rule take turns."""
    rng, number, length = s.rng, s.rng.randint(2, 30), s.rng.randint(3, 5)
    words = {"+": "add", "-": "subtract", "*": "multiply by"}
    rule = [(op, 2 if op == "*" else rng.randint(2, 12)) for op in ops]
    turns = [f"{words[op]} {amount}" for op, amount in rule]
    s.know(f"[a row of numbers starts with|the first number of a row is] {number}")
    s.know(f"[the rule is to|to go on we] {' and then '.join(turns)}")
    for i in range(length):
        op, amount = rule[i % len(rule)]
        number = s.calc(f"the rule says {turns[i % len(rule)]}", number, op, amount, f"number {i + 2} is #")
    s.ask(f"What is number {length + 1} of the row?", "")


# Writing: a message and an answer from a sheet.

STYLE_REQUESTS = {
    "numbered": ("Show the steps.", "Number the steps.", "Solve it step by step."),
    "plain": ("Explain it in full sentences.", "Explain your answer."),
    "equations": ("Explain briefly.", "Keep it short.", "Give the equations."),
    "table": ("Make a table.", "Use a table."),
    "lets": ("Let's solve it together.", "Solve it with me."),
    "letters": ("Use letters.", "Use a letter for each result."),
}
ORDERS = [line.split() for line in ("First Next Then Later", "First Second Third Then", "First Then Next Now")]
DO = {
    "+": ("add {b} to {a}", "add {a} and {b}", "put {a} and {b} together"),
    "-": ("subtract {b} from {a}", "take {b} away from {a}"),
    "*": ("multiply {a} by {b}", "take {a} times {b}"),
    "/": ("divide {a} by {b}", "split {a} by {b}"),
}
INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}
LETTERS = ("abcde", "pqrst", "vwxyz", "klmno")


class Voice:
    """Names people at first and may use pronouns later; keeps one set of words for one text."""

    def __init__(self, rng: random.Random, people: list[Person]) -> None:
        self.rng, self.people, self.named = rng, people, set()
        self.order = rng.choice(ORDERS)
        self.find = rng.choice(("get", "find", "see"))

    def clause(self, text: str) -> str:
        """The clause; a subject named before becomes a pronoun more often than not."""
        for person in self.people:
            if person.name in text:
                start = text.removeprefix("then ").removeprefix("after that ")
                if person in self.named and start.startswith(person.name + " ") and self.rng.random() < 0.6:
                    text = text.replace(person.name, person.she, 1)
                self.named.add(person)
        return text

    def sentence(self, text: str) -> str:
        text = self.clause(text)
        return f"{text[0].upper()}{text[1:]}."

    def first(self, index: int, last: bool) -> str:
        return "Finally" if last and index else self.order[min(index, len(self.order) - 1)]

    def explain(self, step: Step) -> str:
        """One to three sentences: the reason, the equation and what it means, in some order."""
        kind, do, equation = self.rng.randrange(5), self.do(step), step.equation
        if kind == 0:
            return f"{self.sentence(step.why)} So {equation}, and {self.clause(step.means)}."
        if kind == 1:
            return f"{self.sentence(step.why)} We {do} and {self.find} {equation}. {self.sentence(step.means)}"
        if kind == 2:
            return f"Since {self.clause(step.why)}, we {do}: {equation}. Now {self.clause(step.means)}."
        if kind == 3:
            return f"We {do} because {self.clause(step.why)}. We {self.find} {equation}. {self.sentence(step.means)}"
        return f"We know that {self.clause(step.why)}. With {equation} {self.clause(step.means)}."

    def do(self, step: Step) -> str:
        return self.rng.choice(DO[step.op]).format(a=step.left, b=step.right)


def numbered(s: Sheet, v: Voice) -> list[str]:
    count, label = len(s.steps), s.rng.choice(("Step {}:", "{}.", "{})"))
    intro = s.rng.choice(("We solve this in {} steps.", "There are {} steps.", "Here are the {} steps.")).format(count)
    return [intro, *(f"{label.format(i)} {v.explain(step)}" for i, step in enumerate(s.steps, start=1))]


def plain(s: Sheet, v: Voice) -> list[str]:
    known = "We know this: " + " ".join(v.sentence(fact) for fact in s.facts)
    return [known, " ".join(
        f"{v.first(i, i == len(s.steps) - 1)}, we {v.do(step)}: {step.equation}. {v.sentence(step.means)}"
        for i, step in enumerate(s.steps)
    )]  # fmt: skip


def equations(s: Sheet, v: Voice) -> list[str]:
    words = s.rng.choice((("First", "Then"), ("Start with", "Then"), ("We have", "And then")))
    lines = [f"{words[min(i, 1)]} {step.equation}, so {v.clause(step.means)}." for i, step in enumerate(s.steps)]
    return [s.rng.choice((" ", "\n")).join(lines)]


def table(s: Sheet, v: Voice) -> list[str]:
    name, meaning = s.rng.choice(("step", "line", "row")), s.rng.choice(("meaning", "result", "so"))
    lines = [f"| {i} | {step.equation} | {v.clause(step.means)} |" for i, step in enumerate(s.steps, start=1)]
    return [f"| {name} | sum | {meaning} |", *lines, f"The last {name} shows that {v.clause(s.steps[-1].means)}."]


def lets(s: Sheet, v: Voice) -> list[str]:
    lines = [s.rng.choice(("Let's work it out.", "Let's think about it.", "Let's solve it together."))]
    for step in s.steps:
        why, means, do = v.clause(step.why), v.clause(step.means), v.do(step)
        if s.rng.random() < 0.5:
            lines.append(f"Let's {do}, since {why}: {step.equation}. Good, {means}.")
        else:
            lines.append(f"We see that {why}, so let's {do}. That is {step.equation}, so {means}.")
    return lines


def letters(s: Sheet, v: Voice) -> list[str]:
    """Each result gets a letter, and the next step uses it: "q = p - 6 = 74 - 6 = 68"."""
    names, name, lines, known = s.rng.choice(LETTERS), "", [], {}
    for name, step in zip(names, s.steps, strict=False):
        left, right = (known.get(number, str(number)) for number in (step.left, step.right))
        symbolic = f"{left} {step.op} {right} = " if left.isalpha() or right.isalpha() else ""
        formula = f"{name} = {symbolic}{step.equation}"
        if s.rng.random() < 0.5:
            lines.append(f"Let {name} be the result when {v.clause(step.why)}. {formula}.")
        else:
            lines.append(f"We write {name} for the next result: {formula}. {v.sentence(step.means)}")
        known = {step.result: name}
    return [*lines, f"So {name} is what we want, and {v.clause(s.steps[-1].means)}."]


STYLES: dict[str, Callable[[Sheet, Voice], list[str]]] = {
    "numbered": numbered, "plain": plain, "equations": equations, "table": table, "lets": lets, "letters": letters,
}  # fmt: skip
CHECK_REQUESTS = ("Check the answer.", "Check your work.", "Check it at the end.")


def check(s: Sheet) -> str:
    """The steps undone, from the last to the first."""
    undone = [f"{x.result} {INVERSE[x.op]} {x.right} = {x.left}" for x in reversed(s.steps)]
    opening = s.rng.choice(("Check:", "We check it backwards:", "Going back:"))
    return f"{opening} {', '.join(undone)}. {s.rng.choice(('It fits.', 'That is right.', 'All is well.'))}"


def write(build: Callable[[Sheet], None], rng: random.Random) -> tuple[str, str]:
    """Draw sheets until the arithmetic suits, then write the message and the answer."""
    s = Sheet(rng)
    build(s)
    while not s.suits:
        s = Sheet(rng)
        build(s)
    style, checked, asks = rng.choice(list(STYLES)), rng.random() < 0.35, [s.question]
    if rng.random() < 0.75:
        asks.append(rng.choice(STYLE_REQUESTS[style]))
    if checked:
        asks.append(rng.choice(CHECK_REQUESTS))
    reader, voice = Voice(rng, s.slots.people), Voice(rng, s.slots.people)
    user = " ".join([*(reader.sentence(fact) for fact in s.facts), *asks])
    lines = STYLES[style](s, voice) + ([check(s)] if checked else [])
    return user, "\n".join([*lines, f"Answer: {s.steps[-1].result} {s.unit}".strip()])


_BUILDERS: dict[str, Callable[[Sheet], None]] = {
    **{f"story_{changes.replace(' ', '_')}": partial(story, changes=changes) for changes in STORIES},
    **{name: partial(problem, text=text) for name, text in PROBLEMS.items()},
    **{f"sequence_{name}": partial(sequence, ops=ops) for name, ops in ROW_RULES.items()},
}
TEMPLATES: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    name: partial(write, build) for name, build in _BUILDERS.items()
}

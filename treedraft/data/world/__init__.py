"""A small seeded world of (user, answer) texts: word problems, code and chat, in plain ASCII.

Choices inside an answer depend on each other (a name and its pronoun, a variable, a running total), so a drafter that
predicts every position by itself must lose something. Splits are decided by the user message alone.
"""

from __future__ import annotations

import hashlib
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Template = Callable[[random.Random], tuple[str, str]]

DOMAINS = ("math", "code", "chat")
SPLITS = ("train", "validation", "evaluation")
_MODULES = {"math": "math_problems", "code": "code_functions", "chat": "chat_answers"}
_BUCKETS = {"evaluation": range(0, 5), "validation": range(5, 10), "train": range(10, 100)}
_DRAWS_PER_TEMPLATE = 200  # at 5 % a bucket, a template with many messages fails this often: 0.95 ** 200 = 4e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One user message and its answer, and where they came from."""

    domain: str
    template: str
    user: str
    answer: str


def templates(domain: str) -> dict[str, Template]:
    """The templates of a domain by name; each call draws one (user message, answer)."""
    _check("domain", domain, DOMAINS)
    return importlib.import_module(f"{__name__}.{_MODULES[domain]}").TEMPLATES


def split_of(user: str) -> str:
    """The split a user message belongs to: sha256 mod 100 is 0-4 evaluation, 5-9 validation, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(user.encode()).digest(), "big") % 100
    return next(split for split, buckets in _BUCKETS.items() if bucket in buckets)


def examples(split: str, *, count: int, seed: int, domains: Sequence[str] = DOMAINS) -> list[Example]:
    """The first `count` examples of a split, deterministic in (split, seed, index, domains).

    Domain and template are uniform. Outside train no user message comes twice. A shorter list is a prefix of a longer.
    Raises ValueError for an unknown split or domain.
    """
    _check("split", split, SPLITS)
    if not domains:
        raise ValueError(f"no domains given; known: {', '.join(DOMAINS)}")
    tables = {domain: list(templates(domain).items()) for domain in domains}
    seen: set[str] = set()
    drawn = []
    for index in range(count):
        rng = random.Random(f"{split}/{seed}/{index}")
        example = _draw(rng, split, tables, seen)
        if split != "train":
            seen.add(example.user)
        drawn.append(example)
    return drawn


def _draw(rng: random.Random, split: str, tables: dict[str, list[tuple[str, Template]]], seen: set[str]) -> Example:
    for _ in range(1000):
        domain = rng.choice(list(tables))
        name, template = rng.choice(tables[domain])
        for _ in range(_DRAWS_PER_TEMPLATE):
            user, answer = (text.strip() for text in template(rng))
            if split_of(user) == split and user not in seen:
                return Example(domain=domain, template=name, user=user, answer=answer)
    raise ValueError(f"the {split} split has no more than {len(seen)} user messages in {', '.join(tables)}")


def _check(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; known: {', '.join(choices)}")


# The long variant: many facts, then questions about a few of them.

_PRONOUNS = {name: "she" for name in ("Mara", "Nina", "Ada", "Ruth", "Lena", "Ivy", "Clara", "Zoe", "Eva", "Rosa")} | {
    name: "he" for name in ("Tom", "Ben", "Omar", "Leo", "Paul", "Hugo", "Max", "Sam", "Finn", "Carl")
}
_COLORS = ("green", "red", "blue", "white", "black", "yellow", "brown", "gray")
_OBJECTS = tuple(
    "lamp box book cup chair bag clock coat hat key map pen plate ring rug shoe table vase bell kite".split()
)
_PLACES = tuple(
    "attic,kitchen,garden,garage,hall,bedroom,cellar,office,shed,library,bathroom,barn,tower,shop,tent,boat".split(",")
)
_MAX_FACTS = len(_PRONOUNS) * len(_COLORS) * len(_OBJECTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`name` keeps a `color` `thing` in the `place`; the triple (name, color, thing) is unique in a message."""

    number: int
    name: str
    color: str
    thing: str
    place: str

    @property
    def text(self) -> str:
        return f"{self.name} keeps a {self.color} {self.thing} in the {self.place}"


def long_example(split: str, *, seed: int, index: int, num_facts: int) -> Example:
    """A message of `num_facts` numbered facts and 3 to 6 questions on them, with answers in full sentences.

    About 13 words a fact. Deterministic in (split, seed, index, num_facts). Raises ValueError for an unknown split and
    for num_facts outside 1 to 3200.
    """
    _check("split", split, SPLITS)
    if not 1 <= num_facts <= _MAX_FACTS:
        raise ValueError(f"num_facts is {num_facts}; allowed: 1 to {_MAX_FACTS}")
    rng = random.Random(f"long/{split}/{seed}/{index}/{num_facts}")
    while True:
        user, answer = _long_draw(rng, num_facts)
        if split_of(user) == split:
            return Example(domain="long", template="facts_and_questions", user=user, answer=answer)


def _long_draw(rng: random.Random, num_facts: int) -> tuple[str, str]:
    names = list(_PRONOUNS)
    facts = []
    for number, key in enumerate(rng.sample(range(_MAX_FACTS), num_facts), start=1):
        name, rest = names[key % len(names)], key // len(names)
        color, thing = _COLORS[rest % len(_COLORS)], _OBJECTS[rest // len(_COLORS)]
        facts.append(Fact(number=number, name=name, color=color, thing=thing, place=rng.choice(_PLACES)))
    asked = rng.sample(facts, min(num_facts, rng.randint(3, 6)))
    pairs = [_ask(rng, fact, facts) for fact in asked]
    questions = "\n".join(f"Question {i}: {question}" for i, (question, _) in enumerate(pairs, start=1))
    opening = rng.choice(("Here are some facts.", "Read these facts first.", "Please read the facts below."))
    closing = rng.choice(("Now answer the questions.", "Please answer in full sentences.", "Answer each question."))
    user = "\n".join((opening, *(f"Fact {fact.number}: {fact.text}." for fact in facts), closing, questions))
    label = rng.choice(("Question", "Answer", "Reply"))
    answer = "\n".join(f"{label} {i}: {reply}" for i, (_, reply) in enumerate(pairs, start=1))
    return user, answer


def _ask(rng: random.Random, fact: Fact, facts: list[Fact]) -> tuple[str, str]:
    """A question with one right answer in `facts`, and that answer with its reason."""
    she, item = _PRONOUNS[fact.name], f"{fact.color} {fact.thing}"
    where = f"in the {fact.place}"
    kinds = {
        f"What does fact {fact.number} say?": f"the {item} is {where}",
        f"Where does {fact.name} keep the {item}?": f"the {item} is {where}",
        f"Which fact is about the {item} of {fact.name}?": f"it is fact {fact.number}",
    }
    if sum((f.color, f.thing, f.place) == (fact.color, fact.thing, fact.place) for f in facts) == 1:
        kinds[f"Who keeps a {item} {where}?"] = f"{fact.name} keeps it there"
    if sum((f.name, f.thing, f.place) == (fact.name, fact.thing, fact.place) for f in facts) == 1:
        kinds[f"What color is the {fact.thing} that {fact.name} keeps {where}?"] = f"the {fact.thing} is {fact.color}"
    question, so = rng.choice(list(kinds.items()))
    reply = rng.choice(
        (
            f"Fact {fact.number}: {fact.text}, so {so}.",
            f"Fact {fact.number} says that {fact.text}, so {so}.",
            f"{fact.text}, as fact {fact.number} says, so {so}.",
            f"In fact {fact.number} we read about {fact.name}. There {she} keeps a {item} {where}, so {so}.",
        )
    )
    return question, reply

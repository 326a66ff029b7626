"""The world: deterministic, split by user message, plain ASCII, and true in what can be checked."""

import ast
import builtins
import contextlib
import io
import random
import re
import time

import pytest

from treedraft.data import world
from treedraft.data.world import chat_answers, code_functions, math_problems

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
FACT = re.compile(r"Fact (\d+): (\w+) keeps a (\w+) (\w+) in the (\w+)\.")
RESULT = re.compile(r"`(\w+\([^`]*\))` (?:is|gives|returns) `([^`]+)`")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def draw(domain: str, per_template: int) -> list[tuple[str, str, str]]:
    """(template, user, answer) of every template in turn."""
    rng = random.Random(f"test/{domain}")
    return [(name, *template(rng)) for name, template in world.templates(domain).items() for _ in range(per_template)]


@pytest.fixture(scope="module")
def splits() -> dict[str, list[world.Example]]:
    return {
        "train": world.examples("train", count=4000, seed=0),
        "validation": world.examples("validation", count=300, seed=0),
        "evaluation": world.examples("evaluation", count=300, seed=0),
    }


@pytest.mark.parametrize("domain", world.DOMAINS)
def test_a_domain_has_forty_named_templates(domain):
    names = list(world.templates(domain))
    assert len(names) >= 40
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


@pytest.mark.parametrize("split", world.SPLITS)
def test_examples_are_a_function_of_split_seed_and_index(split):
    first, again, longer = (world.examples(split, count=n, seed=7) for n in (30, 30, 40))
    assert first == again == longer[:30]
    assert first != world.examples(split, count=30, seed=8)


def test_splits_are_disjoint_by_user_message(splits):
    users = {split: {example.user for example in drawn} for split, drawn in splits.items()}
    assert not users["train"] & users["validation"]
    assert not users["train"] & users["evaluation"]
    assert not users["validation"] & users["evaluation"]
    for split in ("validation", "evaluation"):
        assert len(users[split]) == len(splits[split]), f"a user message comes twice in {split}"
    assert all(world.split_of(user) == split for split, drawn in users.items() for user in drawn)


def test_domains_are_drawn_evenly_and_every_template_comes_up(splits):
    drawn = splits["train"]
    for domain in world.DOMAINS:
        ours = [example.template for example in drawn if example.domain == domain]
        assert abs(len(ours) / len(drawn) - 1 / 3) < 0.05
        assert set(ours) == set(world.templates(domain))
    assert {example.domain for example in world.examples("train", count=50, seed=0, domains=("code",))} == {"code"}


def test_texts_are_ascii_and_tidy(splits):
    for example in (example for drawn in splits.values() for example in drawn):
        for text in (example.user, example.answer):
            assert text.isascii() and text.isprintable() or set(text) - {"\n"} <= set(map(chr, range(32, 127)))
            assert text and text == text.strip()
            assert not re.search(r"\{\w*\}", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)), text


@pytest.mark.parametrize(("split", "domains"), [("test", ("math",)), ("train", ("maths",)), ("train", ())])
def test_unknown_names_are_refused_with_the_choices(split, domains):
    with pytest.raises(ValueError, match="evaluation|chat"):
        world.examples(split, count=1, seed=0, domains=domains)


def test_five_thousand_examples_a_second():
    world.examples("train", count=50, seed=0)  # the modules are loaded now
    best = 0.0
    for seed in range(3):
        begin = time.process_time()
        world.examples("train", count=500, seed=seed)
        best = max(best, 500 / (time.process_time() - begin))
    assert best > 5000, f"{best:.0f} examples a second"


# Math.


def test_every_equation_in_a_math_answer_is_right():
    for name, _, answer in draw("math", 40):
        equations = EQUATION.findall(answer)
        assert len(set(equations)) >= 2, (name, answer)
        for left, op, right, result in equations:
            assert math_problems.calculate(int(left), op, int(right)) == int(result), (name, answer)
            assert max(int(left), int(right), int(result)) <= math_problems.MAX_NUMBER
        results = {int(result) for *_, result in EQUATION.findall(answer)}
        stated = re.fullmatch(r"Answer: (\d+)( [a-z ]+)?", answer.splitlines()[-1])
        assert stated and int(stated[1]) in results, (name, answer)


def test_running_totals_carry_on_in_a_story():
    for name, _, answer in draw("math", 40):
        if name.startswith("story"):
            steps = [e for e in EQUATION.findall(re.sub(r"\n.*backwards.*|\nCheck.*|\nGoing back.*", "", answer))]
            for (*_, total), (left, _, right, _) in zip(steps, steps[1:], strict=False):
                assert total in (left, right), answer


def test_pronouns_in_math_belong_to_the_people_named():
    for _, user, answer in draw("math", 40):
        words = set(re.findall(r"[A-Za-z]+", answer))
        named = {person.she for person in math_problems.WOMEN + math_problems.MEN if person.name in words}
        assert {word.lower() for word in words & {"she", "She", "he", "He"}} <= named, answer
        asked = set(re.findall(r"[A-Za-z]+", user))
        people = {person.name for person in math_problems.WOMEN + math_problems.MEN}
        assert words & people <= asked & people, (user, answer)


# Code.


def test_code_parses_and_what_is_said_of_it_is_true():
    num_checked = 0
    for name, user, answer in draw("code", 12):
        blocks = BLOCK.findall(user + "\n" + answer)
        assert blocks, (name, answer)
        for block in blocks:
            ast.parse(block)
            space: dict[str, object] = {}
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, name, "exec"), space)
            printed = out.getvalue().splitlines()
            expected = re.findall(r"^print\(.*\)  # (.+)$", block, re.MULTILINE)
            if expected and len(expected) == block.count("print("):
                shown = zip(printed, expected, strict=True)
                assert all(want in (got, repr(got)) for got, want in shown), (name, answer)
            for call, value in RESULT.findall(answer):
                if call.split("(")[0] in space:
                    assert eval(call, space) == ast.literal_eval(value), (name, answer)
                    num_checked += 1
            num_checked += block.count("assert ") + len(expected)
    assert num_checked > 100


def test_code_names_are_bound_where_they_are_used():
    known = set(dir(builtins))
    for name, _, answer in draw("code", 12):
        for block in BLOCK.findall(answer):
            nodes = list(ast.walk(ast.parse(block)))
            bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
            bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
            bound |= {alias.name for node in imports for alias in node.names}
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            assert used <= bound | known, (name, used - bound - known, answer)


def test_code_has_templates_of_its_own():
    assert world.templates("code") is code_functions.TEMPLATES


# Chat.


def test_pronouns_in_chat_belong_to_somebody_named():
    forms = {"he": {"he", "him", "his"}, "she": {"she", "her", "hers"}}
    num_checked = 0
    for name, user, answer in draw("chat", 30):
        named = {chat_answers.PRONOUNS.get(word) for word in re.findall(r"[A-Za-z]+", user + " " + answer)}
        used = set(re.findall(r"[a-z]+", answer.lower()))
        for pronoun, words in forms.items():
            assert pronoun in named or not words & used, (name, user, answer)
            num_checked += bool(words & used)
    assert num_checked > 100


# The long variant.


@pytest.mark.parametrize("num_facts", [1, 3, 40, 150])
@pytest.mark.parametrize("split", world.SPLITS)
def test_long_answers_agree_with_the_facts(split, num_facts):
    for index in range(4):
        example = world.long_example(split, seed=1, index=index, num_facts=num_facts)
        assert example == world.long_example(split, seed=1, index=index, num_facts=num_facts)
        assert world.split_of(example.user) == split and example.domain == "long" and example.user.isascii()
        facts = {int(number): rest for number, *rest in FACT.findall(example.user)}
        assert sorted(facts) == list(range(1, num_facts + 1))
        questions = re.findall(r"Question \d+: (.*\?)", example.user)
        replies = [line.split(": ", 1)[1] for line in example.answer.splitlines()]
        assert len(questions) == len(replies) == len(set(questions)) == min(num_facts, len(questions))
        for question, reply in zip(questions, replies, strict=True):
            (number,) = set(re.findall(r"[Ff]act (\d+)", reply))
            name, color, thing, place = facts[int(number)]
            assert {name, color, thing, place} <= set(re.findall(r"\w+", reply)), reply
            assert right_facts(question, facts) == [int(number)], (question, reply)
            if "There" in reply:
                assert f"There {world._PRONOUNS[name]} keeps" in reply


def right_facts(question: str, facts: dict[int, list[str]]) -> list[int]:
    """Numbers of the facts that hold every known word the question names, or the number that it names."""
    if named := re.search(r"What does fact (\d+) say", question):
        return [int(named[1])]
    words = set(re.findall(r"\w+", question))
    vocabulary = {word for fact in facts.values() for word in fact}
    asked = words & vocabulary
    return [number for number, fact in facts.items() if asked <= set(fact)]


def test_long_examples_differ_and_are_long():
    users = {world.long_example("train", seed=0, index=i, num_facts=150).user for i in range(20)}
    assert len(users) == 20 and min(len(user.split()) for user in users) > 1500


@pytest.mark.parametrize("num_facts", [0, 10**6])
def test_a_bad_number_of_facts_is_refused(num_facts):
    with pytest.raises(ValueError, match=str(num_facts)):
        world.long_example("train", seed=0, index=0, num_facts=num_facts)

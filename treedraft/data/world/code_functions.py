"""Requests for small Python functions and classes, answered with code that runs; names chosen early are reused later.

`TABLE` holds the tasks. A block of it is

    function names | kinds of the arguments | arguments of a test | its value | return type | accumulator [| empty]
      do phrasing / other phrasing
      loop start | step | what it does [| condition]     a loop over the items of {a}
      upto start | step | what it does [| condition]     a loop over 1 .. {a}
      expr code | explanation                            one expression
      code sentence | sentence                           any body, in the lines below (`code!`: counts as short)

with the placeholders {f} function, {a} {b} arguments, {x} {y} loop items, {acc} accumulator, {i} index; ` ## ` starts a
comment that is only sometimes kept, `empty` is the result of an early return. `_compose` draws names, phrasing and
body, and dresses them: docstring, type hints, comments, tests with the values that the task's Python expression gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate  # noqa: F401 (the table's)
from math import gcd, prod  # noqa: F401 (the table's)
from random import Random

Example = tuple[str, str]

WORDS = (
    "apple bird cat dog egg fish green hat ice jam key lamp moon nest old pear red sun tree up van wolf "
    "level noon kayak radar blue cup day fox"
).split()
PALINDROMES = "level noon kayak radar abba otto".split()
ITEMS = {  # loop variables that go with an argument
    "numbers": "n num number x",
    "nums": "n num x",
    "values": "v value x",
    "items": "item x it",
    "data": "d value x",
    "words": "w word s",
    "names": "name word s",
    "text": "c ch char letter",
    "s": "c ch char",
    "word": "c ch letter",
    "string": "c ch char",
    "d": "key k",
    "table": "key k",
    "mapping": "key k",
    "lists": "part row",
    "rows": "row part",
}
KINDS = {  # of arguments: names, nouns, type
    "list": ("numbers nums values items data", "a list/a list of numbers/a list of integers", "list[int]"),
    "words": ("words names items", "a list of words/a list of strings", "list[str]"),
    "text": ("text s word string", "a string/a text/a word", "str"),
    "phrase": ("text s", "a string/a text", "str"),
    "letter": ("letter wanted", "a letter", "str"),
    "int": ("n number num value", "a number/an integer", "int"),
    "target": ("target wanted goal", "a value/a number", "int"),
    "dict": ("d table mapping", "a dictionary/a dict", "dict"),
    "lists": ("lists rows", "a list of lists", "list[list[int]]"),
    "first": ("first a xs left", "two lists", "list[int]"),
    "second": ("second b ys right", "", "list[int]"),
    "one": ("a x m", "two numbers", "int"),
    "other": ("b y n", "", "int"),
    "base": ("base x", "a number", "int"),
    "exponent": ("exp n", "an exponent/n", "int"),
    "index": ("n", "n", "int"),
    "celsius": ("celsius c temp", "Celsius", "int"),
    "fahrenheit": ("fahrenheit temp", "Fahrenheit", "int"),
    "hours": ("hours h", "hours", "int"),
}
ACCUMULATORS = {
    "count": "count total c",
    "total": "total result acc",
    "result": "result out res",
    "ok": "ok result",
    "best": "best top current",
    "steps": "steps count",
    "counts": "counts freq",
    "groups": "groups result",
}


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to write a body: code lines (a comment after ' ## ') and the sentences that explain it."""

    body: str
    how: tuple[str, ...]
    short: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """A function to ask for: a block of `TABLE`."""

    names: list[str]
    kinds: list[str]
    case: Callable[[Random], tuple]
    value: Callable
    returns: str
    acc: list[str]
    empty: str | None
    does: list[str] = field(default_factory=list)
    styles: list[Style] = field(default_factory=list)


# ---------------------------------------------------------------- arguments of the tests


def ints(rng: Random, low: int = 0, high: int = 9, few: int = 2, many: int = 5) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(few, many))]


def two(rng: Random, *bounds: int) -> tuple[list[int], list[int]]:
    return ints(rng, *bounds), ints(rng, *bounds)


def search(rng: Random) -> tuple[list[int], int]:
    return ints(rng, 0, 9, 3), rng.randint(0, 9)


def letter(rng: Random) -> tuple[str, str]:
    return rng.choice(WORDS), rng.choice("aeiounlr")


def same_length(rng: Random) -> tuple[list[int], list[int]]:
    size = rng.randint(2, 3)
    return ints(rng, 1, 5, size, size), ints(rng, 1, 5, size, size)


def words(rng: Random, few: int = 2, many: int = 4) -> list[str]:
    return rng.choices(WORDS, k=rng.randint(few, many))


def dictionary(rng: Random) -> dict[str, int]:
    keys = rng.sample("abcdxy", rng.randint(2, 3))
    return dict(zip(keys, rng.sample(range(1, 10), len(keys)), strict=True))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def collatz(n: int) -> int:
    return 0 if n == 1 else 1 + collatz(n // 2 if n % 2 == 0 else 3 * n + 1)


def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def group(items: list[str], key: Callable) -> dict:
    return {key(item): [other for other in items if key(other) == key(item)] for item in items}


# ---------------------------------------------------------------- the tasks

PREDICATES = {"even": "{x} % 2 == 0", "odd": "{x} % 2 == 1", "positive": "{x} > 0", "negative": "{x} < 0"}
FOR_EACH_PREDICATE = """
count_KEY num_KEY KEY_count | list | ints(rng, -5, 9) | sum(TEST for x in a) | int | count | 0
  do count the KEY numbers in {a} / count how many numbers in {a} are KEY
  loop 0 | {acc} += 1 | adds 1 to `{acc}` | TEST
  expr sum(1 for {x} in {a} if TEST) | It adds 1 for each `{x}` in `{a}` where `TEST`.

sum_KEY add_KEY KEY_sum | list | ints(rng, -5, 9) | sum(x for x in a if TEST) | int | total | 0
  do add up the KEY numbers in {a} / return the sum of the KEY numbers in {a}
  loop 0 | {acc} += {x} | adds `{x}` to `{acc}` | TEST
  expr sum({x} for {x} in {a} if TEST) | It adds up each `{x}` in `{a}` where `TEST`.

keep_KEY filter_KEY only_KEY | list | ints(rng, -5, 9) | [x for x in a if TEST] | list[int] | result | []
  do keep only the KEY numbers in {a} / return the KEY numbers in {a}
  loop [] | {acc}.append({x}) | appends `{x}` to `{acc}` | TEST
  expr [{x} for {x} in {a} if TEST] | The list comprehension keeps each `{x}` where `TEST`.

all_KEY is_all_KEY every_KEY | list | ints(rng, -2, 9, 1, 3) | all(TEST for x in a) | bool | ok
  do check whether all numbers in {a} are KEY / check if every number in {a} is KEY
  expr all(TEST for {x} in {a}) | `all` checks `TEST` for every item of `{a}`.
  code The loop returns `False` if `TEST` is not true for some `{x}`. | If that never happens, it returns `True`.
    for {x} in {a}: ## look at each {x}
        if not TEST:
            return False
    return True ## nothing was wrong

any_KEY has_KEY some_KEY | list | ints(rng, -5, 9, 1, 3) | any(TEST for x in a) | bool | ok
  do check whether any number in {a} is KEY / check if {a} has some KEY number
  expr any(TEST for {x} in {a}) | `any` looks for an item of `{a}` where `TEST`.
  code The loop returns `True` if `TEST` for some `{x}`. | If that never happens, it returns `False`.
    for {x} in {a}: ## look at each {x}
        if TEST:
            return True
    return False ## nothing was found
"""
FOR_EACH_MAP = """
NAMES | KIND | CASE | [STEP for x in a] | TYPE | result | []
  do DOES in {a} / DOES of {a}
  loop [] | {acc}.append(STEP) | appends `STEP` to `{acc}`
  expr [STEP for {x} in {a}] | The list comprehension computes `STEP` for each `{x}` in `{a}`.
"""
MAPS = """
square_all squares square_list | list | square every number | {x} * {x} | list[int]
double_all doubled double_list | list | double each number | 2 * {x} | list[int]
add_one increment_all plus_one | list | add 1 to each number | {x} + 1 | list[int]
negate_all negate flip_signs | list | change the sign of each number | -{x} | list[int]
word_lengths lengths get_lengths | words | return the length of each word | len({x}) | list[int]
upper_all to_upper shout | words | uppercase every word | {x}.upper() | list[str]
first_letters initials heads | words | return the first letter of each word | {x}[0] | list[str]
"""
FOR_EACH_SCAN = """
NAMES | text | " ".join(words(rng, 2, 3)) | sum(TEST for x in a) | int | count | 0
  do DOES
  loop 0 | {acc} += 1 | adds 1 to `{acc}` | TEST
  expr sum(1 for {x} in {a} if TEST) | It goes through `{a}` and counts each `{x}` where `TEST`.
"""
FOR_EACH_STRIP = """
NAMES | text | " ".join(words(rng, 2, 3)) | "".join(x for x in a if TEST) | str | result | ""
  do DOES
  loop "" | {acc} += {x} | adds `{x}` to `{acc}` | TEST
  expr "".join({x} for {x} in {a} if TEST) | It goes through `{a}` and keeps each `{x}` where `TEST`.
"""
SCANS = """
count_vowels num_vowels vowels | count the vowels in {a} / count how many vowels are in {a} | {x} in "aeiou"
count_spaces num_spaces spaces | count the spaces in {a} / count how many spaces are in {a} | {x} == " "
"""
STRIPS = """
remove_spaces no_spaces strip_all | remove the spaces from {a} / delete all spaces in {a} | {x} != " "
remove_vowels no_vowels drop_vowels | remove the vowels from {a} / delete all vowels in {a} | {x} not in "aeiou"
"""
FOR_EACH_EXTREME = """
NAMES | list | ints(rng, 0, 9, 3) | BUILTIN(a) | int | best
  do find the SIZE number in {a} / return the BUILTINimum of {a}
  expr BUILTIN({a}) | It uses the built-in `BUILTIN` on `{a}`.
  expr sorted({a})[END] | It sorts `{a}` and takes the item at index END.
  code `{acc}` starts as the first item of `{a}`. | When some `{x} SIGN {acc}`, `{acc}` becomes `{x}`.
    {acc} = {a}[0] ## start with the first item
    for {x} in {a}:
        if {x} SIGN {acc}: ## a new BUILTINimum
            {acc} = {x}
    return {acc}
"""
EXTREMES = """
largest find_max maximum | largest | max | > | -1
smallest find_min minimum | smallest | min | < | 0
"""
TABLE = """
sum_list sum_all add_all | list | ints(rng) | sum(a) | int | total | 0
  do add up the numbers in {a} / return the sum of {a}
  loop 0 | {acc} += {x} | adds `{x}` to `{acc}`
  expr sum({a}) | It uses the built-in `sum` on `{a}`.

product multiply_all prod_list | list | ints(rng, 1, 5, 2, 4) | prod(a) | int | total | 1
  do multiply all numbers in {a} / return the product of {a}
  loop 1 | {acc} *= {x} | multiplies `{acc}` by `{x}`

index_of find_index position | list target | search(rng) | a.index(b) if b in a else -1 | int | result
  do find the first index of {b} in {a} / return the position of {b} in {a}, or -1
  code `enumerate` gives the index `{i}` and the item `{x}`. | It returns `{i}` when `{x}` equals `{b}`, or -1.
    for {i}, {x} in enumerate({a}): ## keep track of the index
        if {x} == {b}:
            return {i} ## found it
    return -1 ## not found
  code! If `{b}` is in `{a}`, `{a}.index({b})` gives the position. | If not, it returns -1.
    if {b} in {a}: ## is it there?
        return {a}.index({b})
    return -1

contains has_value is_in | list target | search(rng) | b in a | bool | ok
  do check whether {a} contains {b} / check if {b} is in {a}
  expr {b} in {a} | The operator `in` looks for `{b}` in `{a}`.
  code It returns `True` when some `{x}` equals `{b}`. | If none is equal, it returns `False`.
    for {x} in {a}:
        if {x} == {b}:
            return True ## found it
    return False ## not found

average mean get_mean | list | ints(rng) | sum(a) / len(a) | float | total | 0
  do compute the average of {a} / return the mean of {a}
  code! It divides the sum of `{a}` by its length.
    return sum({a}) / len({a}) ## divide by the length
  code It adds each `{x}` to `{acc}`. | Then it divides `{acc}` by `len({a})`.
    {acc} = 0 ## sum of the items
    for {x} in {a}:
        {acc} += {x}
    return {acc} / len({a})

unique remove_duplicates dedupe | list | ints(rng, 0, 3, 3, 6) | list(dict.fromkeys(a)) | list[int] | result | []
  do remove the duplicates from {a} / return the different items of {a} in order
  loop [] | {acc}.append({x}) | appends `{x}` to `{acc}` | {x} not in {acc}
  expr list(dict.fromkeys({a})) | The keys of a dictionary are different and keep their order.

running_sum cumulative partial_sums | list | ints(rng) | list(accumulate(a)) | list[int] | result | []
  do return the running sums of {a} / compute the cumulative sum of {a}
  code `{y}` is the sum so far. | Each `{x}` is added to `{y}`, and `{y}` is appended to `{acc}`.
    {acc} = []
    {y} = 0 ## sum so far
    for {x} in {a}:
        {y} += {x}
        {acc}.append({y})
    return {acc}

flatten join_lists flat | lists | [ints(rng, 0, 9, 1, 3) for _ in range(2)] | sum(a, []) | list[int] | result | []
  do flatten {a} / join the lists in {a} into one list
  loop [] | {acc}.extend({x}) | adds the items of `{x}` to `{acc}`
  expr [{y} for {x} in {a} for {y} in {x}] | The comprehension takes each `{y}` of each `{x}` in `{a}`.

reverse_string reverse backwards | text | rng.choice(WORDS) | a[::-1] | str | result | ""
  do reverse {a} / return {a} backwards
  loop "" | {acc} = {x} + {acc} | puts `{x}` in front of `{acc}`
  expr {a}[::-1] | The slice `[::-1]` walks through `{a}` from the end to the start.

is_palindrome palindrome same_backwards | text | rng.choice(rng.choice((WORDS, PALINDROMES))) | a == a[::-1] | bool | ok
  do check whether {a} is a palindrome / check if {a} reads the same backwards
  expr {a} == {a}[::-1] | It compares `{a}` with its reverse `{a}[::-1]`.
  code The index `{i}` runs over the first half of `{a}`. | If two letters at the ends differ, it returns `False`.
    for {i} in range(len({a}) // 2): ## compare both ends
        if {a}[{i}] != {a}[-1 - {i}]:
            return False
    return True

capitalize_words title_case capitalize_all | phrase | " ".join(words(rng, 2, 3)) | a.title() | str | result
  do capitalize each word in {a} / start every word of {a} with a capital letter
  expr " ".join({y}.capitalize() for {y} in {a}.split()) | It capitalizes each `{y}` and joins them again.
  code Each `{y}` of `{a}.split()` is capitalized. | The words in `{acc}` are joined with spaces.
    {acc} = []
    for {y} in {a}.split(): ## one word at a time
        {acc}.append({y}.capitalize())
    return " ".join({acc})

longest_word find_longest longest | words | words(rng) | max(a, key=len) | str | best | ""
  do find the longest word in {a} / return the longest word of {a}
  expr max({a}, key=len) | `max` with `key=len` compares the words by their length.
  code `{acc}` starts as `""`. | When `{x}` is longer than `{acc}`, `{acc}` becomes `{x}`.
    {acc} = ""
    for {x} in {a}:
        if len({x}) > len({acc}): ## a longer word
            {acc} = {x}
    return {acc}

count_letter count_char letter_count | phrase letter | letter(rng) | a.count(b) | int | count
  do count how often {b} appears in {a} / count the times {b} is in {a}
  loop 0 | {acc} += 1 | adds 1 to `{acc}` | {x} == {b}
  expr {a}.count({b}) | The method `count` counts `{b}` in `{a}`.

factorial fact compute_factorial | int | rng.randint(1, 6) | prod(range(1, a + 1)) | int | total
  do compute the factorial of {a} / return the factorial of {a}
  upto 1 | {acc} *= {x} | multiplies `{acc}` by `{x}`
  code! The base case returns 1 when `{a} <= 1`. | Otherwise `{f}` calls itself with `{a} - 1` and multiplies by `{a}`.
    if {a} <= 1: ## the base case
        return 1
    return {a} * {f}({a} - 1)

sum_to sum_up_to add_to | int | rng.randint(2, 10) | sum(range(a + 1)) | int | total
  do add the numbers from 1 to {a} / return the sum of the numbers from 1 to {a}
  upto 0 | {acc} += {x} | adds `{x}` to `{acc}`
  expr {a} * ({a} + 1) // 2 | It uses the formula `{a} * ({a} + 1) // 2`, so no loop is needed.

is_prime prime check_prime | int | rng.randint(2, 30) | len(divisors(a)) == 2 | bool | ok
  do check whether {a} is prime / check if {a} is a prime number
  expr {a} > 1 and all({a} % {x} != 0 for {x} in range(2, {a})) | No `{x}` below `{a}` may divide it.
  code Numbers below 2 are not prime. | If some `{x}` divides `{a}`, it returns `False`. | If none does, `{a}` is prime.
    if {a} < 2: ## too small
        return False
    for {x} in range(2, {a}):
        if {a} % {x} == 0: ## a divisor
            return False
    return True

is_even even check_even | int | rng.randint(0, 20) | a % 2 == 0 | bool | ok
  do check whether {a} is even / check if {a} is an even number
  expr {a} % 2 == 0 | An even number has no rest when divided by 2, so `{a} % 2` is 0.

digit_sum sum_digits add_digits | int | rng.randint(10, 999) | sum(map(int, str(a))) | int | total
  do add the digits of {a} / return the sum of the digits of {a}
  expr sum(int({x}) for {x} in str({a})) | `str({a})` gives the digits, and each `{x}` becomes an int again.
  code `{a} % 10` is the last digit, which is added to `{acc}`. | `{a} //= 10` drops that digit.
    {acc} = 0
    while {a} > 0:
        {acc} += {a} % 10 ## the last digit
        {a} //= 10 ## drop it
    return {acc}

fibonacci fib get_fib | index | rng.randint(1, 10) | fibonacci(a) | int | result
  do compute the {a}-th Fibonacci number / return Fibonacci number {a}
  code `{acc}` and `{y}` are two neighbours in the sequence. | Each step moves both on by one, `{a}` times.
    {acc}, {y} = 0, 1 ## the first two numbers
    for _ in range({a}):
        {acc}, {y} = {y}, {acc} + {y}
    return {acc}
  code! The base case returns `{a}` when `{a} < 2`. | Otherwise `{f}` adds the two numbers before.
    if {a} < 2: ## the base case
        return {a}
    return {f}({a} - 1) + {f}({a} - 2)

power pow_int raise_to | base exponent | rng.randint(2, 5), rng.randint(0, 4) | a ** b | int | total
  do raise {a} to the power {b} / compute {a} to the power of {b}
  expr {a} ** {b} | The operator `**` raises `{a}` to the power `{b}`.
  code `{acc}` starts as `1`. | It is multiplied by `{a}`, `{b}` times.
    {acc} = 1 ## start with 1
    for _ in range({b}):
        {acc} *= {a}
    return {acc}

gcd greatest_divisor common_divisor | one other | rng.randint(2, 30), rng.randint(2, 30) | gcd(a, b) | int | result
  do find the greatest common divisor of {a} and {b} / compute the gcd of {a} and {b}
  code While `{b}` is not 0, `{a}` becomes `{b}` and `{b}` becomes `{a} % {b}`. | At the end `{a}` is the answer.
    while {b}: ## until the rest is 0
        {a}, {b} = {b}, {a} % {b}
    return {a}
  code! When `{b}` is 0, the answer is `{a}`. | Otherwise `{f}` calls itself with `{b}` and `{a} % {b}`.
    if {b} == 0: ## the base case
        return {a}
    return {f}({b}, {a} % {b})

divisors find_divisors factors | int | rng.randint(2, 20) | divisors(a) | list[int] | result
  do list the divisors of {a} / return all divisors of {a}
  upto [] | {acc}.append({x}) | appends `{x}` to `{acc}` | {a} % {x} == 0
  expr [{x} for {x} in range(1, {a} + 1) if {a} % {x} == 0] | It keeps each `{x}` from 1 to `{a}` that divides `{a}`.

collatz_steps collatz count_steps | int | rng.randint(1, 12) | collatz(a) | int | steps
  do count the Collatz steps from {a} to 1 / count how many Collatz steps {a} needs
  code While `{a}` is not 1, it is halved if even, and becomes `3 * {a} + 1` if odd. | `{acc}` counts the steps.
    {acc} = 0
    while {a} != 1:
        if {a} % 2 == 0: ## an even number
            {a} //= 2
        else:
            {a} = 3 * {a} + 1
        {acc} += 1
    return {acc}

countdown count_down down_from | int | rng.randint(2, 6) | list(range(a, 0, -1)) | list[int] | result
  do count down from {a} to 1 / return a list from {a} down to 1
  expr list(range({a}, 0, -1)) | `range({a}, 0, -1)` counts from `{a}` down to 1.
  code While `{a}` is above 0, it is appended to `{acc}`. | Then `{a}` gets one smaller.
    {acc} = []
    while {a} > 0:
        {acc}.append({a})
        {a} -= 1 ## one less
    return {acc}

to_fahrenheit celsius_to_fahrenheit c_to_f | celsius | 5 * rng.randint(0, 8) | a * 9 / 5 + 32 | float | result
  do convert {a} to Fahrenheit / change {a} to Fahrenheit
  expr {a} * 9 / 5 + 32 | It multiplies `{a}` by 9 / 5 and adds 32.

to_celsius fahrenheit_to_celsius f_to_c | fahrenheit | 32 + 9 * rng.randint(0, 8) | (a - 32) * 5 / 9 | float | result
  do convert {a} to Celsius / change {a} to Celsius
  expr ({a} - 32) * 5 / 9 | It subtracts 32 from `{a}` and multiplies by 5 / 9.

to_minutes hours_to_minutes get_minutes | hours | rng.randint(1, 9) | a * 60 | int | result
  do convert {a} to minutes / change {a} to minutes
  expr {a} * 60 | One hour has 60 minutes, so it multiplies `{a}` by 60.

count_words word_counts frequencies | words | words(rng) | {w: a.count(w) for w in a} | dict | counts | {{}}
  do count each word in {a} / count how often each word is in {a}
  code `{acc}` starts as an empty dictionary. | For each `{x}` it adds 1 to `{acc}[{x}]`, where a new word starts at 0.
    {acc} = {{}} ## an empty dictionary
    for {x} in {a}:
        {acc}[{x}] = {acc}.get({x}, 0) + 1
    return {acc}
  expr {{{x}: {a}.count({x}) for {x} in {a}}} | It maps each `{x}` to `{a}.count({x})`.

group_by_letter by_first_letter group_words | words | words(rng) | group(a, lambda s: s[0]) | dict | groups | {{}}
  do group {a} by the first letter / group {a} by first letter
  code For each `{x}` it appends `{x}` to the list of its first letter, `{x}[0]`. | At the end it returns `{acc}`.
    {acc} = {{}} ## an empty dictionary
    for {x} in {a}:
        {acc}.setdefault({x}[0], []).append({x})
    return {acc}

group_by_length by_length group_words | words | words(rng) | group(a, len) | dict | groups | {{}}
  do group {a} by length / group {a} by their length
  code For each `{x}` it appends `{x}` to the list of its length, `len({x})`. | At the end it returns `{acc}`.
    {acc} = {{}} ## an empty dictionary
    for {x} in {a}:
        {acc}.setdefault(len({x}), []).append({x})
    return {acc}

invert_dict invert swap_dict | dict | dictionary(rng) | {v: k for k, v in a.items()} | dict | result
  do swap the keys and values of {a} / invert {a}
  expr {{{y}: {x} for {x}, {y} in {a}.items()}} | Each pair `{x}, {y}` of `{a}` is turned around.
  code The loop takes each pair `{x}, {y}` of `{a}`. | It sets `{acc}[{y}]` to `{x}`.
    {acc} = {{}}
    for {x}, {y} in {a}.items(): ## key and value
        {acc}[{y}] = {x}
    return {acc}

sum_values total_value add_values | dict | dictionary(rng) | sum(a.values()) | int | total
  do add up the values of {a} / return the sum of the values in {a}
  expr sum({a}.values()) | `{a}.values()` gives the values, and `sum` adds them.
  code For each `{x}` it adds `{a}[{x}]` to `{acc}`.
    {acc} = 0
    for {x} in {a}: ## each key
        {acc} += {a}[{x}]
    return {acc}

add_lists add_pairs pair_sums | first second | same_length(rng) | [x + y for x, y in zip(a, b)] | list[int] | result
  do add {a} and {b} item by item / return the sums of {a} and {b} item by item
  expr [{x} + {y} for {x}, {y} in zip({a}, {b})] | `zip` pairs `{a}` with `{b}`, and each pair is added.
  code `zip` gives one `{x}` of `{a}` and one `{y}` of `{b}` at a time. | It appends `{x} + {y}` to `{acc}`.
    {acc} = []
    for {x}, {y} in zip({a}, {b}): ## one pair at a time
        {acc}.append({x} + {y})
    return {acc}

dot dot_product inner_product | first second | same_length(rng) | sum(x * y for x, y in zip(a, b)) | int | total
  do compute the dot product of {a} and {b} / return the dot product of {a} and {b}
  expr sum({x} * {y} for {x}, {y} in zip({a}, {b})) | It adds `{x} * {y}` over the pairs of `{a}` and `{b}`.
  code For each pair it adds `{x} * {y}` to `{acc}`.
    {acc} = 0
    for {x}, {y} in zip({a}, {b}):
        {acc} += {x} * {y} ## add the product
    return {acc}

common common_items intersection | first second | two(rng, 0, 6, 3, 4) | [x for x in a if x in b] | list[int] | result
  do find the common items of {a} and {b} / return the items that are in both of {a} and {b}
  loop [] | {acc}.append({x}) | appends `{x}` to `{acc}` | {x} in {b}
  expr [{x} for {x} in {a} if {x} in {b}] | It keeps each `{x}` of `{a}` that is also in `{b}`.

merge_sorted merge join_sorted | first second | two(rng, 0, 9, 2, 3) | sorted(a + b) | list[int] | result
  do merge {a} and {b} into one sorted list / join {a} and {b} into a sorted list
  expr sorted({a} + {b}) | `{a} + {b}` joins the lists, and `sorted` puts the items in order.
  code `{acc}` is `{a}` followed by `{b}`. | Then `{acc}.sort()` puts it in order.
    {acc} = {a} + {b} ## join them
    {acc}.sort()
    return {acc}
"""


def _loop(start: str, step: str, say: str, condition: str = "", over: str = "{a}") -> list[Style]:
    """A for loop that fills {acc}, over the items and (for a list) over the indices."""
    inner = f"    if {condition}: ## check {{x}}\n        {step}" if condition else f"    {step} ## update {{acc}}"
    tell = (
        f"`{{acc}}` starts as `{start}`.",
        f"For each `{{x}}` it {say}" + (f" when `{condition}`." if condition else "."),
        "At the end it returns `{acc}`.",
    )
    heads = {f"for {{x}} in {over}: ## go through {{a}}": f"It goes through `{over}` one `{{x}}` at a time."}
    if over == "{a}":
        heads["for {i} in range(len({a})): ## {i} is an index\n    {x} = {a}[{i}]"] = (
            "The index `{i}` runs over `{a}`, and `{x}` is the item there."
        )
    styles = [
        Style(body=f"{{acc}} = {start} ## start with {start}\n{head}\n{inner}\nreturn {{acc}}", how=(first, *tell))
        for head, first in heads.items()
    ]
    return styles[:1] + styles  # loops over indices are rarer


def _expression(code: str, *how: str) -> list[Style]:
    """The expression returned at once, or named {acc} first."""
    named = f"{{acc}} = {code} ## compute {{acc}}\nreturn {{acc}}"
    return [
        Style(body=f"return {code}", how=how, short=True),
        Style(body=named, how=(*how, "The result is kept in `{acc}` and returned."), short=True),
    ]


def _parse(block: str) -> Task:
    """The task that a block of the table describes."""
    head, *lines = block.strip("\n").split("\n")
    names, kinds, case, value, returns, acc, *empty = head.split(" | ")
    known = dict(globals())  # the helpers above, gcd, prod, ...
    draw = eval(f"lambda rng: ({case})", known)  # our own table
    task = Task(
        names=names.split(),
        kinds=kinds.split(),
        returns=returns,
        acc=ACCUMULATORS[acc].split(),
        empty=empty[0] if empty else None,
        case=draw if len(kinds.split()) > 1 else lambda rng: (draw(rng),),
        value=eval(f"lambda a, b=None: ({value})", known),
    )
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if line.startswith("    "):
            last = task.styles.pop()
            task.styles.append(Style(body=f"{last.body}\n{line[4:]}".strip("\n"), how=last.how, short=last.short))
        elif word == "do":
            task.does.extend(rest.split(" / "))
        elif word in ("loop", "upto"):
            task.styles.extend(_loop(*rest.split(" | "), over="{a}" if word == "loop" else "range(1, {a} + 1)"))
        elif word == "expr":
            task.styles.extend(_expression(*rest.split(" | ")))
        else:
            task.styles.append(Style(body="", how=tuple(rest.split(" | ")), short=word == "code!"))
    return task


def _fill(pattern: str, **words_: str) -> str:
    """The pattern with its capital words replaced; the value on the first line speaks of x, not {x}."""
    for word, text in words_.items():
        pattern = pattern.replace(word, text)
    head, _, rest = pattern.strip("\n").partition("\n")
    return f"{head.replace('{x}', 'x')}\n{rest}"


def _tasks() -> dict[str, Task]:
    """All tasks by their first name."""

    def rows(text: str) -> list[list[str]]:
        return [line.split(" | ") for line in text.strip().split("\n")]

    blocks = [
        _fill(block, KEY=key, TEST=test)
        for key, test in PREDICATES.items()
        for block in FOR_EACH_PREDICATE.split("\n\n")
    ]
    blocks += [
        _fill(
            FOR_EACH_MAP,
            NAMES=names,
            KIND=kind,
            DOES=does,
            STEP=step,
            TYPE=returns,
            CASE="words(rng)" if kind == "words" else "ints(rng)",
        )
        for names, kind, does, step, returns in rows(MAPS)
    ]
    for pattern, table in ((FOR_EACH_SCAN, SCANS), (FOR_EACH_STRIP, STRIPS)):
        blocks += [_fill(pattern, NAMES=names, DOES=does, TEST=test) for names, does, test in rows(table)]
    blocks += [
        _fill(FOR_EACH_EXTREME, NAMES=names, SIZE=size, BUILTIN=builtin, SIGN=sign, END=end)
        for names, size, builtin, sign, end in rows(EXTREMES)
    ]
    tasks = [_parse(block) for block in blocks + TABLE.split("\n\n")]
    return {task.names[0]: task for task in tasks}


# ---------------------------------------------------------------- from a task to a message and an answer

ASK = """
Write a Python function that {does3}.
Write a Python function to {does}.
Write a function that {does3} in Python.
How do I {does} in Python?
Can you write a Python function that {does3}?
I need a Python function that {does3}.
python function to {does}
Give me Python code to {does}.
""".strip().split("\n")
ASK_NAMED = """
Write a Python function `{f}` that {does3}.
Write a function called `{f}` that {does3}.
Please implement `{f}`, which {does3}.
Can you write `{f}`, a Python function that {does3}?
Write `{f}({names})` in Python: it {does3}.
Complete this function, which {does3}: `def {f}({names}):`
""".strip().split("\n")
WISHES = {
    "doc": "Add a docstring./Include a docstring.",
    "test": "Add a test./Add some asserts./Include tests.",
    "explain": "Explain it./Explain how it works.",
    "comment": "Add comments./Comment the code.",
    "bare": "Just the code./Only code, please.",
    "hint": "Use type hints.",
    "short": "Keep it short./Make it a short one.",
}
INTRO = """
Here is a function that {does3}:
Here is `{f}`:
Sure! Here is `{f}`:
This function {does3}:
You can do it like this:
Here is one way to {does}:
Sure! `{f}` {does3}:
The function `{f}` {does3}:
""".strip().split("\n")
RESULTS = """
For example, `{call}` returns `{want}`.
So `{call}` gives `{want}`.
With these values, `{call}` is `{want}`.
""".strip().split("\n")
CLOSE = """
Let me know if you want tests for `{f}`.
You can call `{f}` with your own values.
I hope this helps!
""".strip().split("\n")


def _third(phrase: str) -> str:
    """The phrase with its first verb in the third person: "add up" -> "adds up"."""
    verb, space, rest = phrase.partition(" ")
    if verb.endswith(("ch", "sh", "s", "x")):
        verb += "es"
    elif verb.endswith("y"):
        verb = verb[:-1] + "ies"
    else:
        verb += "s"
    return verb + space + rest


def _pick(rng: Random, bank: Sequence[str], taken: set[str]) -> str:
    """A name of the bank that nobody uses yet."""
    free = [name for name in bank if name not in taken]
    name = rng.choice(free)
    taken.add(name)
    return name


def _wishes(rng: Random, kinds: list[str]) -> tuple[set[str], str]:
    """What the user asks for besides the code: the kinds, and the words for them."""
    wishes = rng.sample(kinds, rng.choice((0, 0, 1, 1, 2)))
    if "bare" in wishes:
        wishes = ["bare"]
    return set(wishes), "".join(" " + rng.choice(WISHES[wish].split("/")) for wish in wishes)


def _quote(value: object) -> str:
    """Python source of a value, strings in double quotes."""
    return repr(value).replace("'", '"')


def _check(call: str, want: object) -> str:
    """The assert for what a call returns."""
    if isinstance(want, bool):
        return f"assert {call}" if want else f"assert not {call}"
    return f"assert {call} == {_quote(want)}"


def _dress(body: str, comments: bool) -> list[str]:
    """The lines of a body, with the comments after ' ## ' kept on a line of their own or dropped."""
    lines = []
    for line in body.split("\n"):
        code, _, comment = line.partition(" ## ")
        if comment and comments:
            lines.append(f"{' ' * (len(code) - len(code.lstrip()))}# {comment[0].upper()}{comment[1:]}.")
        lines.append(code)
    return lines


def _explain(rng: Random, how: list[str]) -> str:
    """The sentences in a row, or as a list."""
    if len(how) > 1 and rng.random() < 0.2:
        return rng.choice(("How it works:", "Step by step:")) + "\n\n" + "\n".join(f"- {line}" for line in how)
    return " ".join(how)


def _reply(rng: Random, wishes: set[str], intro: str, code: list[str], how: list[str]) -> str:
    """A fence alone, or between an opening sentence and an explanation."""
    fence = _fence(code)
    if "bare" in wishes or (not wishes and rng.random() < 0.15):
        return fence
    parts = [intro, fence] if rng.random() < 0.85 else [fence]
    if "explain" in wishes or rng.random() < 0.5:
        parts.append(_explain(rng, how))
    return "\n\n".join(parts)


def _fields(task: Task, rng: Random) -> dict[str, str]:
    """A different name for each placeholder."""
    taken: set[str] = set()
    fields = {"f": _pick(rng, task.names, taken)}
    for letter, kind in zip("ab", task.kinds, strict=False):
        fields[letter] = _pick(rng, KINDS[kind][0].split(), taken)
    fields["x"] = _pick(rng, ITEMS.get(fields["a"], "i k d x").split(), taken)
    fields["acc"] = _pick(rng, task.acc, taken)
    fields["y"] = _pick(rng, ("v", "w", "y", "other"), taken)
    fields["i"] = _pick(rng, ("i", "j", "k"), taken)
    return fields


def _asked(does: str, kinds: list[str], rng: Random) -> str:
    """The phrase with nouns for the arguments: "count the even numbers in a list"."""
    words_ = does.format(**{letter: rng.choice(KINDS[kind][1].split("/")) for letter, kind in zip("ab", kinds, strict=False)})
    return words_.replace("two lists and ", "two lists").replace("two numbers and ", "two numbers")


def _tests(rng: Random, name: str, calls: list[str], results: list) -> list[str]:
    """Asserts, a test function around them, or a print with the output as a comment."""
    checks = [_check(call, result) for call, result in zip(calls, results, strict=True)]
    shape = rng.random()
    if shape < 0.6:
        return checks
    if shape < 0.8:
        return [f"def test_{name}():", *("    " + check for check in checks)]
    return [f"print({calls[0]})  # {results[0]!r}", *checks[1:]]


def _compose(task: Task, rng: Random) -> Example:
    """One (user message, answer) about a task."""
    wishes, extra = _wishes(rng, list(WISHES))

    def want(kind: str, chance: float) -> bool:
        return kind in wishes or ("bare" not in wishes and rng.random() < chance)

    styles = [way for way in task.styles if way.short] if "short" in wishes else []
    way = rng.choice(styles or task.styles)
    fields = _fields(task, rng)
    does = rng.choice(task.does)
    asked = _asked(does, task.kinds, rng)
    told = (
        asked
        if rng.random() < 0.6
        else does.format(**{letter: f"`{fields[letter]}`" for letter in "ab"[: len(task.kinds)]})
    )

    names = [fields[letter] for letter in "ab"[: len(task.kinds)]]
    ask = rng.choice(ASK_NAMED if rng.random() < 0.45 else ASK)
    user = ask.format(does=asked, does3=_third(asked), f=fields["f"], names=", ".join(names))
    user += "." * ((user[-1] not in ".?`") and extra != "") + extra
    cases = [task.case(rng) for _ in range(rng.randint(1, 3))]
    results = [task.value(*case) for case in cases]
    calls = [f"{fields['f']}({', '.join(map(_quote, case))})" for case in cases]
    fields |= {"call": calls[0], "want": _quote(results[0]), "does": told, "does3": _third(told)}

    if want("hint", 0.25):
        typed = ", ".join(f"{name}: {KINDS[kind][2]}" for name, kind in zip(names, task.kinds, strict=True))
        code = [f"def {fields['f']}({typed}) -> {task.returns}:"]
    else:
        code = [f"def {fields['f']}({', '.join(names)}):"]
    if want("doc", 0.35):
        line = does.format(a=names[0], b=names[-1]) if rng.random() < 0.6 else asked
        example = ["", f"    >>> {calls[0]}", f"    {results[0]!r}", '    """'] if rng.random() < 0.25 else []
        code += [f'    """{line[0].upper()}{line[1:]}.' + ("" if example else '"""'), *example]
    how = [sentence_.format(**fields) for sentence_ in way.how]
    if task.empty and not way.short and rng.random() < 0.3:
        code += [f"    if not {names[0]}:", f"        return {task.empty}".format()]
        how.insert(0, f"An empty `{names[0]}` gives `{task.empty.format()}` at once.")
    body = _dress(way.body.format(**fields), commented := want("comment", 0.25))
    if commented and not any(line.lstrip().startswith("#") for line in body):
        body.insert(0, "# " + rng.choice(how).replace("`", ""))
    code += ["    " + line for line in body]
    if want("test", 0.4):
        code += ["", "", *_tests(rng, fields["f"], calls, results)]
    if rng.random() < 0.6:
        how.append(rng.choice(RESULTS).format(**fields))
    if rng.random() < 0.15:
        how.append(rng.choice(CLOSE).format(**fields))
    return user, _reply(rng, wishes, rng.choice(INTRO).format(**fields), code, how)


# ---------------------------------------------------------------- small classes


THINGS: str = """
Counter Clicker Tally | a counter that can go up and start again/counting up | count total n | c counter tally | 0
  increment up add_one | | self.{v} += 1 | `{m}` adds 1 to `self.{v}`. | s + 1, None
  reset clear restart | | self.{v} = 0 | `{m}` sets `self.{v}` back to 0. | 0, None
  get value read | | return self.{v} | `{m}` returns `self.{v}`. | s, s

Stack Pile ItemStack | a stack/a stack with the last item on top | items data stack | s stack pile | []
  push add put | item value x | self.{v}.append({p}) | `{m}` appends `{p}` to `self.{v}`. | [*s, p], None
  pop take remove | | return self.{v}.pop() | `{m}` takes the last item of `self.{v}`. | s[:-1], s[-1]
  size count length | | return len(self.{v}) | `{m}` returns how many items there are. | s, len(s)

Queue Line WaitingLine | a queue/a queue where the first item leaves first | items data queue | q queue line | []
  push add put | item value x | self.{v}.append({p}) | `{m}` appends `{p}` to `self.{v}`. | [*s, p], None
  pop take dequeue | | return self.{v}.pop(0) | `{m}` takes the first item of `self.{v}`. | s[1:], s[0]
  size count length | | return len(self.{v}) | `{m}` returns how many items there are. | s, len(s)

Account BankAccount Wallet | a bank account/a wallet with money | balance total cash | acc account mine | 0
  deposit add put_in | amount n money | self.{v} += {p} | `{m}` adds `{p}` to `self.{v}`. | s + p, None
  withdraw take spend | amount n money | self.{v} -= {p} | `{m}` takes `{p}` from `self.{v}`. | s - p, None
  get value read | | return self.{v} | `{m}` returns `self.{v}`. | s, s

Cart Basket ShoppingCart | a shopping cart/a cart that adds up prices | prices costs items | cart basket c | []
  add add_item put | price cost | self.{v}.append({p}) | `{m}` appends `{p}` to `self.{v}`. | [*s, p], None
  total get_total sum_up | | return sum(self.{v}) | `{m}` adds up `self.{v}`. | s, sum(s)

Light Lamp Switch | a light that can be switched/a lamp with a switch | on is_on state | lamp light x | False
  toggle switch press | | self.{v} = not self.{v} | `{m}` turns `self.{v}` around. | not s, None
  get check read | | return self.{v} | `{m}` returns `self.{v}`. | s, s
"""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of a small class: `act(state, argument)` gives the new state and the returned value (None: nothing)."""

    names: list[str]
    arg: list[str]
    body: str
    say: str
    act: Callable


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A class with one attribute {v}: the methods that change it, then the one that only looks."""

    names: list[str]
    does: list[str]
    attrs: list[str]
    variables: list[str]
    start: object
    methods: list[Method]


def _things() -> dict[str, Thing]:
    """The blocks of `THINGS`."""
    things = {}
    for block in THINGS.strip().split("\n\n"):
        head, *lines = block.split("\n")
        names, does, attrs, variables, start = head.split(" | ")
        methods = []
        for line in lines:
            labels, arg, body, say, act = (cell.strip() for cell in line.replace("| |", "|  |").split(" | "))
            change = eval(f"lambda s, p: ({act})")  # our own table
            methods.append(Method(names=labels.split(), arg=arg.split(), body=body, say=say, act=change))
        things[f"{names.split()[0].lower()}_class"] = Thing(
            names=names.split(),
            does=does.split("/"),
            attrs=attrs.split(),
            variables=variables.split(),
            methods=methods,
            start={"0": 0, "[]": [], "False": False}[start],
        )
    return things


ASK_CLASS = """
Write a Python class `{c}` for {does}.
Write a Python class for {does}.
Can you write a class called `{c}` for {does}?
I need a small Python class for {does}.
How do I write a class for {does} in Python?
""".strip().split("\n")
INTRO_CLASS = """
Here is a class `{c}`:
Sure! Here is `{c}`:
The class `{c}` keeps its state in `self.{v}`:
You can use this class for {does}:
""".strip().split("\n")


def _compose_class(thing: Thing, rng: Random) -> Example:
    """One (user message, answer) about a small class."""
    wishes, extra = _wishes(rng, ["test", "explain", "bare", "doc"])
    taken: set[str] = set()
    name = rng.choice(thing.names)
    attr, variable = _pick(rng, thing.attrs, taken), rng.choice(thing.variables)
    fields = {"c": name, "does": rng.choice(thing.does), "v": attr}
    code = [f"class {name}:"]
    if "doc" in wishes or ("bare" not in wishes and rng.random() < 0.3):
        code += [f'    """{fields["does"][0].upper()}{fields["does"][1:]}."""', ""]
    code += ["    def __init__(self):", f"        self.{attr} = {thing.start!r}"]
    how, named = [f"`{name}` keeps its state in `self.{attr}`, which starts as `{thing.start!r}`."], []
    for method in thing.methods:
        label, arg = _pick(rng, method.names, taken), _pick(rng, method.arg, taken) if method.arg else ""
        taken.discard(arg)
        fill = {"v": attr, "m": label, "p": arg}
        code += ["", f"    def {label}(self{', ' + arg if arg else ''}):", "        " + method.body.format(**fill)]
        how.append(method.say.format(**fill))
        named.append((label, method))
    if "test" in wishes or ("bare" not in wishes and rng.random() < 0.5):
        code += ["", "", f"{variable} = {name}()", *_script(rng, variable, named, thing.start)]
    user = rng.choice(ASK_CLASS).format(**fields) + extra
    return user, _reply(rng, wishes, rng.choice(INTRO_CLASS).format(**fields), code, how)


def _script(rng: Random, variable: str, named: list[tuple[str, Method]], state: object) -> list[str]:
    """Calls on an object with an assert for each value that comes back; the last method comes last."""
    order = [named[0], *rng.choices(named[:-1], (4, 1)[: len(named) - 1], k=rng.randint(1, 3)), named[-1]]
    lines = []
    for label, method in order:
        if isinstance(state, list) and not state and method is not named[0][1] and method is not named[-1][1]:
            continue
        value = rng.randint(1, 9) * (10 if "money" in method.arg else 1)
        call = f"{variable}.{label}({value if method.arg else ''})"
        state, back = method.act(state, value)
        lines.append(call if back is None else _check(call, back))
    return lines


# ---------------------------------------------------------------- reading code


def _function(way: Style, task: Task, fields: dict[str, str]) -> list[str]:
    """The bare function: no hints, docstring or comments."""
    names = ", ".join(fields[letter] for letter in "ab"[: len(task.kinds)])
    return [
        f"def {fields['f']}({names}):",
        *("    " + line for line in _dress(way.body.format(**fields), comments=False)),
    ]


def _fence(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _given(rng: Random) -> tuple[Task, Style, dict[str, str], list[str]]:
    """Some task, with code that the user shows."""
    task = rng.choice(list(TASKS.values()))
    way, fields = rng.choice(task.styles), _fields(task, rng)
    return task, way, fields, _function(way, task, fields)


def _explain_code(rng: Random) -> Example:
    """What does this function do? What it does, how, and one call."""
    task, way, fields, code = _given(rng)
    names = {letter: f"`{fields[letter]}`" for letter in "ab"[: len(task.kinds)]}
    case = task.case(rng)
    call = f"{fields['f']}({', '.join(map(_quote, case))})"
    ask = rng.choice(("What does this function do?", "Explain this function.", "Can you explain this code?"))
    first = rng.choice(("`{f}` {does3}.", "The function `{f}` {does3}.", "This function {does3}.")).format(
        f=fields["f"], does3=_third(rng.choice(task.does).format(**names))
    )
    how = [line.format(**fields) for line in way.how]
    last = rng.choice(RESULTS).format(call=call, want=_quote(task.value(*case)))
    return f"{ask}\n\n{_fence(code)}", f"{first} {_explain(rng, how)}\n\n{last}"


def _test_code(rng: Random) -> Example:
    """The function again, with asserts."""
    task, _, fields, code = _given(rng)
    cases = [task.case(rng) for _ in range(rng.randint(2, 4))]
    checks = [_check(f"{fields['f']}({', '.join(map(_quote, case))})", task.value(*case)) for case in cases]
    ask = rng.choice(("Write tests for this function.", "Add some asserts to this code.", "Please test this function."))
    intro = rng.choice(
        ("Here is `{f}` with tests:", "Here are {n} asserts for `{f}`:", "Sure! These asserts check `{f}`:")
    )
    return f"{ask}\n\n{_fence(code)}", intro.format(f=fields["f"], n=len(cases)) + "\n\n" + _fence(
        [*code, "", "", *checks]
    )


def _rewrite_code(rng: Random) -> Example:
    """The same function written in another way, or with another name for the argument."""
    task, way, fields, code = _given(rng)
    others = [other for other in task.styles if other.short != way.short]
    if others and rng.random() < 0.6:
        other = rng.choice(others)
        ask = rng.choice(
            ("Make this function shorter.", "Write this in a shorter way.")
            if other.short
            else ("Write this function step by step.", "Can you write this in a longer way?")
        )
        intro, how = rng.choice(("Here is another way to write `{f}`:", "Sure! This `{f}` does the same:")), other.how
    else:
        other, old = way, fields["a"]
        fields = fields | {
            "a": rng.choice(
                [name for name in (*KINDS[task.kinds[0]][0].split(), "given", "arg") if name not in fields.values()]
            )
        }
        ask = rng.choice(
            (f"Rename `{old}` to `{fields['a']}`.", f"Please call the argument `{fields['a']}`, not `{old}`.")
        )
        intro, how = rng.choice((f"Here `{old}` is now `{{a}}`:", "Now the argument of `{f}` is called `{a}`:")), ()
    answer = intro.format(**fields) + "\n\n" + _fence(_function(other, task, fields))
    if how and rng.random() < 0.6:
        answer += "\n\n" + " ".join(how).format(**fields)
    return f"{ask}\n\n{_fence(code)}", answer


def _read_code(rng: Random) -> Example:
    """What does this loop print? The answer follows the accumulator step by step."""
    name, items = rng.choice(KINDS["list"][0].split()), rng.sample(range(1, 10), rng.randint(2, 4))
    item, acc = rng.choice([x for x in ITEMS[name].split() if x != "x"]), rng.choice(("total", "result", "count"))
    step, act = rng.choice(
        (
            (f"{acc} += {item}", lambda t, n: t + n),
            (f"{acc} += 2 * {item}", lambda t, n: t + 2 * n),
            (f"{acc} = {item} - {acc}", lambda t, n: n - t),
            (f"{acc} = max({acc}, {item})", max),
        )
    )
    start = rng.choice((0, 0, 1))
    code = f"```python\n{name} = {items}\n{acc} = {start}\nfor {item} in {name}:\n    {step}\nprint({acc})\n```"
    ask = rng.choice(
        ("What does this code print?", "What is the output of this code?", "Can you follow this code step by step?")
    )
    lines, value = [], start
    for number_ in items:
        value = act(value, number_)
        lines.append(f"- When `{item}` is {number_}, `{acc}` becomes {value}.")
    first = rng.choice(
        (f"`{acc}` starts as {start}.", f"The loop goes through `{name}`, and `{acc}` starts as {start}.")
    )
    last = rng.choice((f"So the code prints {value}.", f"At the end it prints {value}.", f"The output is {value}."))
    return f"{ask}\n\n{code}", "\n".join([first, "", *lines, "", last])


TASKS = _tasks()
TEMPLATES: dict[str, Callable[[Random], Example]] = (
    {name: partial(_compose, task) for name, task in TASKS.items()}
    | {name: partial(_compose_class, thing) for name, thing in _things().items()}
    | {"read_code": _read_code, "explain_code": _explain_code, "test_code": _test_code, "rewrite_code": _rewrite_code}
)

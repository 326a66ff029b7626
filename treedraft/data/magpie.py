"""Prompts that a chat model writes itself (Magpie, Xu et al. 2024): it gets the opening of a user turn and a stem.

A stem is the start of a message in one of three domains; the model continues it to the end of the turn. Stems are drawn
here, seeded by prompt index; code comes most often, since code answers are what drafts gain most on.
"""

from __future__ import annotations

import random

from treedraft.targets.hf import Target

DOMAINS = ("math", "code", "chat")
_CYCLE = "code math code chat math code chat math code code math chat code math code chat math code math chat".split()
_PLACEHOLDER = "treedraft-user-text"

_NAMES = (
    "Sarah Tom Maria Ahmed Lily James Priya Carlos Emma Wei Fatima Jack Olga Ben Nina Sam Lucy David Aisha Henry"
).split()
_VERBS = (
    "has", "buys", "bakes", "saves", "sells", "earns", "runs", "reads", "collects", "plants", "spends", "drives",
    "picks", "paints", "wants to buy", "is saving for", "walks", "shares", "and a friend", "starts with",
)  # fmt: skip
_SCENES = (
    "A train", "A car", "A bakery", "A farmer", "A shop", "A rectangle", "A circle", "A box", "A class of", "A school",
    "A recipe", "A water tank", "A cyclist", "A bus", "A store", "A library", "A garden", "A factory", "A pizza",
    "A number", "Two friends", "Three workers", "The sum of", "The price of", "The perimeter of", "The average of",
    "The ratio of", "If a", "If 3 apples", "If the radius", "If 5 workers", "In a class", "In a bag", "There are",
    "Half of", "A triangle", "Find the", "Solve for x:", "Calculate the", "What is the area of", "What is 15% of",
    "What is the value of", "How many", "How much", "How long", "Simplify the expression",
    "Find the greatest common divisor of", "What is the probability", "Convert", "Evaluate", "A movie ticket",
    "A jacket costs", "An airplane", "A team", "A baker", "A hotel", "The length of",
)  # fmt: skip
_CODE_OPENERS = (
    "Write a Python function that", "Write a Python function to", "Write a function in Python that",
    "Write a Python program that", "Implement a Python function that", "Create a Python function that",
    "Write a Python class that", "Write Python code to", "Define a Python function called",
    "Write a recursive Python function that", "Complete the following Python function:", "Write a Python script that",
    "Write a short Python function that takes", "Given a list of integers, write a Python function that",
    "Given a string, write a Python function that", "Write a Python function which returns",
    "Please write a Python function that", "How do I write a Python function that", "I need a Python function that",
    "Show me how to", "Fix the bug in this Python code:", "Write a function that", "Write a program to",
    "Write a SQL query that", "Write a JavaScript function that", "Explain this Python code:",
    "Add type hints and a docstring to this Python function:", "Write unit tests for a Python function that",
)  # fmt: skip
_CODE_TOPICS = (
    "takes a list of numbers and", "takes a string and", "takes two lists and", "takes a dictionary and",
    "takes an integer n and", "checks whether", "counts the number of", "finds the largest", "finds the smallest",
    "sorts", "reverses", "removes duplicates", "merges two", "computes the sum of", "computes the average", "converts",
    "returns the index of", "filters", "groups", "generates", "validates", "calculates the factorial",
    "finds the longest", "splits", "rotates", "flattens", "searches", "counts the vowels", "reads a file", "parses",
    "finds all prime", "swaps", "multiplies two matrices", "implements a stack", "implements binary search",
    "computes the Fibonacci", "finds the common elements", "formats", "simulates", "encrypts",
)  # fmt: skip
_CHAT_OPENERS = (
    "Explain how", "Explain why", "Explain the difference between", "What is", "What are", "Why do", "How does",
    "How can I", "Can you explain", "Describe", "Write a short story about", "Write an email to", "Write a poem about",
    "Write a paragraph about", "Write a product description for", "Give me tips for", "Give me three ideas for",
    "Summarize", "Compare", "What should I", "Tell me about", "List the", "What happens when", "Imagine you are",
    "Suggest", "Help me write", "Rewrite the following sentence", "I want to learn", "What is the history of",
    "What are the benefits of", "What are the main causes of", "Who was", "Translate", "Plan a", "Draft a", "Create a",
    "How do I",
)  # fmt: skip
_CHAT_TOPICS = (
    "plants", "the ocean", "a healthy diet", "climate change", "a small business", "the solar system", "ancient Rome",
    "exercise", "a job interview", "learning a language", "cooking", "a trip to", "music", "the internet",
    "electric cars", "sleep", "a book", "photosynthesis", "volcanoes", "a meeting", "a birthday", "stress", "money",
    "gardening", "friendship", "a robot", "the human heart", "democracy", "a dragon", "computers", "machine learning",
    "recycling", "coffee", "a dog", "teamwork", "vaccines", "the moon",
)  # fmt: skip


def stem(index: int, seed: int) -> tuple[str, str]:
    """(domain, opening of a user message) of prompt `index`: 40 % code, 35 % math, 25 % chat."""
    rng = random.Random(f"{seed}/{index}")
    domain = _CYCLE[index % len(_CYCLE)]
    if domain == "math":
        number = rng.choice(("", f" {rng.randrange(2, 100)}"))
        by_name = f"{rng.choice(_NAMES)} {rng.choice(_VERBS)}{number}"
        return domain, rng.choice((by_name, rng.choice(_SCENES)))
    if domain == "code":
        opener = rng.choice(_CODE_OPENERS)
        joins = opener.endswith(("that", "which returns"))
        return domain, f"{opener} {rng.choice(_CODE_TOPICS)}" if joins and rng.random() < 0.7 else opener
    opener = rng.choice(_CHAT_OPENERS)
    return domain, f"{opener} {rng.choice(_CHAT_TOPICS)}" if rng.random() < 0.6 else opener


def opening(target: Target, text: str) -> list[int]:
    """Ids of a conversation that stops inside its first user message, after `text`; from the target's own template.

    ValueError if the template does not show the user's text.
    """
    rendered: str = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    before, found, _ = rendered.partition(_PLACEHOLDER)
    if not found:
        raise ValueError(
            f"the chat template of {target.name} does not show the user's message, so it cannot be asked to write one"
        )
    return target.tokenizer(before + text, add_special_tokens=False)["input_ids"]


def finish(text: str, *, ended: bool) -> str:
    """The message to keep: whole if the model ended it, else up to its last full sentence; "" if there is none."""
    if not ended:
        cut = max(text.rfind(mark) for mark in (". ", "? ", "! ", ".\n", "?\n", "!\n", ":\n", "\n\n"))
        text = text[: cut + 1]
    return text.strip()

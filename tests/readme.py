"""The commands that the README shows, for the tests that check and run them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def readme_commands() -> list[list[str]]:
    """Words of every command in the README's bash blocks; a comment, a prompt sign and a leading NAME=value are dropped."""
    if not README.is_file():
        return []
    commands = []
    for block in re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                commands.append(words)
    return commands


def run_decode_commands(*, target: str | None, least_tau: float) -> None:
    """Run every `decode --compare` of the README that names this target, word by word, and read what it says."""
    decode = ["python", "-m", "treedraft.decode"]
    commands = [words for words in readme_commands() if words[:3] == decode and "--compare" in words]
    commands = [words for words in commands if (words[words.index("--target") + 1] if "--target" in words else None) == target]
    assert commands
    for command in commands:
        done = subprocess.run([sys.executable, *command[1:]], cwd=README.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said = re.search(r"^tau ([0-9.]+) ", done.stdout, re.MULTILINE)
        least = 1 if "--top-p" in command else least_tau  # open questions are there to show flags
        assert said and float(said[1]) >= least, done.stdout
        assert "identical to plain decoding" in done.stdout and "stages: prefill" in done.stdout

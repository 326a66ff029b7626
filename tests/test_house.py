"""The house: what a newcomer reads exists and runs, names are files, commands answer at once, nothing names a machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import treedraft
from tests.readme import README, readme_commands
from treedraft import ablate, registry
from treedraft.targets import target_names
from treedraft.trees import builder_names

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "treedraft"
COMPONENT_SEAMS = ("backbones", "contexts", "corrections")

# Joined here, so that this file does not hold what it looks for.
HOMES = "|".join(["root", "work", "home", "Users", "opt", "mnt"])
HOME_PATH = re.compile(rf"(?<![\w.~/<*-])/(?:{HOMES})/\w")
REGISTRY = re.compile("|".join(re.escape(".".join(host)) for host in (
    ("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"),
    ("download", "pytorch", "org"), ("anaconda", "org"), ("debian", "org"),
)))  # fmt: skip

INSTANT = [
    ("treedraft.ablate", "--list"),
    ("treedraft.ablate", "--help"),
    ("treedraft.decode", "--help"),
    ("treedraft.pocket", "--help"),
]


def repository_files() -> list[Path]:
    """Tracked files and those that are about to be; every file that is not hidden where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        tops = [path for path in ROOT.iterdir() if not path.name.startswith(".") and path.name != "runs"]
        paths = [path for top in tops for path in (top, *top.rglob("*"))]
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


@functools.cache
def texts() -> list[tuple[str, str]]:
    """(name, text) of every repository file that is UTF-8."""
    found = []
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            found.append((str(path.relative_to(ROOT)), data.decode("utf-8", errors="replace")))
    return found


def source_of(module: str) -> Path | None:
    """The file that `python -m module` runs, or None."""
    parts = module.split(".")
    candidates = (ROOT.joinpath(*parts).with_suffix(".py"), ROOT.joinpath(*parts, "__main__.py"))
    return next((path for path in candidates if path.is_file()), None)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("pattern", [HOME_PATH, REGISTRY], ids=["home-path", "registry-host"])
def test_no_file_names_a_machine(pattern: re.Pattern[str]) -> None:
    found = [f"{name}: {match[0]}" for name, text in texts() for match in pattern.finditer(text)]
    assert not found


def test_the_patterns_see_what_they_should() -> None:
    assert HOME_PATH.search("see " + "/".join(["", "home", "someone", "treedraft"]))
    assert not HOME_PATH.search("a/home/b ~/work/x ../opt/y")
    assert REGISTRY.search("https://" + ".".join(["files", "pythonhosted", "org"]))


def test_pyproject_is_the_only_list_of_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [requirement for requirement in project["dependencies"] if requirement.startswith("torch=")]
    assert len(pins) == 1
    assert pins[0].startswith("torch==")
    others = [
        name for name, _ in texts() if re.match(r"(.*/)?(requirements.*\.txt|setup\.(py|cfg)|poetry\.lock)$", name)
    ]
    assert not others
    assert "-e .[test]" in (ROOT / "environment.yml").read_text()


# -- the package ------------------------------------------------------------------------------------------------------


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, treedraft; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert run("-c", code).returncode == 0


@pytest.mark.parametrize("name", treedraft.__all__)
def test_exports_are_there(name: str) -> None:
    home = treedraft._HOMES[name]
    if importlib.util.find_spec(home) is not None:
        assert getattr(treedraft, name).__name__ == name
    assert name in dir(treedraft)


def test_an_unknown_export_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = treedraft.nothing_of_the_kind


# -- registry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seam", COMPONENT_SEAMS)
def test_a_component_is_a_file(seam: str) -> None:
    files = {path.stem for path in (PACKAGE / seam).glob("*.py") if not path.stem.startswith("_")}
    assert {name.replace("-", "_") for name in registry.names(seam)} == files
    for name in registry.names(seam):
        module = registry.load(seam, name)
        assert Path(str(module.__file__)).stem == name.replace("-", "_")
        assert {"Config", "Component"} <= set(vars(module))


def test_builders_and_targets_are_files() -> None:
    for seam, names, member in (("trees", builder_names(), "Builder"), ("targets", target_names(), "load")):
        assert names
        for name in names:
            module = registry.load(seam, name)
            assert Path(str(module.__file__)).stem == name.replace("-", "_")
            assert hasattr(module, member)


@pytest.mark.parametrize("seam", COMPONENT_SEAMS)
def test_a_misspelt_name_is_answered_with_the_right_one(seam: str) -> None:
    known = registry.names(seam)
    with pytest.raises(ValueError, match="did you mean") as caught:
        registry.load(seam, known[0] + "x")
    assert all(name in str(caught.value) for name in known)


def test_names_are_listed_without_torch() -> None:
    code = (
        "import sys; from treedraft import registry, targets, trees;"
        f"[registry.names(seam) for seam in {COMPONENT_SEAMS!r}]; targets.target_names(); trees.builder_names();"
        "sys.exit('torch' in sys.modules)"
    )
    assert run("-c", code).returncode == 0


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [command for command in INSTANT if source_of(command[0])], ids=" ".join)
def test_instant_commands_do_not_import_torch(command: tuple[str, str]) -> None:
    """Under one second of processor time: unlike the wall clock, it does not count the tests beside it."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("-X", "importtime", "-m", *command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if seconds[-1] < 1:
            break
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "torch" not in imported
    assert "transformers" not in imported
    assert min(seconds) < 1


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def modules_of(command: list[str]) -> list[tuple[str, list[str]]]:
    """[(module, its arguments)] of a command line with `-m treedraft...` in it, else []."""
    for index, word in enumerate(command[:-1]):
        if word == "-m" and command[index + 1].split(".")[0] == "treedraft":
            return [(command[index + 1], command[index + 2 :])]
    return []


def test_readme_shows_commands_that_exist() -> None:
    known = {
        "make",
        "python",
        ".venv/bin/python",
        "pip",
        "git",
        "cd",
        "conda",
        "source",
        "torchrun",
        "sbatch",
        "ls",
        "export",
    }
    for command in readme_commands():
        assert command[0] in known, f"README runs {command[0]!r}"
        if command[0] == "make":
            goals = [word for word in command[1:] if "=" not in word and not word.startswith("-")]
            assert set(goals) <= make_targets(), f"README: {' '.join(command)}"
        for module, _ in modules_of(command):
            assert source_of(module), f"README runs python -m {module}, which does not exist"


def test_readme_shows_flags_that_exist() -> None:
    helps: dict[tuple[str, ...], str] = {}
    for command in readme_commands():
        for module, arguments in modules_of(command):
            flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
            subcommand = arguments[:1] if arguments and re.fullmatch(r"[a-z]+", arguments[0]) else []
            key = (module, *subcommand)
            if key not in helps:
                done = run("-m", module, *subcommand, "--help")
                assert done.returncode == 0, done.stderr[-2000:]
                helps[key] = done.stdout
            shown = set(re.findall(r"--[a-z][\w-]*", helps[key].replace("_", "-")))
            assert flags <= shown | {"--help"}, f"README: {' '.join(command)}"


def test_grids_of_the_readme_expand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run of every `ablate --grid` the README shows, word by word: its target, data and settings fit the grid's file."""
    monkeypatch.setenv("TREEDRAFT_RUNS", str(tmp_path))
    found = [arguments for command in readme_commands() for module, arguments in modules_of(command) if module == "treedraft.ablate"]
    grids = [arguments for arguments in found if "--grid" in arguments]
    assert len([arguments for arguments in grids if "--target" in arguments]) >= 3
    for arguments in grids:
        monkeypatch.setattr(sys, "argv", ["ablate", *(word for word in arguments if word != "--dry-run"), "--dry-run"])
        assert ablate.main() == 0
        cells = capsys.readouterr().out.splitlines()
        target = arguments[arguments.index("--target") + 1].replace("/", "-") if "--target" in arguments else ""
        assert cells and all(line.startswith(f"missing {target}") for line in cells), " ".join(arguments)


def test_readme_begins_with_the_two_commands() -> None:
    if README.is_file():
        commands = [" ".join(command) for command in readme_commands()]
        assert {"make test", "make ablate"} <= set(commands)


def test_ci_runs_the_tests_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()

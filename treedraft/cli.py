"""How every command starts and fails: flags from one dataclass, and one sentence with a non-zero exit for an error."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

UseAppendAction: Any
try:
    from tyro.conf import UseAppendAction
except ModuleNotFoundError:  # `bench gpu` parses its own flags and runs where tyro is not installed
    UseAppendAction = None

Arguments = TypeVar("Arguments")
Repeated = Annotated[tuple[str, ...], UseAppendAction]  # a flag that may be given several times
USER_ERRORS = (ValueError, FloatingPointError, OSError)


def run_cli(main: Callable[[], object]) -> None:
    """Run `main` and exit: with its code (None is 0), 2 after a user error, 130 after Ctrl-C, 1 if the reader left.

    Any other exception is a mistake of ours and keeps its traceback.
    """
    try:
        code = main()
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except USER_ERRORS as error:
        sys.exit(_say(f"error: {' '.join(str(error).split())}", 2))
    except KeyboardInterrupt:
        sys.exit(_say("interrupted: what is finished is kept, run the same command to go on", 130))
    sys.exit(code if isinstance(code, int) else 0)


def parse_arguments(kind: Callable[..., Arguments], *, program: str, description: str) -> Arguments:
    """The command line as a config; a flag that is wrong is one sentence, `--help` is tyro's page."""
    import tyro

    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(kind, prog=program, description=description)
    except SystemExit as stop:
        if stop.code in (0, None):
            sys.stderr.write(messages.getvalue())
            raise
        raise ValueError(f"{_sentence(messages.getvalue())} (see {program} --help)") from None


def _sentence(box: str) -> str:
    """The text of tyro's framed message, unframed."""
    lines = (line.strip(" │|") for line in box.splitlines())
    text = [line for line in lines if line and not line.startswith(("╭", "╰", "─", "For full helptext"))]
    return " ".join(text).strip() or "the command line cannot be read"


def _say(sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)
    return code

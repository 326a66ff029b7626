"""What every test may use: two tiny targets, one that is a table, and a runs folder that is not the user's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from tests.enumerate import laws
from tests.kit import TableTarget
from treedraft.targets import load_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from treedraft.targets.hf import Target


def pytest_configure() -> None:
    """One thread: tests are many small products, which two threads only slow down."""
    torch.set_num_threads(1)
    # What triton's language is made of is interpreted or compiled for good when it is first imported.
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where runs of this session go: $TREEDRAFT_RUNS, inherited by the commands that tests start."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEDRAFT_RUNS", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tiny() -> Target:
    """The seeded two-layer target in fp32; shared, so start with `prefill`."""
    return load_target("tiny", dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny64() -> Target:
    """The same in fp64, where equal means equal."""
    return load_target("tiny", dtype=torch.float64)


@pytest.fixture
def table() -> TableTarget:
    """A target of three tokens whose next one has a random law by history."""
    return TableTarget(laws(3, 7), 3)

"""State of accelerate for the tests of this folder."""

from collections.abc import Iterator

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """Set accelerate to one process. Its state lasts as long as Python, so that other tests leave theirs here."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=not torch.cuda.is_available())
    yield
    AcceleratorState._reset_state(reset_partial_state=True)

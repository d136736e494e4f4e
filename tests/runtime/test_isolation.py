"""The caller's state does not reach the body of `isolated`, and is the same afterwards."""

import logging
import multiprocessing
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tessera.runtime.isolation import BusyError, isolated, own_modes


def state() -> dict[str, Any]:
    """Return state of the process and of this thread that changes results."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "device": torch.get_default_device().type,
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.matmul.fp32_precision,
        "cuda": torch.backends.cuda.matmul.fp32_precision,
        "attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "warnings": list(warnings.filters),
        "logging": logging.root.manager.disable,
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # pyright: ignore[reportIndexIssue]
        "torch": torch.get_rng_state().tolist(),
    }


@contextmanager
def calling(put: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def medium_precision() -> Iterator[None]:
    places = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [place.fp32_precision for place in places]
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "default_device": lambda: calling(torch.set_default_device, "meta", None),
    "float64": lambda: calling(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: calling(torch.use_deterministic_algorithms, True, False),
    "attention": lambda: calling(torch.backends.cuda.enable_cudnn_sdp, False, True),
    "precision": medium_precision,
    "errors": lambda: warnings.catch_warnings(action="error"),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_the_body_has_the_state_of_a_new_process(caller: str) -> None:
    with isolated():
        wanted = state()
    with CALLERS[caller]():
        before = state()
        with isolated():
            found = state()
        assert state() == before
    assert before != found
    for name in wanted.keys() - {"warnings", "environment"}:
        assert found[name] == wanted[name], name
    assert not [action for action, *_ in found["warnings"] if action == "error"]


def disturb() -> None:
    """Change all state that `state` returns and that a body can change for good."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_device("meta")
    torch.set_default_device(None)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    os.environ["TESSERA_TEST"] = "1"
    os.environ.pop("PATH")
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def test_the_caller_finds_the_same_state_afterwards() -> None:
    before = state()
    with isolated():
        disturb()
        assert {name for name in before if state()[name] == before[name]} == {"grad", "inference", "autocast", "device"}
    assert state() == before


def test_autocast_of_the_body_casts_new_weights_within_autocast_of_the_caller() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    products = []
    with torch.autocast("cpu", torch.bfloat16):
        with own_modes():
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    products.append(torch.ones(1, 2) @ weight)
                with torch.no_grad():
                    weight.mul_(2)
        assert torch.is_autocast_enabled("cpu")
    assert products[1].tolist() == (2 * products[0]).tolist() == [[4.0, 4.0]]


def test_threads_take_turns_and_a_run_refuses_other_threads() -> None:
    entered, leave, order = threading.Event(), threading.Event(), list[str]()

    def hold(run: bool) -> None:
        with isolated(run=run):
            entered.set()
            leave.wait(20)
            order.append("first")

    for run in (False, True):
        entered.clear()
        leave.clear()
        order.clear()
        thread = threading.Thread(target=hold, args=(run,))
        thread.start()
        entered.wait(20)
        if run:
            with pytest.raises(BusyError, match="another thread of this process"), isolated():
                pass
        threading.Timer(0.2, leave.set).start()
        if not run:
            with isolated(), isolated():  # a thread can enter again
                order.append("second")
        thread.join()
        assert order == (["first"] if run else ["first", "second"])


def enter_in_child(found: Any) -> None:
    with isolated():
        found.put("entered")


def test_a_forked_process_takes_no_turn_of_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    found, leave, entered = context.SimpleQueue(), threading.Event(), threading.Event()

    def hold() -> None:
        with isolated(run=True):
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(20)
    child = context.Process(target=enter_in_child, args=(found,))
    child.start()
    child.join(20)
    leave.set()
    thread.join()
    assert child.exitcode == 0
    assert found.get() == "entered"

"""Isolation of Tessera's functions from the program that calls them.

PyTorch, Python and accelerate keep state that belongs to the whole process or thread, such as the default dtype,
autocast, the random generators, the warning filters and `os.environ`. Each public function of the package `tessera`
runs in `isolated`. There it finds the state of a new process, and the caller finds his own state afterwards.
"""

import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tessera.runtime.user_error import UserError

_FLAGS: tuple[tuple[Any, str, Any], ...] = (
    (torch.backends, "fp32_precision", "none"),
    (torch.backends.cuda.matmul, "fp32_precision", "none"),
    (torch.backends.cudnn.conv, "fp32_precision", "tf32"),
    (torch.backends.cudnn.rnn, "fp32_precision", "tf32"),
    (torch.backends.mkldnn.matmul, "fp32_precision", "none"),
    (torch.backends.mkldnn.conv, "fp32_precision", "none"),
    (torch.backends.mkldnn.rnn, "fp32_precision", "none"),
    (torch.backends.cudnn, "benchmark", False),
    (torch.backends.cudnn, "deterministic", False),
    (torch.utils.deterministic, "fill_uninitialized_memory", True),
)
"""Attributes of PyTorch that change results, and their values in a new process."""
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object], Any], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, True),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, True),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, True),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
)
"""Functions of PyTorch that get and set such state, and its values in a new process."""
_AUTOCAST = ("cpu", "cuda")
"""Types of devices whose autocast is turned off."""
_POLL = 0.1  # seconds between two attempts of a thread to take its turn


class BusyError(UserError, RuntimeError):
    """Raised if a pretraining run in another thread uses the state of this process."""


class _Turn:
    """Lock of the process-wide state. A pretraining run keeps it, and everything else takes turns."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running = False  # True while a pretraining run holds the lock


_turn = _Turn()
# A forked process has one thread. A lock that another thread of its parent held would never be released.
os.register_at_fork(after_in_child=lambda: _turn.__init__())


@contextmanager
def isolated(*, run: bool = False) -> Iterator[None]:
    """Give the body the state of a new process, and restore the caller's state afterwards. Also a decorator.

    The threads of a process take turns, because they share most of the state. A thread can enter the context again.

    Args:
        run: True for a pretraining run. Other threads do not wait for its end, but are refused.

    Raises:
        BusyError: a pretraining run in another thread has not ended.
    """
    while not _turn.lock.acquire(timeout=_POLL):
        if _turn.running:
            raise BusyError(
                "A pretraining run is going on in another thread of this process, and shares its random generators and "
                "its settings of PyTorch. Wait for the end of the run, or use another process."
            )
    outer = _turn.running
    _turn.running = outer or run
    try:
        with own_modes(), ExitStack() as stack:
            for restore in _saved():
                stack.callback(restore)
            stack.enter_context(own_warnings())
            _set_defaults()
            yield
    finally:
        _turn.running = outer
        _turn.lock.release()


@contextmanager
def own_modes() -> Iterator[None]:
    """Leave the modes of PyTorch that the caller's thread has entered, until this context ends.

    These are inference mode, `no_grad`, autocast and the default device. Other threads are not affected.
    """
    enabled = {device: torch.is_autocast_enabled(device) for device in _AUTOCAST}
    # Autocast keeps the weights that it has cast until its outermost context ends. Within a context of the caller, the
    # contexts of the run would count as inner ones, and each step would use the weights of the first step.
    nesting = torch.autocast_increment_nesting()
    for _ in range(nesting):
        torch.autocast_decrement_nesting()
    if nesting > 1:
        torch.clear_autocast_cache()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # also enables gradients
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for device in _AUTOCAST:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device, was_enabled in enabled.items():
                torch.set_autocast_enabled(device, was_enabled)
            for _ in range(nesting - 1):
                torch.autocast_increment_nesting()


def _saved() -> Iterator[Callable[[], object]]:
    """Yield functions that restore the present state of the process."""
    environment = dict(os.environ)
    yield lambda: _restore_environment(environment)
    python, numpy = random.getstate(), np.random.get_state()
    yield lambda: (random.setstate(python), np.random.set_state(numpy))
    cpu = torch.get_rng_state()
    yield lambda: torch.set_rng_state(cpu)
    if torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(devices)
    for owner, name, _ in _FLAGS:
        yield partial(setattr, owner, name, getattr(owner, name))
    for get, put, _ in _SWITCHES:
        yield partial(put, get())
    threads = torch.get_num_threads()
    yield lambda: torch.set_num_threads(threads) if torch.get_num_threads() != threads else None
    disabled = logging.root.manager.disable
    yield lambda: logging.disable(disabled)
    states = {name: dict(state) for name, state in _accelerate_states().items()}
    yield lambda: _restore_accelerate(states)


def _set_defaults() -> None:
    """Set the state of a new process. The random generators keep their states, because Tessera seeds its own."""
    for get, put, value in _SWITCHES:  # before the flags: a precision of matrix products sets flags, too
        if get() != value:
            put(value)
    for owner, name, value in _FLAGS:
        if getattr(owner, name) != value:
            setattr(owner, name, value)
    for name, state in _accelerate_states().items():
        if name != "PartialState":  # it belongs to the process group, which lasts as long as the process
            state.clear()


@contextmanager
def own_warnings() -> Iterator[None]:
    """Restore the warning filters afterwards, and raise no warning as an error meanwhile. Ignore one notice of torch.

    With `PYTHONWARNINGS=error`, a notice of another package would end a run.
    """
    with warnings.catch_warnings():
        warnings.filters[:] = [  # pyright: ignore[reportIndexIssue] - it is a list
            ("default", *others) if action == "error" else (action, *others) for action, *others in warnings.filters
        ]
        # torch says so at each checkpoint of a run in one process, which is as it should be
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _restore_environment(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _accelerate_states() -> dict[str, dict[str, Any]]:
    """Return the dictionaries in which accelerate keeps the state of this process, by class; none before its import."""
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState") if module else ()
    return {name: getattr(module, name)._shared_state for name in names}


def _restore_accelerate(states: dict[str, dict[str, Any]]) -> None:
    """Restore accelerate's state. It would otherwise keep the precision of the run, and objects of the run alive."""
    for name, state in _accelerate_states().items():
        if name != "PartialState" or not dist.is_initialized():
            state.clear()
            state.update(states.get(name, {}))

"""Calls of `torch.cuda` and `torch.backends`, most of which run only on a GPU, fit the installed torch."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
import torch

from tests.launched import ROOT

FOLDERS = [
    "configs",
    "data",
    "encoders",
    "evaluation",
    "extras",
    "launch",
    "pretrain",
    "runtime",
    "tessera",
    "benchmarks",
]

NAME = re.compile(r"torch\.(cuda|backends)(\.\w+)+")


def _misfits(code: str) -> Iterator[str]:
    """Yield names that do not exist, and calls whose arguments do not fit the function."""
    tree = ast.parse(code)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if not NAME.fullmatch(name):
            continue
        try:
            function: Any = reduce(getattr, name.split(".")[1:], torch)
            call = calls.get(id(node))
            if call is not None and not any(isinstance(one, ast.Starred) for one in call.args):
                inspect.signature(function).bind(*call.args, **{word.arg: None for word in call.keywords if word.arg})
        except (AttributeError, TypeError) as error:
            yield f"line {node.lineno}: {name}: {error}"
        except ValueError:
            continue  # a function of C++ has no signature


def test_calls_of_torch_cuda_fit() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    codes = {path: path.read_text() for path in files}
    using = {path: code for path, code in codes.items() if "torch.cuda." in code or "torch.backends." in code}
    assert len(using) > 15
    assert [f"{path}: {misfit}" for path, code in using.items() for misfit in _misfits(code)] == []


@pytest.mark.parametrize(
    "code",
    ["torch.cuda.current_streams()", "torch.cuda.Event(timing=True)", "torch.cuda.get_device_name(0, 1)"],
)
def test_a_wrong_call_is_found(code: str) -> None:
    assert len(list(_misfits(code))) == 1

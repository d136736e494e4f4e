"""Files of a whole method: its weights, and beside them its settings in a .json file."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from tessera.encoders.loading import check_names, check_shapes, check_values
from tessera.pretrain.method_state import build
from tessera.pretrain.methods.method import Method
from tessera.runtime.files import atomic_write, read_bounded

MAX_BYTES = 2**24
"""Largest size in bytes of the .json file of an exported method."""


def save(method: nn.Module, described: dict[str, Any], output: Path) -> None:
    """Write the weights of a method to `output`, and its settings to a .json file beside `output`."""
    with atomic_write(output) as temporary:
        save_file(method.state_dict(), temporary)
    with atomic_write(output.with_suffix(".json")) as temporary:
        temporary.write_text(json.dumps(described, indent=2) + "\n")


def load(path: str | Path) -> Method:
    """Load a method that was exported with `--part method` to `path` (.safetensors).

    Raises:
        ValueError: `path` is not an exported method, or its .json file is missing or does not fit the weights.
    """
    beside = Path(path).with_suffix(".json")
    try:
        described, state = json.loads(read_bounded(beside, MAX_BYTES)), load_file(path)
        with torch.device("meta"):  # check the settings against the weights before allocating memory
            own = build(described).state_dict()
        check_names(state, own, {})
        check_shapes(state, own, {})
        method = build(described)
        check_values({name: tensor for name, tensor in state.items() if tensor.is_floating_point()})
        method.load_state_dict(state)
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} and {beside.name} are not an exported method: {error}") from error
    return method

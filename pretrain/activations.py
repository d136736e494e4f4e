"""Count the activations that a forward pass keeps for the backward pass, without computing them."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.collate import Transform, collate
from tessera.encoders.base import IMAGENET, Encoder
from tessera.encoders.dot_product import only_torchs_kernel
from tessera.encoders.summary import FusedAttention
from tessera.pretrain.methods.cross_entropy import smaller_chunks
from tessera.pretrain.methods.method import Method
from tessera.runtime.collectives import alone

READS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__)
"""Functions that return values of a tensor."""


class Activations(NamedTuple):
    """Tensors that a forward pass keeps for the backward pass, in bytes."""

    kept: int
    """All of them."""
    block: int
    """Those of the largest block of an encoder; 0 if blocks are recomputed."""


def blank_batch(method: Method, transform: Transform, sizes: Sequence[tuple[int, int]]) -> Batch:
    """Return a batch of black images of the given (height, width) sizes, cropped and masked by `transform`.

    All images have the label 0.
    """
    preprocessing = next((part.preprocessing for part in method.modules() if isinstance(part, Encoder)), IMAGENET)
    images = [torch.zeros(preprocessing.channels, *size, dtype=preprocessing.dtype) for size in sizes]
    rngs = [np.random.default_rng(0) for _ in images]
    batch = collate(transform, images, rngs, preprocessing)
    return replace(to_model_input(batch), labels=torch.zeros(len(images), dtype=torch.int64))


def activations(method: Method, precision: str, images: int) -> Activations:
    """Return the activations of a forward pass of `images` images.

    They are extrapolated from passes of two and of four images. Parameters are fake tensors in these passes: they have
    a shape and a type but no values, so nothing is computed. Attention counts as a fused kernel, as on a GPU. If the
    crop sizes are drawn for each step, the largest ones are assumed. A value that the method reads is 1. With
    `skip_dropped`, no image is skipped. `method` does not change, and may be on the meta device.

    Raises:
        Exception: the method does not support black images or fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imported here, because the import takes time

    batches = {count: blank_batch(method, method.transform(), [(64, 64)] * count) for count in (2, 4)}
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        fake = copy.deepcopy(method, {id(t): _fake(t) for t in [*method.parameters(), *method.buffers()]})
        for part in fake.modules():
            if hasattr(part, "skip_dropped"):
                part.skip_dropped = False
        found = list[Activations]()
        for count, batch in batches.items():
            with smaller_chunks(count, images):
                found.append(_kept(fake, precision, batch))
    two, four = found
    return Activations(*(a + (b - a) * (images - 2) // 2 for a, b in zip(two, four, strict=True)))


def _fake(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _kept(method: Method, precision: str, batch: Batch) -> Activations:
    """Return the activations of a forward pass of a method with fake parameters."""
    kept: dict[int, int] = {}
    alive: list[torch.UntypedStorage] = []  # because a new storage may reuse the address of a freed one
    weights = {t.untyped_storage()._cdata for t in [*method.parameters(), *method.buffers()]}
    before, blocks = list[int](), [0]

    def count(tensor: Tensor) -> Tensor:
        alive.append(tensor.untyped_storage())
        if alive[-1]._cdata not in weights:
            kept[alive[-1]._cdata] = alive[-1].nbytes()
        return tensor

    for part in method.modules():
        for block in _blocks(part) if isinstance(part, Encoder) else ():
            block.register_forward_pre_hook(lambda *_: before.append(sum(kept.values())))
            block.register_forward_hook(lambda *_: blocks.append(sum(kept.values()) - before.pop()))
    with (
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision in ("bf16", "fp16")),
        only_torchs_kernel(),
        alone(),  # the other processes take no part
        _RealWithoutFake(),
        FusedAttention(),
        _Reads(),
    ):
        method(batch, 0)
    return Activations(sum(kept.values()), max(blocks))


def _blocks(encoder: Encoder) -> Iterator[nn.Module]:
    for part in getattr(encoder, "blocks", ()):
        yield from part if isinstance(part, nn.ModuleList) else [part]


class _RealWithoutFake(TorchDispatchMode):
    """Computes operations without fake tensors, such as those on the lengths of images."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        kwargs = kwargs or {}
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class _Reads(TorchFunctionMode):
    """Lets values of fake tensors be 1."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        if func in READS and isinstance(args[0], FakeTensor):
            args = (torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu"),)
        return func(*args, **kwargs or {})

"""Drop path, and drop path that skips dropped branches: against a loop over images in float64, and against drop path
that computes every branch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera import encoders
from tessera.encoders.base import Features
from tessera.encoders.blocks import Block
from tessera.encoders.drop_path import DropPath, Subset
from tessera.encoders.images import Images, pack
from tessera.encoders.randomness import random_keys
from tessera.encoders.segments import Segments

VARIANTS = ("vit_micro", "rope_vit_micro")
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"dim": 24, "depth": 4, "heads": 2, "layer_scale": 0.5}


def build(variant: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return encoders.build(variant, **{**SMALL, "drop_path": 0.6, **settings}).train()


def crops(kind: str, dtype: torch.dtype = torch.float32) -> Images:
    """Two large and three small crops of four samples, as a batch of one size or packed."""
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(4 * n, 3, s, s, generator=generator, dtype=dtype) for n, s in ((2, 16), (3, 8)))
    return pack([large, small], 4) if kind == "packed" else large


def encode(encoder: nn.Module, images: Images, samples: Tensor, step: int = 3) -> Features:
    with random_keys(7, step, samples):
        return encoder(images)


@pytest.mark.parametrize("packed", [False, True])
def test_a_block_equals_a_loop_over_images_in_float64(packed: bool) -> None:
    torch.manual_seed(0)
    block = Block(12, 2, mlp_ratio=2, qkv_bias=True, norm_eps=1e-6, layer_scale=0.3, drop_path=0.4).double().train()
    factors = torch.tensor([[0.0, 5 / 3, 5 / 3, 0.0, 5 / 3], [5 / 3, 5 / 3, 0.0, 0.0, 5 / 3]], dtype=torch.float64)
    lengths = torch.tensor([3, 5, 2, 5, 4]) if packed else torch.full((5,), 4)
    images = [torch.randn(int(n), 12, dtype=torch.float64) for n in lengths]
    segments = Segments(lengths, CPU) if packed else None
    angles = torch.rand(int(lengths.sum()) if packed else 4, 3, dtype=torch.float64)
    rope = torch.stack([angles.sin(), angles.cos()])
    x = torch.cat(images) if packed else torch.stack(images)
    first, second = (Subset.of(one, segments, CPU) for one in factors)
    found = block(x, segments, (first, second), rope)
    expected = []
    for i, image in enumerate(images):
        own = rope[:, int(lengths[:i].sum()) :][:, : len(image)] if packed else rope
        x1 = image + factors[0, i] * block.ls1(block.attn(block.norm1(image[None]), rope=own))[0]
        expected.append(x1 + factors[1, i] * block.ls2(block.mlp(block.norm2(x1))))
    torch.testing.assert_close(found, torch.cat(expected) if packed else torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_are_those_of_drop_path_that_computes_everything(variant: str, kind: str) -> None:
    images, samples = crops(kind, torch.float64), torch.tensor([5, 0, 9, 2])
    found = {}
    for skip, recompute in ((False, False), (True, False), (True, True)):
        encoder = build(variant, skip_dropped=skip, checkpoint_activations=recompute).double()
        outputs = encode(encoder, images, samples)
        loss = outputs.pooled.square().sum() + outputs.tokens.cos().sum()
        loss.backward()
        gradients = {name: p.grad for name, p in encoder.named_parameters()}
        found[skip, recompute] = outputs.pooled, outputs.tokens, gradients
    plain = found.pop((False, False))
    for pooled, tokens, gradients in found.values():
        torch.testing.assert_close(pooled, plain[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tokens, plain[1], rtol=1e-12, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain[2][name], rtol=1e-10, atol=1e-10)


def test_dropped_images_are_not_computed_and_evaluation_drops_nothing() -> None:
    encoder, seen = build("vit_micro", skip_dropped=True), []
    for block in encoder.blocks:
        for norm in (block.norm1, block.norm2):
            norm.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    images = torch.randn(200, 3, 16, 16)
    encode(encoder, images, torch.arange(200))
    for count, rate in zip(seen, (0, 0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6), strict=True):
        assert abs(count - 200 * (1 - rate)) <= 4 * (200 * rate * (1 - rate)) ** 0.5
    seen.clear()
    encode(encoder.eval(), images[:3], torch.arange(3))
    assert seen == [3] * 8


def test_a_branch_that_all_images_drop_changes_nothing_and_its_parameters_get_gradients() -> None:
    encoder = build("vit_micro", skip_dropped=True, drop_path=0.99, depth=2)
    image = torch.randn(1, 3, 16, 16)
    pooled = encode(encoder, image, torch.arange(1)).pooled
    first = encoder.blocks[0](encoder._embed(image)[0])  # the rate of the first block is 0
    torch.testing.assert_close(pooled, encoder.norm(first)[:, 0])
    pooled.sum().backward()
    last = encoder.blocks[1]
    assert all(p.grad is not None and not p.grad.any() for p in last.parameters())


def test_drop_path_leaves_out_whole_samples_at_its_rate_and_keeps_the_mean():
    torch.manual_seed(0)
    layer, x = DropPath(0.3), torch.ones(20000, 3, 2)
    y = layer(x)
    assert ((y == y[:, :1, :1]).all(2).all(1)).all()
    values = y[:, 0, 0]
    assert values.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (values == 0).float().mean().item() == pytest.approx(0.3, abs=0.015)  # 4.6 standard deviations
    assert torch.equal(layer.eval()(x), x)
    with pytest.raises(ValueError, match="drop_path"):
        DropPath(1.0)


def test_drop_path_leaves_out_packed_images_as_a_whole():
    torch.manual_seed(0)
    layer, segments = DropPath(0.5), Segments(torch.tensor([2, 1, 3]), CPU)
    found = {tuple(layer(torch.ones(6, 2), segments)[:, 0].tolist()) for _ in range(100)}
    assert found == {(a, a, b, c, c, c) for a in (0.0, 2.0) for b in (0.0, 2.0) for c in (0.0, 2.0)}
    assert torch.equal(layer.eval()(torch.ones(6, 2), segments), torch.ones(6, 2))

"""The narrow transformer on features: MAE's decoder against transformers is in tests/pretrain/methods/test_mae.py."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tessera.encoders import EncoderError
from tessera.encoders.images import Mask
from tessera.encoders.layers import sincos_table
from tessera.pretrain.methods.narrow import NarrowTransformer
from tests.encoders.helpers import images_of, mask_of, scramble

GRIDS = torch.tensor([[2, 3], [2, 3], [4, 1]])
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def narrow(depth: int = 2, *, mask_token: bool = False) -> NarrowTransformer:
    return scramble(NarrowTransformer(12, 16, depth, 2, 5, mask_token=mask_token))


def parts_of(grids: torch.Tensor) -> list[slice]:
    ends = [0, *grids.prod(1).cumsum(0).tolist()]
    return [slice(*pair) for pair in pairwise(ends)]


@pytest.mark.parametrize("with_pooled", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_a_packed_image_is_predicted_as_alone(masked: bool, with_pooled: bool) -> None:
    transformer, mask = narrow(mask_token=masked), mask_of(GRIDS, [2, 0, 3]) if masked else None
    tokens = images_of(16 if mask is None else len(mask.visible), 12)
    pooled = images_of(3, 12, seed=5) if with_pooled else None
    together = transformer(tokens, GRIDS, mask, pooled=pooled)
    seen = tokens.split((GRIDS.prod(1) if mask is None else mask.lengths).tolist())
    for image, part in enumerate(parts_of(GRIDS)):
        own = None if mask is None else Mask.from_hidden(mask.hidden[part], GRIDS[image : image + 1])
        first = None if pooled is None else pooled[image : image + 1]
        alone = transformer(seen[image], GRIDS[image : image + 1], own, pooled=first)
        torch.testing.assert_close(together[part], alone, **CLOSE)
    if pooled is not None:
        assert not torch.allclose(together, transformer(tokens, GRIDS, mask), **CLOSE)


@torch.no_grad()
def test_hidden_tokens_are_the_mask_token_at_their_positions() -> None:
    transformer, grids = narrow(depth=1, mask_token=True), GRIDS[:2]
    mask, tokens, seen = mask_of(grids, 2), images_of(8, 12), []
    transformer.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0]))
    transformer(tokens, grids, mask)
    x = seen[0].flatten(0, 1) - sincos_table(2, 3, 16).repeat(2, 1)
    torch.testing.assert_close(x[mask.visible], transformer.embed(tokens), **CLOSE)
    torch.testing.assert_close(x[mask.hidden], transformer.mask_token.expand(4, 16), **CLOSE)


@torch.no_grad()
def test_without_blocks_only_the_prediction_layer_is_left() -> None:
    transformer, tokens = narrow(depth=0), images_of(16, 12)
    assert {name for name, _ in transformer.named_parameters()} == {"pred.weight", "pred.bias"}
    assert torch.equal(transformer(tokens, GRIDS, pooled=images_of(3, 12)), transformer.pred(tokens))


def test_every_parameter_gets_a_gradient() -> None:
    transformer, mask = narrow(mask_token=True).train(), mask_of(GRIDS, [2, 0, 3])
    transformer(images_of(len(mask.visible), 12), GRIDS, mask, pooled=images_of(3, 12)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in transformer.parameters())
    assert isinstance(transformer.pred, nn.Linear)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(EncoderError, match="16 does not split into 3 heads"):
        NarrowTransformer(12, 16, 1, 3, 5, mask_token=False)
    with pytest.raises(EncoderError, match="multiple of 4"):
        NarrowTransformer(12, 6, 1, 2, 5, mask_token=False)
    with pytest.raises(EncoderError, match=r"side of 513 tokens. The limit is 512"):
        narrow()(images_of(513, 12), torch.tensor([[513, 1]]))


@pytest.mark.parametrize("given", [False, True])
def test_tokens_between_blocks_are_in_bf16_only_under_autocast(given: bool) -> None:
    torch.manual_seed(0)
    transformer = scramble(NarrowTransformer(12, 16, 2, 2, 5, mask_token=False, bf16_residuals=given))
    tokens, dtypes = images_of(16, 12), []
    transformer.blocks[-1].register_forward_hook(
        lambda _, inputs, output: dtypes.extend([inputs[0].dtype, output.dtype])
    )
    exact = transformer(tokens, GRIDS)
    with torch.autocast("cpu", torch.bfloat16):
        found = transformer(tokens, GRIDS)
    low = torch.bfloat16 if given else torch.float32
    assert dtypes == [torch.float32, torch.float32, low, low]
    assert 0 < (found - exact).norm() < 0.02 * exact.norm()

"""checkpoint_activations="selective": the same gradients, from fewer activations and without a product more."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tessera import encoders
from tessera.encoders.base import Encoder
from tessera.encoders.blocks import Block
from tessera.encoders.errors import EncoderError
from tessera.encoders.layers import Recompute
from tests.encoders.helpers import images_of, outputs

VARIANTS = ("vit_micro", "rope_vit_micro")
IMAGES = images_of(6, 3, 16, 16, seed=0)


def build(variant: str, recompute: Recompute, **settings: Any) -> Encoder:
    torch.manual_seed(0)
    return encoders.build(variant, checkpoint_activations=recompute, layer_scale=0.5, **settings).train()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"drop_path": 0.5, "skip_dropped": True}, {"mlp": "swiglu", "drop_path": 0.2}, {"bf16_residuals": True}],
    ids=str,
)
def test_gradients_are_the_same_bit_by_bit(variant: str, settings: dict[str, Any]) -> None:
    autocast = "bf16_residuals" in settings
    plain, selective = (
        outputs(build(variant, given, **settings), IMAGES, autocast=autocast)[1] for given in (False, "selective")
    )
    assert plain.count_nonzero() > 0.9 * len(plain)
    assert torch.equal(plain, selective)


def block_costs(*, selective: bool) -> tuple[float, int]:
    """Values that a block keeps for each channel of a token, and the FLOP of its two passes."""
    torch.manual_seed(0)
    block = Block(
        48, 2, mlp_ratio=4, qkv_bias=True, norm_eps=1e-6, layer_scale=None, drop_path=0.0, selective=selective
    )
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    x = torch.randn(4, 64, 48, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = block(x)
        out.sum().backward()
    return sum(kept.values()) / x.numel(), flops.get_total_flops()


def test_norms_and_activation_functions_are_not_kept_and_no_product_runs_again() -> None:
    plain, plain_flops = block_costs(selective=False)
    selective, flops = block_costs(selective=True)
    # two norms (1 each) and the GELU (4); the input of the block, q, k, v, the output of attention, the sum after it,
    # and the input of the GELU stay: 1 + 3 + 1 + 1 + 4
    assert plain - selective == pytest.approx(6, abs=0.1)
    assert selective == pytest.approx(10, abs=0.1)
    assert flops == plain_flops > 0


@pytest.mark.parametrize(
    ("variant", "value", "message"),
    [
        ("swin_micro", "selective", "checkpoint_activations of swin_micro must be a bool, not 'selective'"),
        ("vit_micro", "some", "checkpoint_activations of vit_micro must be a bool or 'selective', not 'some'"),
    ],
)
def test_other_values_are_refused(variant: str, value: Any, message: str) -> None:
    with pytest.raises(EncoderError, match=message):
        encoders.build(variant, checkpoint_activations=value)

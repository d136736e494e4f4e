"""Parameters without gradient, found on the meta device, against a real backward pass."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera import encoders
from tessera.encoders.base import Encoder, Features, encode
from tessera.encoders.images import Images, Mask
from tessera.encoders.unused import unused_parameters
from tests.encoders.helpers import MICRO

SETTINGS = [
    ("vit_micro", {"classes": 5, "distillation_token": True, "mask_token": True}),
    ("vit_micro", {"checkpoint_activations": True}),
    ("vit_micro", {"checkpoint_activations": "selective"}),
    ("vit_micro", {"drop_path": 0.9, "skip_dropped": True}),
    ("rope_vit_micro", {"cls_norm": True, "local_cls_norm": True}),
    ("rope_vit_micro", {"cls_norm": True, "pool": "mean"}),
    ("navit_micro", {"pool": "mean", "token_drop": 0.5}),
]


def without_gradient(encoder: Encoder, sides: list[int], *, pooled: bool, tokens: bool, packed: bool) -> set[str]:
    """Return the names of the parameters whose gradient is None after a backward pass."""
    encoder.zero_grad()
    views = [torch.randn(2, 3, side, side) for side in sides]
    features = encode(encoder.train(), views) if packed else encoder.train()(views[0])[:2]
    used = [one.sum() for one, is_used in zip(features, (pooled, tokens), strict=True) if is_used]
    torch.stack(used).sum().backward()
    return {name for name, p in encoder.named_parameters() if p.requires_grad and p.grad is None}


@pytest.mark.parametrize(
    ("pooled", "tokens", "packed"), [(True, False, False), (False, True, False), (True, True, True)]
)
@pytest.mark.parametrize(("variant", "settings"), [*((name, {}) for name in MICRO), *SETTINGS])
def test_they_are_those_without_gradient_in_a_backward_pass(
    variant: str, settings: dict[str, Any], pooled: bool, tokens: bool, packed: bool
) -> None:
    torch.manual_seed(0)
    encoder = encoders.build(variant, **settings)
    sides, uses = [16, 8] if packed else [16], {"pooled": pooled, "tokens": tokens, "packed": packed}
    assert unused_parameters(encoder, sides, **uses) == without_gradient(encoder, sides, **uses)


@pytest.mark.parametrize("variant", MICRO)
def test_a_frozen_parameter_counts_as_used_if_the_features_depend_on_it(variant: str) -> None:
    """A teacher is frozen, and so is a table of fixed positions."""
    encoder = encoders.build(variant)
    before = unused_parameters(encoder, [16], tokens=True)
    assert unused_parameters(encoder.requires_grad_(False), [16], tokens=True) == before
    assert not any(p.requires_grad for p in encoder.parameters())


def test_a_frozen_parameter_is_listed_if_it_is_not_used() -> None:
    encoder = encoders.build("vit_micro", classes=5, positions="sincos")
    assert unused_parameters(encoder.requires_grad_(False), [16]) == {"head.weight", "head.bias"}


def test_the_mask_token_is_used_if_it_replaces_hidden_tokens() -> None:
    encoder = encoders.build("vit_micro", mask_token=True)
    assert unused_parameters(encoder, [16], tokens=True, masked=True) == set()
    assert unused_parameters(encoder, [16, 8], tokens=True, masked=True, packed=True) == set()
    assert unused_parameters(encoder, [16], tokens=True, masked=True, drop=True) == {"mask_token"}
    assert unused_parameters(encoder, [16], tokens=True) == {"mask_token"}


class Normed(Encoder):
    """A convolution with batch norm, an unused head, and a branch that may read the values of the images."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.dim, self.stride, self.channels, self.reads = 4, 4, 3, reads
        self.patch_embed, self.norm, self.head = nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList()

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        assert isinstance(images, Tensor)
        x = self.norm(self.patch_embed(F.dropout(images, 0.5, self.training)))
        if self.reads and bool(images.isnan().any()):
            raise ValueError("The images have no values.")
        return Features(x.mean((2, 3)), x.permute(0, 2, 3, 1).flatten(0, 2), self.grids(images))


@pytest.mark.parametrize("reads", [False, True])
def test_the_encoder_and_random_states_do_not_change(reads: bool) -> None:
    """Also if the encoder reads values, so that it cannot run on the meta device."""
    encoder = Normed(reads).train()
    encoder.norm.eval()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    state = torch.get_rng_state()
    assert unused_parameters(encoder, [16]) == {"head.weight", "head.bias"}
    assert torch.equal(torch.get_rng_state(), state)
    assert (encoder.training, encoder.norm.training) == (True, False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    assert all(p.grad is None for p in encoder.parameters())


def test_an_encoder_on_the_meta_device_has_the_same() -> None:
    settings = {"cls_norm": True, "local_cls_norm": True}
    with torch.device("meta"), torch.no_grad():
        found = unused_parameters(encoders.build("rope_vit_micro", **settings), [16, 8], packed=True)
    assert found == unused_parameters(encoders.build("rope_vit_micro", **settings), [16, 8], packed=True)
    assert found == {"norm.weight", "norm.bias"}


def test_an_image_that_the_encoder_does_not_take_is_named() -> None:
    with pytest.raises(encoders.EncoderError, match="10 x 10 pixels do not divide"):
        unused_parameters(encoders.build("navit_micro"), [10])

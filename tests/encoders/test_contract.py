"""What every encoder promises, asked of the smallest variant of each family, found by its name."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from tessera import encoders
from tessera.encoders.base import Features, encode
from tessera.encoders.compiling import compile_blocks
from tessera.encoders.images import Mask, pack
from tessera.encoders.randomness import random_keys
from tessera.encoders.summary import summarize
from tests.encoders import helpers
from tests.encoders.helpers import MICRO, mask_of
from tests.installed import needs_extra
from tests.launched import ROOT

OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "swin_micro with absolute positions": ("swin_micro", {"absolute_positions": True}),
    "twins_svt_micro of vit-pytorch": ("twins_svt_micro", {"layout": "vit_pytorch", "qkv_bias": False, "head_dim": 6}),
}
"""Other settings of a variant that compute in another way."""
ALL = [*MICRO, *OTHER]
DROPPING = [name for name in MICRO if encoders.family(name).can_drop]
PACKING = [name for name in MICRO if encoders.family(name).takes_packed]
ROTARY: dict[str, dict[str, Any]] = {
    "pool of all tokens": {"pool": "all", "class_token": False, "registers": 0},
    "distillation token": {"pool": "mean", "distillation_token": True},
    "heads of any width": {"head_dim": 20, "qk_norm": True, "patch_norm": True},
    "norm of the class token": {"cls_norm": True, "registers": 0, "mlp": "swiglu"},
}
OTHER |= {f"rope_vit_micro, {name}": ("rope_vit_micro", settings) for name, settings in ROTARY.items()}
PACKED = [*PACKING, *(name for name in OTHER if "rope" in name)]
WHOLE_PATCHES = ["navit_micro"]  # sides must be multiples of the patch
PADDING = ["twins_svt_micro"]  # a part of a patch is completed with zeros
SIZES = [(24, 16), (96, 160), (33, 33), (4, 64)]


def make(variant: str, **settings) -> encoders.Encoder:
    """Random weights in every parameter, so that all of them show. `variant` is in MICRO or OTHER."""
    torch.manual_seed(0)
    name, own = OTHER.get(variant, (variant, {}))
    encoder = encoders.build(name, **own | settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return encoder.eval()


def images_of(count: int, height: int = 16, width: int = 16, seed: int = 0) -> torch.Tensor:
    return helpers.images_of(count, 3, height, width, seed=seed)


def share_of(encoder: encoders.Encoder, images: torch.Tensor, share: float = 0.5) -> Mask:
    """Hide the same number of tokens in each image, at different places."""
    grids = encoder.grids(images)
    return mask_of(grids, max(int(share * int(grids[0].prod())), 1))


def under(mask: Mask, encoder: encoders.Encoder, images: torch.Tensor) -> torch.Tensor:
    """(B, 1, H, W) bool: the pixels of hidden tokens."""
    rows, columns = encoder.grids(images)[0].tolist()
    hidden = mask.hidden.view(len(images), 1, rows, columns)
    spread = hidden.repeat_interleave(encoder.stride, 2).repeat_interleave(encoder.stride, 3)
    spread = spread[:, :, : images.shape[2], : images.shape[3]]
    beyond = [side - spread.shape[dim] for side, dim in zip(images.shape[2:], (2, 3), strict=True)]
    return F.pad(spread, (0, beyond[1], 0, beyond[0]))  # pixels beyond the last patch are nobody's


def blocks_of(encoder: encoders.Encoder) -> list[Any]:
    """The blocks of all stages."""
    return [b for part in encoder.blocks for b in (part if isinstance(part, torch.nn.ModuleList) else [part])]


def shallower(encoder: encoders.Encoder) -> dict[str, Any]:
    """Settings of an encoder with one block less."""
    given = encoder.settings
    if "depths" in given:
        return {"depths": (*given["depths"][:-1], given["depths"][-1] - 1)}
    return {"depth": given["depth"] - 1}


def check_shapes(features: Features, encoder: encoders.Encoder, images: torch.Tensor) -> None:
    grids = encoder.grids(images)
    assert torch.equal(features.grids, grids)
    assert features.grids.device.type == "cpu"
    assert features.tokens.shape == (int(grids.prod(1).sum()), encoder.dim)
    assert features.pooled.shape == (len(images), encoder.dim)
    assert features.tokens.isfinite().all()
    assert features.pooled.isfinite().all()


def test_each_family_has_a_smallest_variant():
    assert {encoders.family(name) for name in MICRO} == {encoders.family(name) for name in encoders.VARIANTS}


class Mean(encoders.Encoder):
    """An encoder of another package: one linear layer."""

    def __init__(self, *, dim: int = 8, channels: int = 3, patch_size: int = 4, image_size: int = 16):
        super().__init__()
        self.dim, self.stride, self.channels = dim, patch_size, channels
        self.blocks = torch.nn.ModuleList([torch.nn.Conv2d(channels, dim, patch_size, patch_size)])

    def forward(self, images, mask=None, *, drop=False):
        x = self.blocks[0](self.checked(images, mask, drop=drop)).flatten(2).mT  # (B, N, D)
        return Features(x.mean(1), x.flatten(0, 1), self.grids(images))


def test_an_encoder_is_registered_by_one_entry(monkeypatch, tmp_path):
    monkeypatch.setitem(encoders.VARIANTS, "mean_micro", {"family": Mean, "dim": 12})
    assert "mean_micro" in (name for name in encoders.VARIANTS if name.endswith("_micro"))
    encoder = make("mean_micro", patch_size=8)
    check_shapes(encoder(images_of(2)), encoder, images_of(2))
    assert encoder.settings == {"variant": "mean_micro", "dim": 12, "channels": 3, "patch_size": 8, "image_size": 16}
    encoders.save(encoder, tmp_path / "encoder.safetensors")
    again = encoders.load(tmp_path / "encoder.safetensors")
    assert torch.equal(again(images_of(2)).pooled, encoder(images_of(2)).pooled)
    other = encoders.build("mean_micro", patch_size=8)
    encoders.load_weights(other, tmp_path / "encoder.safetensors")
    assert torch.equal(other(images_of(2)).pooled, encoder(images_of(2)).pooled)
    with pytest.raises(encoders.EncoderError, match="needs a mask token"):
        encoder(images_of(2), share_of(encoder, images_of(2)))
    assert summarize(encoder.to("meta"), 16, 16).parameters == sum(p.numel() for p in encoder.parameters())


def test_preprocessing_is_saved_with_the_encoder(tmp_path):
    encoder, path = make("vit_micro", channels=1), tmp_path / "encoder.safetensors"
    encoder.preprocessing = encoders.Preprocessing(mean=(0.13,), std=(0.3,))
    encoders.save(encoder, path)
    described = json.loads(path.with_suffix(".json").read_text())
    assert described["preprocessing"] == {"mean": [0.13], "std": [0.3]}
    again = encoders.load(path)
    assert again.preprocessing == encoder.preprocessing
    assert again.settings == encoder.settings
    del described["preprocessing"]
    path.with_suffix(".json").write_text(json.dumps(described))
    assert encoders.load(path).preprocessing == encoders.IMAGENET
    for wrong in ({"mean": [0.5]}, [0.5], {"mean": ["a"], "std": [1]}, {"mean": [0.5], "std": [0]}):
        path.with_suffix(".json").write_text(json.dumps(described | {"preprocessing": wrong}))
        with pytest.raises(encoders.EncoderError, match=r"must be|one per channel"):
            encoders.load(path)


def test_importing_encoders_imports_no_compiler():
    """In the folder of the repository, `encoders` and `tessera.encoders` are one."""
    heavy = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.nn.attention.varlen"]
    code = (
        "import sys, torch, torchvision; before = set(sys.modules); "  # torchvision 0.26 imports torch._dynamo
        "import encoders; encoders.build('vit_micro').train()(torch.zeros(2, 3, 16, 16)); "
        f"print([name for name in {heavy} if name in sys.modules.keys() - before]); "
        "import tessera.encoders; print(encoders.VARIANTS is tessera.encoders.VARIANTS)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\nTrue\n"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", ALL)
@torch.no_grad()
def test_odd_sizes_work_or_are_refused_with_the_reason(variant, size):
    encoder, images = make(variant), images_of(2, *size)
    if variant in WHOLE_PATCHES and (size[0] % encoder.stride or size[1] % encoder.stride):
        with pytest.raises(ValueError, match=r"multiple|divide"):
            encoder(images)
    elif variant in WHOLE_PATCHES and max(size) > 16:
        with pytest.raises(ValueError, match=r"image_size.*positions"):
            encoder(images)
        check_shapes(make(variant, positions="fractional")(images), encoder, images)
    else:
        check_shapes(encoder(images), encoder, images)


@pytest.mark.parametrize("size", [(16, 16), (20, 28), (18, 27)])
@pytest.mark.parametrize("variant", ALL)
@torch.no_grad()
def test_hidden_pixels_do_not_leak(variant, size):
    """New pixels under the mask, bit-equal output; and new pixels elsewhere, another one."""
    if variant in WHOLE_PATCHES:
        size = tuple(side // 4 * 4 for side in size)
    encoder = make(variant, mask_token=True, image_size=32)
    images = images_of(2, *size)
    mask = share_of(encoder, images)
    hidden = under(mask, encoder, images)
    other = images_of(2, *size, seed=1)
    before, after = encoder(images, mask), encoder(torch.where(hidden, other, images), mask)
    check_shapes(before, encoder, images)
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.pooled, after.pooled)
    assert not torch.equal(before.tokens, encoder(torch.where(hidden, images, other), mask).tokens)
    assert not torch.equal(before.tokens, encoder(images).tokens)


@pytest.mark.parametrize("counts", [[8, 8, 8], [3, 15, 9]])
@pytest.mark.parametrize("variant", MICRO)
@torch.no_grad()
def test_visible_features_do_not_depend_on_hidden_pixels(variant, counts):
    """Those who drop hidden tokens need no mask token. Images may have different numbers of visible tokens."""
    encoder = make(variant, mask_token=not encoders.family(variant).can_drop)
    images, other = images_of(3), images_of(3, seed=1)
    grids = encoder.grids(images)
    counts = [count * int(grids[0].prod()) // 16 for count in counts]
    mask = mask_of(grids, counts)
    hidden = under(mask, encoder, images)
    features = encoder.visible(images, mask)
    assert features.tokens.shape == (len(mask.visible), encoder.dim)
    assert torch.equal(features.grids, grids)
    assert helpers.same(encoder.visible(torch.where(hidden, other, images), mask), features)
    assert not helpers.same(encoder.visible(torch.where(hidden, images, other), mask), features)
    for image, tokens in enumerate(features.tokens.split(mask.lengths.tolist())):
        own = Mask.from_hidden(mask.hidden.unflatten(0, (3, -1))[image], grids[:1])
        alone = encoder.visible(images[image : image + 1], own)
        torch.testing.assert_close(alone.tokens, tokens, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone.pooled[0], features.pooled[image], rtol=1e-4, atol=1e-5)
    in_place = make(variant, mask_token=True)
    if encoder.can_drop:
        everything = encoder.visible(images, mask_of(grids, 0))
        torch.testing.assert_close(everything.tokens, encoder(images).tokens, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(features.tokens, in_place(images, mask).tokens[mask.visible])
        with pytest.raises(encoders.EncoderError, match="needs a mask token"):
            make(variant).visible(images, mask)


@pytest.mark.parametrize("variant", ALL)
@torch.no_grad()
def test_images_do_not_see_each_other(variant):
    encoder, images = make(variant), images_of(3)
    changed = torch.cat([images[:1], images_of(1, seed=5), images[2:]])
    for mask in (None, share_of(make(variant, mask_token=True), images)):
        encoder = make(variant, mask_token=mask is not None)
        before, after = encoder(images, mask), encoder(changed, mask)
        each = len(before.tokens) // 3
        for image in (0, 2):
            assert torch.equal(before.pooled[image], after.pooled[image])
            part = slice(image * each, (image + 1) * each)
            assert torch.equal(before.tokens[part], after.tokens[part])
        assert not torch.equal(before.pooled[1], after.pooled[1])
        alone = encoder(images[:1], mask and Mask.from_hidden(mask.hidden[:each], encoder.grids(images[:1])))
        torch.testing.assert_close(before.pooled[:1], alone.pooled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", MICRO)
def test_tokens_lie_in_the_order_of_patches(variant):
    """The centre of what a token answers to moves down with its row and to the right with its column."""
    rows, columns = 4, 6
    stride = make(variant).stride
    torch.manual_seed(0)  # fresh weights: attention is still even
    encoder = encoders.build(variant, image_size=columns * stride).eval()
    images = images_of(2, rows * stride, columns * stride).requires_grad_()
    tokens = encoder(images).tokens.unflatten(0, (2, rows, columns))
    direction = torch.randn(encoder.dim)
    centres = torch.zeros(rows, columns, 2)
    for row in range(rows):
        for column in range(columns):
            (gradient,) = torch.autograd.grad(tokens[1, row, column] @ direction, images, retain_graph=True)
            assert gradient[0].abs().max() == 0
            strength = gradient[1].square().sum(0)  # (H, W)
            strength = strength / strength.sum()
            places = torch.stack(torch.meshgrid(*map(torch.arange, strength.shape), indexing="ij"))
            centres[row, column] = (places * strength).sum((1, 2))
    assert (centres[..., 0].mean(1).diff() > 0).all()
    assert (centres[..., 1].mean(0).diff() > 0).all()


TRAINED: list[tuple[str, str, dict[str, Any]]] = [
    *((use, name, {"drop_path": 0.2}) for name in ALL for use in ("pooled", "in place")),
    *(("drop", name, {}) for name in DROPPING),
    *(("packed", name, {}) for name in PACKING),
    ("pooled", "vit_micro", {"layer_scale": 0.1, "registers": 2, "qk_norm": True}),
    ("pooled", "vit_micro", {"pool": "mean", "distillation_token": True}),
    ("pooled", "vit_micro", {"pool": "all", "patch_norm": True, "head_dim": 10, "qkv_bias": False}),
    ("drop", "vit_micro", {"positions": "sincos"}),
    ("drop", "vit_micro", {"pool": "mean"}),
    ("logits", "vit_micro", {"distillation_token": True, "classes": 4}),
    ("logits", "vit_micro", {"representation_size": 10, "classes": 4, "checkpoint_activations": True}),
    ("packed", "navit_micro", {"pool": "mean"}),
    ("packed", "navit_micro", {"positions": "fractional", "token_drop": 0.2}),
]


@pytest.mark.parametrize(("use", "variant", "settings"), TRAINED)
def test_every_trained_parameter_gets_a_gradient(use, variant, settings):
    encoder = make(variant, mask_token=use == "in place", **settings).train()
    images = images_of(4)
    if use == "logits":
        scores = encoder.logits(images)
        output = torch.cat(scores) if isinstance(scores, tuple) else scores
    elif use == "packed":
        output = encoder(pack([images, images_of(2, 8, 12)], encoder.stride)).pooled
    else:
        mask = None if use == "pooled" else share_of(encoder, images)
        output = encoder(images, mask, drop=use == "drop").pooled
    output.square().mul(torch.arange(output.shape[-1])).sum().backward()
    trained = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    assert [n for n, p in trained.items() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()] == []
    fixed = {name for name, _ in encoder.named_parameters()} - trained.keys()
    assert fixed == ({"pos_embed"} if settings.get("positions") == "sincos" else set())


@pytest.mark.parametrize("variant", ALL)
@torch.no_grad()
def test_hidden_tokens_become_the_mask_token_at_their_positions(variant):
    """In front of the first block, where several patches may form a token."""
    encoder, images = make(variant, mask_token=True, image_size=32), images_of(2, 20, 28)
    grids, patch = encoder.grids(images), encoder.settings["patch_size"]
    mask, everything = (mask_of(grids, tokens) for tokens in (7, grids.prod(1).tolist()))
    hidden = under(mask, encoder, images)[:, 0, ::patch, ::patch].flatten(1)  # (B, patches)

    def patches(*inputs: Any) -> torch.Tensor:
        x = helpers.first_input(encoder, *inputs)
        return x.reshape(2, -1, x.shape[-1])[:, -hidden.shape[1] :]

    plain, masked, replaced = patches(images), patches(images, mask), patches(images, everything)
    assert torch.equal(masked, torch.where(hidden[..., None], replaced, plain))
    token = encoder.mask_token.clone()
    for name, parameter in encoder.named_parameters():
        if "patch_embed" in name or name == "mask_token":
            parameter.zero_()
    positions = patches(images)
    assert torch.equal(patches(images, mask), positions)
    torch.testing.assert_close(replaced - positions, token.expand_as(positions), rtol=1e-5, atol=1e-5)


SPLIT = [name for name in ALL if type(make(name)).intermediate is encoders.Encoder.intermediate]
"""Encoders whose features after a block do not need a part behind the last one."""


@pytest.mark.parametrize("variant", SPLIT)
@torch.no_grad()
def test_intermediate_features_are_those_of_a_shallower_encoder(variant):
    encoder, images = make(variant), images_of(2)
    shallow = make(variant, **shallower(encoder))
    shallow.load_state_dict({k: v for k, v in encoder.state_dict().items() if k in shallow.state_dict()})
    blocks, fewer = len(blocks_of(encoder)), len(blocks_of(shallow))
    features = encoder.intermediate(images, 1 + blocks - fewer)
    assert helpers.same(features[0], shallow(images))
    assert helpers.same(features[-1], encoder(images))
    for count in (0, blocks + 1):
        with pytest.raises(ValueError, match=f"{count} blocks .* must be from 1 to"):
            encoder.intermediate(images, count)


@needs_extra("formats")
@pytest.mark.parametrize("variant", [v for v in ALL if v != "navit_micro" and "vit-pytorch" not in v])
@torch.no_grad()
def test_other_numbers_of_channels(variant, tmp_path):
    encoder = make(variant, channels=5)
    assert encoder(torch.randn(1, 5, 16, 16)).pooled.isfinite().all()
    with pytest.raises(ValueError, match=r"\(B, 5, H, W\).*channels=N"):
        encoder(images_of(1))
    three = make(variant)
    report = encoders.load_weights(encoder, three.state_dict())
    assert any("from 3 to 5 channels" in line for line in report.resized)
    six = make(variant, channels=6)
    report = encoders.load_weights(six, three.state_dict())
    assert report.resized[0].endswith(".proj.weight repeated cyclically from 3 to 6 channels, times 3/6")
    images = images_of(2)
    torch.testing.assert_close(six(images.repeat(1, 2, 1, 1)).pooled, three(images).pooled, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("variant", ALL)
@torch.no_grad()
def test_saved_and_loaded_it_is_the_same(variant, tmp_path):
    encoder = make(variant, mask_token=True, image_size=(16, 32))
    encoders.save(encoder, tmp_path / "encoder.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["encoder.json", "encoder.safetensors"]
    assert json.loads((tmp_path / "encoder.json").read_text())["variant"] == encoder.settings["variant"]
    again = encoders.load(tmp_path / "encoder.safetensors")
    assert not again.training
    assert again.settings == encoder.settings
    assert list(again.state_dict()) == list(encoder.state_dict())
    assert helpers.same(again(images_of(2)), encoder(images_of(2)))


@pytest.mark.parametrize("variant", ALL)
def test_recomputed_activations_change_nothing(variant):
    """Also with drop path, whose rate rises from block to block."""
    found = []
    for recompute in (False, True):
        encoder, calls = make(variant, drop_path=0.5, checkpoint_activations=recompute).train(), []
        blocks = blocks_of(encoder)
        rates = torch.linspace(0, 0.5, len(blocks)).tolist()
        assert [block.drop_path.rate for block in blocks] == pytest.approx(rates)
        blocks[0].norm1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found.append(helpers.outputs(encoder, images_of(4))[1])
        assert len(calls) == 1 + recompute
    assert torch.equal(*found)


COMPILED = [
    ("vit_micro", False, False),
    *((variant, True, False) for variant in MICRO),  # the forward pass compiles as without recomputation
    *((variant, "selective", False) for variant in ("vit_micro", "rope_vit_micro")),
    *(
        (variant, recompute, True)
        for variant in ("vit_micro", "rope_vit_micro")
        for recompute in (False, True, "selective")
    ),
]


@pytest.mark.parametrize(
    ("variant", "recompute", "skip_dropped"),
    [
        pytest.param(*case, marks=pytest.mark.medium if case == ("vit_micro", False, False) else pytest.mark.slow)
        for case in COMPILED
    ],
)
def test_compiled_blocks_change_nothing(variant, recompute, skip_dropped, monkeypatch):
    """Gradients of crops of two sizes with drop path, in one stage where there are several.

    No block pins memory, which torch cannot compile but copies to a GPU need. Blocks of fixed sizes have no symbolic
    size: each crop size has graphs of its own.
    """

    def copy_as_to_a_gpu(numbers, device):
        return numbers.pin_memory() if torch.compiler.is_dynamo_compiling() else numbers.to(device)

    torch.compiler.reset()
    counters.clear()
    own = {"checkpoint_activations": recompute} | ({"skip_dropped": True} if skip_dropped else {})
    given = make(variant).settings
    staged = [name for name in ("dims", "depths", "heads", "reductions") if "depths" in given and name in given]
    one_stage = {name: given[name][:1] for name in staged}
    sized = {"image_size": 32} if "image_size" in given else {}
    drop = {"drop_path": 0.5} if "drop_path" in given else {}
    encoder = make(variant, **one_stage, **own, **sized, **drop).train()
    views = [images_of(4, 32, 32), images_of(8)]
    graphs = Graphs()

    def gradients(step):
        encoder.zero_grad()
        torch.manual_seed(1)
        with random_keys(0, step, torch.arange(4)):
            pooled, _ = encode(encoder, views)
        (pooled * torch.arange(pooled.shape[1])).sum().backward()
        return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])

    expected = [gradients(step) for step in range(2)]
    for module in ("segments", "drop_path", "rope"):
        monkeypatch.setattr(f"tessera.encoders.{module}.copy_to_device", copy_as_to_a_gpu)
    compile_blocks(encoder, fixed_sizes=True, backend=graphs)
    first = 0
    for step, wanted in enumerate(expected):
        first = graphs.count
        torch.testing.assert_close(gradients(step), wanted, rtol=1e-4, atol=1e-3 * wanted.abs().mean().item())
    assert graphs.count > 0
    if not skip_dropped:  # otherwise, the number of images that keep a branch differs from block to block
        assert graphs.symbolic == 0
        assert graphs.count == first, "the second step compiled again"
    else:  # what a block reads of its images was computed before; only attention by runs is not compiled
        assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])
    torch.compiler.reset()


class Graphs:
    """Backend of torch.compile that counts graphs, and those with a symbolic size among their inputs."""

    def __init__(self) -> None:
        self.count = self.symbolic = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        sizes = [size for one in inputs for size in (one.shape if isinstance(one, torch.Tensor) else [one])]
        self.count += 1
        self.symbolic += any(isinstance(size, torch.SymInt) for size in sizes)
        return lookup_backend("aot_eager")(module, inputs)


@pytest.mark.parametrize("variant", MICRO)
def test_what_does_not_fit_is_refused(variant):
    encoder, masking = make(variant), make(variant, mask_token=True)
    images = images_of(2)
    mask = share_of(masking, images)
    thin = 0 if variant in PADDING else encoder.settings["patch_size"] - 1
    cases = [
        (masking, (images.byte(),), {}, "normalised floats, not torch.uint8"),
        (masking, (images[0],), {}, r"\(B, 3, H, W\)"),
        (encoder, (images, mask), {}, "mask_token=True"),
        (masking, (images[:1], mask), {}, "does not fit 1 images"),
        (masking, (images,), {"drop": True}, "needs a mask"),
        (masking, (images[..., :thin],), {}, "smaller than one patch"),
    ]
    if variant in DROPPING:
        everything = mask_of(encoder.grids(images), [3, 16])
        cases.append((encoder, (images, everything), {"drop": True}, "at least one token.*hides all tokens of image 1"))
    else:
        cases.append((masking, (images, mask), {"drop": True}, "cannot drop hidden tokens"))
    if variant not in PACKING:
        cases.append((masking, (pack([images], encoder.stride),), {}, "not packed images"))
    for asked, inputs, options, message in cases:
        with pytest.raises(ValueError, match=message):
            asked(*inputs, **options)


def packing(variant: str, **settings) -> encoders.Encoder:
    """An encoder for packed images of any size."""
    return make(variant, **({"positions": "fractional"} if variant in WHOLE_PATCHES else {}), **settings)


VIEWS = [images_of(2, 8, 20), images_of(3, 12, 12, seed=1), images_of(1, 4, 28, seed=2)]


@pytest.mark.parametrize("variant", PACKED)
@torch.no_grad()
def test_packed_equals_single(variant):
    encoder = packing(variant)
    packed = encoder(pack(VIEWS, encoder.stride))
    singles = [encoder(image[None]) for view in VIEWS for image in view]
    torch.testing.assert_close(packed.pooled, torch.cat([f.pooled for f in singles]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.tokens, torch.cat([f.tokens for f in singles]), rtol=1e-5, atol=1e-5)
    for found, *separate in zip(
        encoder.intermediate(pack(VIEWS, encoder.stride), 2),
        *(encoder.intermediate(view, 2) for view in VIEWS),
        strict=True,
    ):
        torch.testing.assert_close(found.tokens, torch.cat([f.tokens for f in separate]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("variant", PACKED)
@torch.no_grad()
def test_masks_of_packed_images_are_those_of_single_images(variant, drop):
    """The masks hide another number of tokens in each image."""
    encoder = packing(variant, mask_token=True)
    packed = pack(VIEWS, encoder.stride)
    hidden = torch.rand(int(packed.lengths.sum()), generator=torch.Generator().manual_seed(3)) < 0.4
    found = encoder(packed, Mask.from_hidden(hidden, packed.grids), drop=drop)
    singles, parts = [image[None] for view in VIEWS for image in view], hidden.split(packed.lengths.tolist())
    masks = [Mask.from_hidden(part, encoder.grids(image)) for image, part in zip(singles, parts, strict=True)]
    expected = [encoder(image, mask, drop=drop) for image, mask in zip(singles, masks, strict=True)]
    torch.testing.assert_close(found.pooled, torch.cat([f.pooled for f in expected]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.tokens, torch.cat([f.tokens for f in expected]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", PACKING)
def test_gradients_of_packed_images_are_those_of_single_views(variant):
    packed, separate = (packing(variant, drop_path=0.0).train() for _ in range(2))
    features = packed(pack(VIEWS, packed.stride))
    (features.pooled.square().sum() + features.tokens.square().sum()).backward()
    for view in VIEWS:
        features = separate(view)
        (features.pooled.square().sum() + features.tokens.square().sum()).backward()
    for (name, one), (_, other) in zip(packed.named_parameters(), separate.named_parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert (one.grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-6, name

"""MAE against transformers' implementation with the same weights, and its loss against the formula in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEConfig, ViTMAEForPreTraining

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch
from tessera.data.collate import collate
from tessera.encoders.images import Mask, PackedImages, pack
from tessera.pretrain.methods.mae import MAE, MAEConfig, mae_loss, make_decoder, resolve
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tests.views import batch_of

TINY = {"dim": 24, "depth": 2, "heads": 2, "patch_size": 8}
SMALL = {"size": 32, "decoder_dim": 16, "decoder_depth": 2, "decoder_heads": 2}

# transformers' names, ours
NAMES = {
    "vit.embeddings.patch_embeddings.projection": "encoder.patch_embed.proj",
    "vit.embeddings.position_embeddings": "encoder.pos_embed",
    "vit.embeddings.cls_token": "encoder.cls_token",
    "vit.layernorm.": "encoder.norm.",
    "vit.layers.": "encoder.blocks.",
    "decoder.decoder_layers.": "decoder.blocks.",
    "decoder.decoder_": "decoder.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.q_proj": "attn.qkv",
    "attention.o_proj": "attn.proj",
}
PUBLISHED = RunSize(1_281_167, 4, 10)
"""Size of a data set for which the published settings are the defaults."""


def make(variant: str = "vit_micro", encoder: dict | None = None, **settings) -> MAE:
    torch.manual_seed(0)
    config, _ = resolve(MAEConfig(**(SMALL | settings)), OptimConfig(), PUBLISHED)
    defaults = MAE.encoder_defaults(config, variant, PUBLISHED)
    return MAE(encoders.build(variant, **(defaults | (TINY if encoder is None else encoder))), config, 10)


def batch_for(method: MAE, images: int = 3, seed: int = 0) -> Batch:
    """Noise pictures of many sizes through the method's own transform."""
    rngs = [np.random.default_rng([seed, i]) for i in range(images)]
    pictures = [torch.from_numpy(r.integers(0, 256, (3, *r.integers(20, 90, 2)), dtype=np.uint8)) for r in rngs]
    return to_model_input(collate(method.transform(), pictures, rngs))


def oracle_of(method: MAE, *, normalize: bool) -> ViTMAEForPreTraining:
    """transformers' MAE with random weights, which `method` gets too."""
    config = ViTMAEConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=64,
        layer_norm_eps=1e-6,
        norm_pix_loss=normalize,
    )
    oracle, generator = ViTMAEForPreTraining(config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name != "decoder.decoder_pos_embed":
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        oracle.decoder.decoder_pos_embed.copy_(torch.from_numpy(positions(4, 16))[None])
    weights, state = oracle.state_dict(), {}
    for name, tensor in weights.items():
        if "k_proj" in name or "v_proj" in name or "decoder_pos_embed" in name:
            continue
        if "q_proj" in name:
            tensor = torch.cat([weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
        for old, new in NAMES.items():
            name = name.replace(old, new)
        state[name] = tensor.squeeze(0) if name == "decoder.mask_token" else tensor
    method.load_state_dict(state)
    return oracle


def positions(side: int, dim: int) -> np.ndarray:
    """(1 + side ** 2, dim): zeros for the class token, then sines and cosines of the column, and of the row."""
    table = [[0.0] * dim]
    for row in range(side):
        for column in range(side):
            angles = [[place / 10000 ** (4 * i / dim) for i in range(dim // 4)] for place in (column, row)]
            table.append([f(a) for angle in angles for f in (np.sin, np.cos) for a in angle])
    return np.array(table, dtype=np.float32)


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_and_gradients_equal_those_of_transformers(normalize: bool) -> None:
    method = make(normalize_targets=normalize)
    oracle = oracle_of(method, normalize=normalize)
    batch = batch_for(method)
    (mask,) = batch.views[0].masks
    assert mask.lengths.tolist() == [4, 4, 4]  # int(16 * 0.25)
    noise = torch.arange(16.0) + 100 * mask.hidden.view(3, 16)  # visible ones first, in their order
    expected = oracle(batch.views[0].images, noise=noise).loss
    loss, _ = method(batch, 0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    theirs = SimpleNamespace(**{name.replace(".", "_"): p.grad for name, p in oracle.named_parameters()})
    for ours, name in [
        ("encoder.patch_embed.proj.weight", "vit_embeddings_patch_embeddings_projection_weight"),
        ("encoder.cls_token", "vit_embeddings_cls_token"),
        ("encoder.blocks.0.mlp.fc1.weight", "vit_layers_0_mlp_fc1_weight"),
        ("decoder.mask_token", "decoder_mask_token"),
        ("decoder.blocks.1.attn.proj.weight", "decoder_decoder_layers_1_attention_o_proj_weight"),
        ("decoder.pred.bias", "decoder_decoder_pred_bias"),
    ]:
        grad, expected_grad = method.get_parameter(ours).grad, getattr(theirs, name)
        torch.testing.assert_close(grad, expected_grad.view_as(grad), rtol=1e-4, atol=1e-5, msg=lambda t, n=ours: n + t)


def test_small_data_has_mean_pooling_a_light_decoder_and_a_higher_learning_rate() -> None:
    small = RunSize(4809, 64, 1000)
    config, optim = resolve(MAEConfig(), OptimConfig(), small)
    assert optim.scaled_lr(64) == pytest.approx(4e-3 * (64 / 1024) ** 0.5, rel=1e-2)
    assert MAE.encoder_defaults(config, "vit_micro", small)["pool"] == "mean"
    assert "pool" not in MAE.encoder_defaults(config, "vit_micro", PUBLISHED)
    published, _ = resolve(MAEConfig(), OptimConfig(), PUBLISHED)
    expected = {(config, 2): (1, 64), (published, 2): (2, 128), (config, 12): (8, 128), (published, 12): (8, 128)}
    for (settings, depth), size in expected.items():  # blocks of the encoder -> blocks and width of the decoder
        encoder = encoders.build("vit_micro", **(TINY | {"dim": 128, "depth": depth}))
        decoder = make_decoder(encoder, settings, drop=True)
        assert (len(decoder.blocks), decoder.pred.in_features) == size
        assert not make_decoder(encoder, settings, drop=False).blocks


def test_published_parameter_counts_of_encoder_and_decoder() -> None:
    """Less the decoder's table of positions, which is a constant here and a parameter without gradient there."""
    counts = {"vit_base": 111_907_840, "vit_large": 329_541_888, "vit_huge": 657_074_508}
    for variant, expected in counts.items():
        config, _ = resolve(MAEConfig(), OptimConfig(), PUBLISHED)
        with torch.device("meta"):
            defaults = MAE.encoder_defaults(config, variant, PUBLISHED)
            encoder = encoders.build(variant, **defaults)
            method = MAE(encoder, config, 10)
        table = 512 * (1 + (224 // encoder.stride) ** 2)
        assert sum(p.numel() for p in method.parameters()) + table == expected, variant


def test_loss_is_the_mean_over_images_of_the_mean_over_hidden_tokens() -> None:
    grids = torch.tensor([[1, 3], [2, 2]])
    hidden = torch.tensor([True, False, True, False, True, False, False])
    mask = Mask.from_hidden(hidden, grids)
    generator = torch.Generator().manual_seed(0)
    predicted, target = (torch.randn(7, 5, generator=generator) for _ in range(2))
    p, t = predicted.double().numpy(), target.double().numpy()
    per_token = [np.mean([(p[i, j] - t[i, j]) ** 2 for j in range(5)]) for i in range(7)]
    expected = ((per_token[0] + per_token[2]) / 2 + per_token[4]) / 2
    assert mae_loss(predicted, target, mask, grids).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("variant", "encoder", "settings", "drop", "depth"),
    [
        ("vit_micro", TINY, {"decoder_depth": None, "decoder_dim": None, "decoder_heads": None}, True, 2),
        ("vit_micro", TINY | {"depth": 12}, {"decoder_depth": None}, True, 8),
        ("vit_micro", TINY, {"drop": False, "decoder_depth": None}, False, 0),
        ("vit_micro", TINY, {"drop": False}, False, 2),
        ("vit_micro", TINY | {"pool": "mean"}, {}, True, 2),
        ("vit_micro", TINY | {"class_token": False, "pool": "mean"}, {"drop": False}, False, 2),
        ("navit_micro", {}, {"decoder_depth": None, "size": 16}, True, 2),
        ("navit_micro", {}, {"native": True, "size": 16, "smallest_size": 12, "token_budget": 40}, True, 2),
        ("navit_micro", {}, {"native": True, "size": 16, "drop": False, "token_budget": 40}, False, 2),
    ],
)
def test_every_trained_parameter_gets_a_gradient(variant, encoder, settings, drop, depth) -> None:
    method = make(variant, encoder, **settings)
    assert (method.drop, len(method.decoder.blocks)) == (drop, depth)
    loss, metrics = method(batch_for(method, 4), 0)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert metrics["prediction_spread"] > 0
    loss.backward()
    assert [name for name, p in method.named_parameters() if p.requires_grad and p.grad is None] == []


def test_packed_images_have_the_losses_of_single_ones() -> None:
    method = make("navit_micro", {}, native=True, size=16, smallest_size=12, token_budget=40)
    batch = batch_for(method, 5)
    assert isinstance(batch.views[0].images, PackedImages)
    assert len({tuple(grid) for grid in batch.views[0].images.grids.tolist()}) > 1
    (mask,) = batch.views[0].masks
    loss, _ = method(batch, 0)
    singles = []
    hidden = mask.hidden.split(batch.views[0].images.lengths.tolist())
    for image, h in zip(batch.views[0].images.unpack(), hidden, strict=True):
        alone = pack([image[None]], 4)
        singles.append(method(batch_of([alone], mask=Mask.from_hidden(h, alone.grids)), 0)[0])
    torch.testing.assert_close(loss, torch.stack(singles).mean(), rtol=1e-5, atol=0)


def test_hidden_pixels_reach_the_loss_only_as_targets() -> None:
    method = make(normalize_targets=False).eval()
    batch = batch_for(method)
    (mask,) = batch.views[0].masks
    seen: list[torch.Tensor] = []
    method.decoder.register_forward_hook(lambda _, __, out: seen.append(out))
    method(batch, 0)
    hidden = mask.hidden.view(3, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    changed = batch_of([torch.where(hidden, 7.0, batch.views[0].images)], mask=mask)
    method(changed, 0)
    assert torch.equal(seen[0], seen[1])


def test_panels_show_the_image_what_is_visible_and_what_is_predicted() -> None:
    method = make()
    batch = batch_for(method)
    rows = method.panels(batch, 2)["reconstruction"]
    assert method.training
    assert len(rows) == 2
    (mask,) = batch.views[0].masks
    hidden = mask.hidden.view(3, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    for (original, seen, filled), image, h in zip(rows, batch.views[0].images, hidden, strict=False):
        torch.testing.assert_close(original, image, rtol=0, atol=0)
        assert torch.equal(seen, torch.where(h, 0.0, image))
        assert torch.equal(filled.masked_fill(h, 0.0), seen)
        assert not torch.allclose(filled, original)


@pytest.mark.parametrize(
    ("variant", "encoder", "settings", "message"),
    [
        ("vit_micro", TINY, {"size": 30}, "mae.size 30 is not a multiple of 8, .* Set mae.size to 24 or 32"),
        ("swin_micro", {}, {"native": True}, "Swin takes only images of one size. Set mae.native to false"),
        ("vit_micro", TINY, {"token_budget": 100}, "need native images. Set mae.native to true"),
        ("vit_micro", TINY, {"decoder_heads": 3}, "mae.decoder_dim 16 is not a multiple of mae.decoder_heads 3"),
        ("vit_micro", TINY, {"decoder_depth": 0}, "needs features of all tokens"),
        ("swin_micro", {}, {"drop": True}, "Swin cannot drop hidden tokens"),
    ],
)
def test_what_cannot_be_is_refused(variant, encoder, settings, message) -> None:
    if variant not in encoders.VARIANTS:
        pytest.skip(f"there is no {variant} yet")
    with pytest.raises(ValueError, match=message):
        make(variant, encoder, **settings)


def test_native_sizes_that_cannot_be_are_refused() -> None:
    for settings, message in (
        ({"smallest_size": 3}, "smallest_size is 3. Use at least 4"),
        ({"token_budget": 15}, "An image of 16 tokens does not fit into a token_budget of 15"),
    ):
        with pytest.raises(ValueError, match=message):
            make("navit_micro", {}, native=True, size=16, **settings).transform()


def test_the_published_recipe_is_what_is_not_set() -> None:
    config, optim = resolve(MAEConfig(), OptimConfig(), RunSize(1_281_167, 4096, 312 * 800))
    assert (config.size, config.scale, config.flip, config.mask_ratio) == (224, (0.2, 1.0), 0.5, 0.75)
    assert (optim.lr, optim.min_lr, optim.warmup_steps, optim.weight_decay) == (1.5e-4, 0.0, 40 * 312, 0.05)
    assert (optim.weight_decay_end, optim.betas, optim.clip) == (0.05, (0.9, 0.95), 0.0)
    assert not optim.reach_lr_in_warmup


@pytest.mark.parametrize("variant", ["vit_micro", "swin_micro", "navit_micro"])
def test_images_that_are_not_square(variant) -> None:
    """The loss of a batch of 16 x 24 pixels, from what the decoder predicts for its 4 x 6 tokens of 4 pixels."""
    method = make(variant, {"image_size": 24} if variant == "navit_micro" else {}, size=16)
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    hidden = torch.rand(2, 24, generator=torch.Generator().manual_seed(1)).argsort(1).argsort(1) < 18
    mask = Mask.from_hidden(hidden.flatten(), method.encoder.grids(images))
    seen: list[torch.Tensor] = []
    method.decoder.register_forward_hook(lambda _, __, out: seen.append(out))
    loss, _ = method(batch_of([images], mask=mask), 0)
    errors = []
    for b, row, column in ((b, r, c) for b in range(2) for r in range(4) for c in range(6)):
        if hidden[b, 6 * row + column]:
            patch = images[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].permute(1, 2, 0).flatten().double()
            target = (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()
            errors.append((seen[0][24 * b + 6 * row + column].double() - target).square().mean())
    torch.testing.assert_close(loss.double(), torch.stack(errors).mean(), rtol=1e-5, atol=0)

"""Files of DINOv2 and DINOv3: Meta's names through timm's own converters, training checkpoints, exports, refusals."""

import json
from typing import Any

import pytest
import timm
import torch
from timm.models import eva, vision_transformer
from torch import Tensor

from tessera import encoders
from tessera.encoders import build, load_weights
from tessera.encoders.images import Mask
from tessera.extras.exports import command as export
from tessera.extras.formats import rope_vit, vit
from tessera.extras.formats.transformers_export import to_transformers
from tests.encoders.helpers import images_of, scramble
from tests.encoders.test_rope_vit import small

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LARGER = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(1))


def of_transformers(**options) -> Any:
    models = pytest.importorskip("transformers.models.dinov3_vit", reason="transformers is not installed")
    size = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 192}
    size |= {"patch_size": 8, "image_size": 32, "num_register_tokens": 4}
    return scramble(models.DINOv3ViTModel(models.DINOv3ViTConfig(**size | options)))


@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_it_equals_transformers_with_and_without_masks(gated):
    width = {"use_gated_mlp": True, "intermediate_size": 128, "hidden_act": "silu"} if gated else {}
    oracle, encoder = of_transformers(**width), small(mlp="swiglu" if gated else "gelu", mask_token=True)
    assert load_weights(encoder, oracle.state_dict()).fresh == ["rope_embed.periods"]
    for size in ((32, 32), (40, 24)):
        images = images_of(2, 3, *size)
        hidden = torch.rand(2 * size[0] * size[1] // 64, generator=torch.Generator().manual_seed(0)) < 0.3
        for mask in (None, Mask.from_hidden(hidden, encoder.grids(images))):
            masked = None if mask is None else hidden.view(2, -1)
            expected, features = oracle(images, bool_masked_pos=masked), encoder(images, mask)
            torch.testing.assert_close(features.pooled, expected.pooler_output, **CLOSE)
            torch.testing.assert_close(features.tokens, expected.last_hidden_state[:, 5:].flatten(0, 1), **CLOSE)
            if mask is None:
                (found,) = encoder.register_tokens(images)
                torch.testing.assert_close(found, expected.last_hidden_state[:, 1:5], **CLOSE)


def dinov3_of(encoder: encoders.Encoder) -> dict[str, Tensor]:
    """The weights with Meta's names: separate w1 and w2, and a buffer that masks the bias of keys."""
    state = {}
    for name, tensor in encoder.state_dict().items():
        name = name.replace("reg_token", "storage_tokens")
        if ".mlp.w12." in name:
            state[name.replace("w12", "w1")], state[name.replace("w12", "w2")] = tensor.chunk(2)
        else:
            state[name] = tensor
        if name.endswith("qkv.bias"):
            third = len(tensor) // 3
            state[f"{name}_mask"] = torch.tensor([1.0] * third + [0.0] * third + [1.0] * third)
    return state


def dinov2_of(encoder: encoders.Encoder) -> dict[str, Tensor]:
    return {name.replace("reg_token", "register_tokens"): tensor for name, tensor in encoder.state_dict().items()}


def in_chunks(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as DINOv2's training names them, with two blocks in a chunk."""
    named = {}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        named[f"blocks.{int(rest.partition('.')[0]) // 2}.{rest}" if part == "blocks" else name] = tensor
    return named


@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_files_of_dinov3_load_as_timm_loads_them(gated):
    state = dinov3_of(small(mask_token=True, mlp="swiglu" if gated else "gelu", local_cls_norm=True))
    name = f"vit_small{'_plus' if gated else ''}_patch16_dinov3_qkvb"
    options = {"embed_dim": 48, "depth": 3, "num_heads": 3, "patch_size": 8, "img_size": 32, "num_classes": 0}
    options |= {"global_pool": "token"} | ({"mlp_ratio": 8 / 3} if gated else {})
    oracle = timm.create_model(name, **options).eval()
    oracle.load_state_dict(eva.checkpoint_filter_fn(dict(state), oracle), strict=True)
    encoder = small(mlp="swiglu" if gated else "gelu")
    report = load_weights(encoder, state)
    assert sorted(report.left_out) == ["local_cls_norm.bias", "local_cls_norm.weight", "mask_token"]
    assert report.fresh == []
    torch.testing.assert_close(encoder(IMAGES).pooled, oracle(IMAGES), **CLOSE)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("registers", [False, True])
@torch.no_grad()
def test_files_of_dinov2_load_as_timm_loads_them(registers, gated):
    variant = f"vit_small_14_dinov2{'_registers' if registers else ''}"
    settings = {"dim": 48, "depth": 4, "heads": 3, "image_size": 56, "mlp": "swiglu" if gated else "gelu"}
    state = dinov2_of(scramble(build(variant, **settings)))
    assert ("register_tokens" in state) == registers
    name = f"vit_{'giant' if gated else 'small'}_patch14{'_reg4' if registers else ''}_dinov2"
    options = {"embed_dim": 48, "depth": 4, "num_heads": 3, "img_size": 56, "num_classes": 0}
    oracle = timm.create_model(name, **options | ({"mlp_ratio": 256.5 / 48} if gated else {})).eval()
    oracle.load_state_dict(vision_transformer.checkpoint_filter_fn(dict(state), oracle), strict=True)
    for weights_of in (state, in_chunks(state)):
        encoder = build(variant, **settings).eval()
        assert load_weights(encoder, weights_of).fresh == []
        torch.testing.assert_close(encoder(LARGER).pooled, oracle(LARGER), **CLOSE)


@pytest.mark.parametrize("network", ["teacher", "student"])
@torch.no_grad()
def test_training_checkpoints_hold_the_teacher_or_only_the_student(network):
    heads = {"dino_head.mlp.0.weight": torch.ones(2), "ibot_head.last_layer.weight": torch.ones(2)}
    state, others = {"dino_loss.center": torch.zeros(1, 4)}, {"model_ema.backbone.norm.weight": torch.zeros(48)}
    source = small(mask_token=True)
    for name, tensor in dinov3_of(source).items():
        state[f"{network}.backbone.{name}"] = tensor
        if network == "teacher":
            state[f"student.backbone.{name}"] = tensor + 1 if tensor.ndim else tensor
    state |= {f"{network}.{name}": tensor for name, tensor in heads.items()} | others
    for file in (state, {"model": state, "iteration": 3}):
        encoder = small(mask_token=True)
        report = load_weights(encoder, file)
        assert report.fresh == []
        assert {"dino_loss.center", *others} <= set(report.left_out)
        assert torch.equal(encoder(IMAGES).pooled, source(IMAGES).pooled)
    backbone = {f"backbone.{name}": tensor for name, tensor in dinov3_of(source).items()}
    encoder = small(mask_token=True)
    report = load_weights(encoder, {"teacher": backbone | heads})
    assert report.left_out == list(heads)
    assert torch.equal(encoder(IMAGES).pooled, source(IMAGES).pooled)


@torch.no_grad()
def test_periods_are_those_of_the_file():
    """Meta's training rounds them to bf16, and saves them so."""
    source = small()
    source.rope_embed.periods.copy_(source.rope_embed.periods.bfloat16())
    state, encoder = dinov3_of(source), small()
    assert not torch.equal(encoder(IMAGES).tokens, source(IMAGES).tokens)
    load_weights(encoder, {name: t.bfloat16() if "periods" in name else t for name, t in state.items()})
    assert torch.equal(encoder(IMAGES).tokens, source(IMAGES).tokens)


def without(state: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda s: without(s, "periods"), {}, "incomplete. Missing from the checkpoint: rope_embed.periods"),
        (lambda s: without(s, "ls1"), {}, r"Missing from the checkpoint: blocks.0.ls1.gamma.*settings: layer_scale"),
        (lambda s: without(s, "mask_token"), {"registers": 2}, r"storage|reg_token \(1, 4, 48\), not \(1, 2, 48\)"),
        (lambda s: s | {"blocks.0.attn.odd": torch.ones(2)}, {}, "Unknown to the encoder: blocks.0.attn.odd"),
        (lambda s: s, {"mlp": "swiglu"}, r"Unknown to the encoder: blocks.0.mlp.fc1.*settings: mlp, mlp_ratio"),
        (lambda s: s, {"qkv_bias": False}, r"Unknown to the encoder: blocks.0.attn.qkv.bias.*settings: qkv_bias"),
        (lambda s: s, {"mask_key_bias": False}, "Build the encoder with mask_key_bias=True"),
        (lambda s: without(s, "bias_mask"), {}, "Build the encoder with mask_key_bias=False"),
        (lambda s: s | {"blocks.0.attn.qkv.bias_mask": torch.ones(144)}, {}, "masks biases other"),
        (lambda s: s, {"depth": 2}, "3 blocks and patches of 8 pixels. This encoder has width 48, 2 blocks"),
        (lambda s: s, {"heads": 1}, r"periods \(4,\), not \(12,\).*settings: heads"),
        (lambda s: s, {"cls_norm": True}, r"Missing from the checkpoint: cls_norm.bias.*settings: cls_norm"),
    ],
)
def test_files_that_do_not_fit_are_refused(change, settings, message):
    state, encoder = change(dinov3_of(small())), small(**settings)
    with pytest.raises(encoders.WeightsError, match=message):
        load_weights(encoder, state)


def test_a_file_with_a_missing_part_of_a_gate_is_refused():
    state = without(dinov3_of(small(mlp="swiglu")), "blocks.1.mlp.w2.weight")
    with pytest.raises(encoders.WeightsError, match=r"Missing from the checkpoint: blocks\.1\.mlp\.w2\.weight"):
        load_weights(small(mlp="swiglu"), state)


@torch.no_grad()
def test_a_file_of_metas_default_settings_has_key_biases_and_another_epsilon(tmp_path):
    """Without storage tokens and `bias_mask`, as in Meta's recipe for ImageNet-1k."""
    source = small(registers=0, mask_key_bias=False, norm_eps=1e-6)
    state = without(dinov3_of(source), "bias_mask")
    assert not any("storage" in name or "reg_token" in name for name in state)
    torch.save({"teacher": {f"backbone.{name}": tensor for name, tensor in state.items()}}, tmp_path / "meta.pth")
    export.main([str(tmp_path / "meta.pth"), str(tmp_path / "ours.safetensors"), "--set", "heads=3"])
    encoder = encoders.load(tmp_path / "ours.safetensors")
    assert (encoder.settings["mask_key_bias"], encoder.settings["norm_eps"]) == (False, 1e-6)
    assert torch.equal(encoder(IMAGES).pooled, source(IMAGES).pooled)
    masked = small(registers=0)
    with pytest.raises(encoders.WeightsError, match="mask_key_bias=False and norm_eps=1e-06"):
        load_weights(masked, state)


@torch.no_grad()
def test_a_file_of_this_project_without_registers_and_key_biases_loads():
    """It looks like the file above, but the biases of keys are still 0."""
    source = small(registers=0)
    load_weights(source, dinov3_of(source))  # the mask sets the scrambled biases of keys to 0
    state = source.state_dict()
    assert not state["blocks.1.attn.qkv.bias"].chunk(3)[1].any()
    encoder = small(registers=0)
    load_weights(encoder, state)
    assert torch.equal(encoder(IMAGES).pooled, source(IMAGES).pooled)
    assert rope_vit.describe(state)["mask_key_bias"]
    assert rope_vit.describe(state)["norm_eps"] == 1e-5


@pytest.mark.parametrize("variant", [name for name in rope_vit.VARIANTS if not name.endswith("micro")])
def test_files_of_dinov3_are_described_by_the_variant(variant):
    with torch.device("meta"):
        encoder = build(variant)
        described = rope_vit.describe(dinov3_of(encoder))
        assert build(**described).settings == encoder.settings


@pytest.mark.parametrize("variant", [name for name in vit.VARIANTS if "dinov2" in name])
def test_files_of_dinov2_are_described_by_the_variant(variant):
    with torch.device("meta"):
        encoder = build(variant)
        for state in (dinov2_of(encoder), in_chunks(dinov2_of(encoder))):
            assert build(**vit.describe(state)).settings == encoder.settings


@torch.no_grad()
def test_the_command_converts_files_of_meta_and_back_to_timm(tmp_path, capsys):
    source = scramble(build("rope_vit_small", dim=128, heads=2, depth=2))
    torch.save({"teacher": {f"backbone.{name}": t for name, t in dinov3_of(source).items()}}, tmp_path / "meta.pth")
    export.main([str(tmp_path / "meta.pth"), str(tmp_path / "ours.safetensors")])
    ours = encoders.load(tmp_path / "ours.safetensors")
    assert torch.equal(ours(IMAGES).pooled, source(IMAGES).pooled)
    assert json.loads((tmp_path / "ours.json").read_text())["registers"] == 4
    capsys.readouterr()
    export.main([str(tmp_path / "ours.safetensors"), str(tmp_path / "timm.safetensors"), "--to", "timm"])
    call = capsys.readouterr().out.partition("timm.create_model(")[2].strip()
    model = eval(f"timm.create_model({call}", {"timm": timm}).eval()
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(model(images), ours(images).pooled, **CLOSE)
    export.main([str(tmp_path / "timm.safetensors"), str(tmp_path / "again.safetensors")])
    assert torch.equal(encoders.load(tmp_path / "again.safetensors")(images).pooled, ours(images).pooled)


@torch.no_grad()
def test_a_published_file_of_transformers_has_no_prefix_of_layers(tmp_path):
    """The published file names the blocks `layer.N.`, the class in memory `model.layer.N.`."""
    oracle = of_transformers(hidden_size=128, num_attention_heads=2, intermediate_size=512)
    state = {name.replace("model.layer.", "layer."): tensor for name, tensor in oracle.state_dict().items()}
    encoder = build(**rope_vit.describe(state)).eval()
    load_weights(encoder, state)
    torch.testing.assert_close(encoder(IMAGES).pooled, oracle(IMAGES).pooler_output, **CLOSE)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("rope_vit_small", {}),
        ("rope_vit_small_plus", {"mask_token": False, "mask_key_bias": False, "registers": 2}),
        ("vit_small_14_dinov2_registers", {"mlp": "swiglu"}),
        ("vit_small_14_dinov2", {"interpolation": "mae", "channels": 2}),
    ],
)
@torch.no_grad()
def test_transformers_gives_the_same_features(tmp_path, variant, settings, capsys):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    encoder = scramble(build(variant, dim=48, depth=2, heads=3, image_size=56, **settings))
    encoders.save(encoder, tmp_path / "ours.safetensors")
    output = tmp_path / "export" / "model.safetensors"
    output.parent.mkdir()
    export.main([str(tmp_path / "ours.safetensors"), str(output), "--to", "transformers"])
    assert f'AutoModel.from_pretrained("{output.parent}")' in capsys.readouterr().out
    model, info = transformers.AutoModel.from_pretrained(output.parent, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for side in (56, 4 * encoder.stride):
        images = torch.randn(2, settings.get("channels", 3), side, side)
        expected, features = model.eval()(images), encoder(images)
        torch.testing.assert_close(features.pooled, expected.pooler_output, **CLOSE)
        tokens = expected.last_hidden_state[:, encoder.num_prefix_tokens :]
        torch.testing.assert_close(features.tokens, tokens.flatten(0, 1), **CLOSE)
    again = build(**encoder.settings).eval()
    load_weights(again, output)
    torch.testing.assert_close(again(images).tokens, encoder(images).tokens, **CLOSE)


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        ("vit_small", {}, r"it has no layer scale \(give --encoder.layer_scale 1e-5 to the training"),
        ("rope_vit_small", {"pool": "mean"}, "pool is not the class token"),
        ("swin_micro", {}, "no equivalent of Swin"),
        ("vit_micro", {"layer_scale": 1e-5, "mlp_ratio": 3.5}, "mlp_ratio 3.5 is not a whole number"),
    ],
)
def test_what_transformers_has_not_is_refused(variant, settings, message):
    with torch.device("meta"), pytest.raises(encoders.WeightsError, match=message):
        to_transformers(build(variant, **settings))

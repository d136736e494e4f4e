"""Weight formats of the RoPE-ViT (DINOv3, timm, transformers and this project), and export to timm.

Letters in shapes: D is the width of a token, and d is the width of one head.
"""

from typing import Any

import torch
from torch import Tensor

from tessera.encoders import vit
from tessera.encoders.base import Encoder
from tessera.encoders.blocks import Block, MaskedKeyBiasLinear, SwiGLU
from tessera.encoders.errors import WeightsError
from tessera.encoders.layers import modules_of
from tessera.encoders.loading import Report, Source, State
from tessera.encoders.vit import ViT
from tessera.extras.formats.conversion import (
    NO_SCALE,
    adapt_channels,
    check_equivalent,
    check_present,
    check_size,
    checked_names,
    depth_of,
)
from tessera.extras.formats.names import from_dinov3, from_transformers, of_eva, of_transformers

NAME: str = "a RoPE-ViT"
ACCEPTS: tuple[str, ...] = (NAME,)
DECIDES = {
    "reg_token": "registers",
    "mask_token": "mask_token",
    ".gamma": "layer_scale",
    "qkv.bias": "qkv_bias",
    "mlp.fc": "mlp_ratio",
    "mlp.w": "mlp",
    "cls_norm": "cls_norm",
    "local_cls_norm": "local_cls_norm",
    "periods": "heads",
}

FIRST, PERIODS, KEY_MASK = "patch_embed.proj.weight", "rope_embed.periods", ".attn.qkv.bias_mask"
TIMM = {
    (384, 12, 6, False): "vit_small_patch16_dinov3",
    (384, 12, 6, True): "vit_small_plus_patch16_dinov3",
    (768, 12, 12, False): "vit_base_patch16_dinov3",
    (1024, 24, 16, False): "vit_large_patch16_dinov3",
    (1280, 32, 20, True): "vit_huge_plus_patch16_dinov3",
    (4096, 40, 32, True): "vit_7b_patch16_dinov3",
}
"""Map from (width, depth, heads, SwiGLU) to the names of timm's models."""
OPTIONAL = ("head", "projectors", "mask_token", "local_cls_norm")
"""Tensors that are left out unless the encoder has them. Each entry is a tensor name up to its first dot."""
VARIANTS = {name: settings for name, settings in vit.VARIANTS.items() if settings.get("positions") == "rope"}
"""Variants with rotary positions."""


def converts_for(encoder: Encoder) -> bool:
    """Return True for a ViT with rotary positions."""
    return type(encoder) is ViT and encoder.rope_embed is not None


def recognises(state: State) -> bool:
    """Return True if `state` holds weights of a RoPE-ViT."""
    if of_transformers(state):
        return "embeddings.position_embeddings" not in state
    return PERIODS in state or "storage_tokens" in state or of_eva(state)


def fit(encoder: ViT, state: State, source: Source, report: Report) -> State:
    """Return the weights with the encoder's tensor names, including the periods of the rotations.

    Weights of timm and transformers have no periods. In this case, the encoder keeps its own periods. `local_cls_norm`
    is used only in training, so its weights are left out if the encoder has no such norm.
    """
    del source
    check_present(state, [PERIODS] if not of_transformers(state) and not of_eva(state) else [])
    masked, eps = _masks_key_bias(state), _norm_eps(state)
    state, own = named(state), encoder.state_dict()
    check_size(_size(state), (encoder.dim, len(encoder.blocks), encoder.stride), VARIANTS)
    if masked is not None and masked != has_masked_bias(encoder) and "blocks.0.attn.qkv.bias" in own:
        raise WeightsError(
            f"The bias of keys {'counts as 0' if masked else 'has an effect'} in the model of the checkpoint. "
            f"Build the encoder with mask_key_bias={masked} and norm_eps={eps:g}."
        )
    state[FIRST] = adapt_channels(state[FIRST], encoder.channels, FIRST, report)
    fresh = (PERIODS, "mask_token", "head.", "head_dist.", "pre_logits.")
    return checked_names(encoder, state, report, DECIDES, OPTIONAL, fresh)


def named(state: State) -> State:
    """Return the weights with the tensor names of this project. Biases are multiplied by the bias masks of DINOv3."""
    masks = {name: tensor for name, tensor in state.items() if name.endswith(KEY_MASK)}
    state = {name: t * masks[f"{name}_mask"] if f"{name}_mask" in masks else t for name, t in state.items()}
    state = {name: tensor for name, tensor in state.items() if name not in masks}
    return from_transformers(state) if of_transformers(state) else from_dinov3(state)


def _masks_key_bias(state: State) -> bool | None:
    """Return True if the model of the weights ignores the bias of keys, and False if not.

    The result is None if this is unknown or makes no difference.

    A file of Meta has a `bias_mask` exactly if the model ignores the bias. A file of this project without register
    tokens looks like a file of Meta without `bias_mask`, but if it ignores the bias, the bias is still 0, its initial
    value.

    Raises:
        WeightsError: the weights mask biases other than those of all keys.
    """
    for name, mask in state.items():
        if name.endswith(KEY_MASK):
            expected = torch.tensor([[1.0], [0.0], [1.0]]).expand(3, len(mask) // 3)
            if not mask.is_meta and not torch.equal(mask.float().cpu(), expected.flatten()):
                raise WeightsError(
                    f"{name} masks biases other than those of the keys. A RoPE-ViT cannot load such weights."
                )
            return True
    if of_eva(state):
        return True if "blocks.0.attn.q_bias" in state else None
    if of_transformers(state):
        keys = [name for name in state if name.endswith(("layer.0.attention.k_proj.bias", "attention.key.bias"))]
        return not keys
    if "reg_token" in state:  # a file of this project
        return None
    biases = [tensor.chunk(3)[1] for name, tensor in state.items() if name.endswith(".attn.qkv.bias")]
    trained = any(not bias.is_meta and bias.any() for bias in biases)
    return False if trained or (biases and "storage_tokens" in state) else None


def _norm_eps(state: State) -> float:
    """Return the epsilon of the norms of the model.

    Weights do not contain it. Published models have 1e-5. The default settings of Meta's code mask no bias of keys, and
    have 1e-6.
    """
    return 1e-6 if _masks_key_bias(state) is False and not of_transformers(state) else 1e-5


def has_masked_bias(encoder: ViT) -> bool:
    """Return True if the encoder treats the bias of keys as 0."""
    return isinstance(modules_of(encoder.blocks, Block)[0].attn.qkv, MaskedKeyBiasLinear)


def _size(state: State) -> tuple[int, int, int]:
    """Return the width, depth and patch size of weights with the names of this project."""
    check_present(state, (FIRST, "blocks.0.attn.qkv.weight"))
    return state[FIRST].shape[0], depth_of(state), state[FIRST].shape[-1]


def describe(state: State) -> dict[str, Any]:
    """Return arguments for `encoders.build` that make the encoder fit the weights.

    Settings that the weights do not determine are taken from the variant with the same width, depth and kind of MLP. If
    the weights include the periods of the rotations, the periods determine the width of a head. Otherwise, the width is
    that of the variant, or 64 if there is no such variant. The epsilon of the norms is 1e-6 for weights of Meta's code
    whose keys have a bias, and 1e-5 for other weights.

    Raises:
        WeightsError: required tensors are missing, or the number of heads is unknown.
    """
    masked, eps, state = _masks_key_bias(state), _norm_eps(state), named(state)
    gated = "blocks.0.mlp.w12.weight" in state
    second = f"blocks.0.mlp.{'w3' if gated else 'fc2'}.weight"
    dim, depth, patch_size = _size(state)
    check_present(state, (second,))
    hidden = state[second].shape[1]
    same = [
        name for name, s in VARIANTS.items() if (s["dim"], s["depth"], s.get("mlp") == "swiglu") == (dim, depth, gated)
    ]
    variant = same[0] if same else "rope_vit_small"
    head_dim = dim // VARIANTS[variant]["heads"] if same else 64
    head_dim = 4 * len(state[PERIODS]) if PERIODS in state else head_dim
    if dim % head_dim:
        raise WeightsError(
            f"The number of heads is unknown for a width of {dim}. Give the encoder with its width, depth and heads, "
            "such as --encoder rope_vit_small --set dim=D depth=B heads=N."
        )
    multiple = VARIANTS[variant].get("swiglu_multiple", 8)
    return {
        "variant": variant,
        "dim": dim,
        "depth": depth,
        "heads": dim // head_dim,
        "patch_size": patch_size,
        "channels": state[FIRST].shape[1],
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "mask_token": "mask_token" in state,
        "mlp": "swiglu" if gated else "gelu",
        "mlp_ratio": (1.5 if gated else 1) * hidden / dim,
        "swiglu_multiple": multiple if hidden % multiple == 0 else 8 if hidden % 8 == 0 else 1,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "mask_key_bias": True if masked is None else masked,
        "norm_eps": eps,
        "layer_scale": VARIANTS[variant].get("layer_scale", 1.0) if "blocks.0.ls1.gamma" in state else None,
        "cls_norm": "cls_norm.weight" in state,
        "local_cls_norm": "local_cls_norm.weight" in state,
    }


def to_timm(encoder: ViT) -> tuple[str, dict[str, Any], State]:
    """Return a model name and options for `timm.create_model`, and the encoder's weights with timm's tensor names.

    The timm model computes the same features as the encoder. It computes the periods of the rotations itself, so the
    features differ slightly if the encoder's periods are rounded, as in some published weights. The mask token is not
    exported.

    Raises:
        WeightsError: timm has no equivalent model.
    """
    first = modules_of(encoder.blocks, Block)[0]
    eps = first.norm1.eps
    differences = {NO_SCALE: not hasattr(first.ls1, "gamma"), f"norm_eps is {eps:g}, not 1e-5": eps != 1e-5}
    differences["mask_key_bias is not set"] = first.attn.qkv.bias is not None and not has_masked_bias(encoder)
    check_equivalent(differences, "timm")
    gated, bias = isinstance(first.mlp, SwiGLU), first.attn.qkv.bias is not None
    depth, heads = len(encoder.blocks), first.attn.heads
    known = TIMM.get((encoder.dim, depth, heads, gated))
    name = known or ("vit_small_plus_patch16_dinov3" if gated else "vit_small_patch16_dinov3")
    options: dict[str, Any] = {} if known else {"embed_dim": encoder.dim, "depth": depth, "num_heads": heads}
    options |= {"patch_size": encoder.stride, "in_chans": encoder.channels, "num_classes": 0, "qkv_bias": bias}
    options |= {"num_reg_tokens": encoder.num_prefix_tokens - 1, "img_size": encoder.settings["image_size"]}
    options |= {"global_pool": "avg" if encoder.pool == "mean" else "token", "use_fc_norm": False}
    hidden = first.mlp.w3.in_features if isinstance(first.mlp, SwiGLU) else first.mlp.fc2.in_features
    options |= {"mlp_ratio": (hidden + 0.5) / encoder.dim}  # timm rounds the product down
    if gated:
        options["swiglu_align_to"] = 1
    options["rope_temperature"] = rope_base(encoder)
    return name, options, _eva_names(encoder.state_dict(), gated)


def rope_base(encoder: ViT) -> float:
    """Return the base of the periods of the encoder's rotations."""
    assert encoder.rope_embed is not None
    periods = encoder.rope_embed.periods
    if periods.is_meta or len(periods) < 2:
        return encoder.settings["rope_base"]
    return round(float(periods[-1]) ** (len(periods) / (len(periods) - 1)), 2)


def _eva_names(state: State, gated: bool) -> State:
    """Return the weights with the tensor names of timm's DINOv3 models."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("attn.qkv.bias"):
            queries, _, values = tensor.chunk(3)
            found |= {name.replace("qkv.bias", "q_bias"): queries, name.replace("qkv.bias", "v_bias"): values}
        elif ".mlp.w12." in name:
            gate, value = tensor.chunk(2)
            found |= {name.replace("w12", "fc1_g"): gate, name.replace("w12", "fc1_x"): value}
        elif name not in (PERIODS, "mask_token") and not name.startswith("local_cls_norm."):
            name = name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")
            found[name.replace(".mlp.w3.", ".mlp.fc2.") if gated else name] = tensor
    return found

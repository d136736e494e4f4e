"""Export ViTs with the architecture of DINOv2 or DINOv3 to transformers."""

from typing import Any

import torch
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.encoders.blocks import Block, SwiGLU
from tessera.encoders.errors import WeightsError
from tessera.encoders.layers import modules_of
from tessera.encoders.loading import State
from tessera.encoders.navit import NaViT
from tessera.encoders.vit import ViT
from tessera.extras.formats.conversion import NO_SCALE, check_equivalent
from tessera.extras.formats.names import DINOV2, DINOV3, named_as
from tessera.extras.formats.rope_vit import has_masked_bias, rope_base


def to_transformers(encoder: Encoder) -> tuple[dict[str, Any], State]:
    """Return the configuration of an equivalent transformers model, and weights with the names of published files.

    `AutoModel.from_pretrained` loads a folder with both. For images of the encoder's image size, the model computes the
    same features as the encoder. For other sizes, the features are equal only if the model and the encoder resize
    positions by the same rule.

    Raises:
        WeightsError: transformers has no equivalent model.
    """
    if not isinstance(encoder, ViT):
        others = "onnx" if isinstance(encoder, NaViT) else "timm or onnx"
        raise WeightsError(
            f"transformers has no equivalent of {type(encoder).__name__}. Export it with --to ours, or try --to "
            f"{others}."
        )
    rotary, block = encoder.rope_embed is not None, modules_of(encoder.blocks, Block)[0]
    differences = {NO_SCALE: not hasattr(block.ls1, "gamma")}
    differences["pool is not the class token"] = encoder.pool != "class" or encoder.cls_token is None
    if not rotary:
        ratio = encoder.settings["mlp_ratio"]
        differences[f"mlp_ratio {ratio:g} is not a whole number"] = ratio != int(ratio)
        differences["it has norms around the patch embedding (patch_norm)"] = encoder.settings["patch_norm"]
    check_equivalent(differences, "transformers")
    size = encoder.settings["image_size"]
    gated, registers = isinstance(block.mlp, SwiGLU), encoder.num_prefix_tokens - 1
    config: dict[str, Any] = {
        "hidden_size": encoder.dim,
        "num_hidden_layers": len(encoder.blocks),
        "num_attention_heads": block.attn.heads,
        "layer_norm_eps": block.norm1.eps,
        "image_size": size,
        "patch_size": encoder.stride,
        "num_channels": encoder.channels,
    }
    state = _split(encoder, gated)
    if not rotary:
        kind = "Dinov2WithRegisters" if registers else "Dinov2"
        config |= {"model_type": "dinov2_with_registers" if registers else "dinov2", "architectures": [f"{kind}Model"]}
        config |= {"mlp_ratio": int(encoder.settings["mlp_ratio"]), "use_swiglu_ffn": gated}
        config |= {"num_register_tokens": registers} if registers else {"use_mask_token": True}
        config["qkv_bias"] = block.attn.qkv.bias is not None
        return config, named_as(state, DINOV2)
    bias = block.attn.qkv.bias is not None
    config |= {"model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"], "num_register_tokens": registers}
    config |= {"query_bias": bias, "key_bias": bias and not has_masked_bias(encoder), "value_bias": bias}
    hidden = block.mlp.w3.in_features if isinstance(block.mlp, SwiGLU) else block.mlp.fc2.in_features
    config |= {"intermediate_size": hidden, "use_gated_mlp": gated, "hidden_act": "silu" if gated else "gelu"}
    config |= {"rope_theta": rope_base(encoder), "pos_embed_rescale": encoder.settings["rope_rescale"]}
    return config, named_as(state, DINOV3)


def _split(encoder: ViT, gated: bool) -> State:
    """Split tensors that transformers stores separately: queries, keys and values, and gate and value in a RoPE-ViT.

    transformers requires a mask token, so a missing mask token is replaced by zeros.
    """
    rotary, state = encoder.rope_embed is not None, dict[str, Tensor]()
    masked = rotary and has_masked_bias(encoder)
    for name, tensor in encoder.state_dict().items():
        if ".attn.qkv." in name:
            parts = dict(zip("qkv", tensor.chunk(3), strict=True))
            state |= {name.replace("qkv", part): value for part, value in parts.items()}
            if masked and name.endswith("bias"):
                del state[name.replace("qkv", "k")]
        elif rotary and gated and ".mlp.w12." in name:
            state[name.replace("w12", "w1")], state[name.replace("w12", "w2")] = tensor.chunk(2)
        elif not name.startswith(("rope_embed.", "local_cls_norm.")):
            state[name] = tensor
    zeros = torch.zeros_like(encoder.patch_embed.proj.weight[:, 0, 0, 0])[None]
    mask = state.get("mask_token", zeros)
    state["mask_token"] = mask[None] if rotary else mask
    return state

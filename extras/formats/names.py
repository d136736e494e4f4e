"""Tensor names and layouts of other projects, converted to those of this project.

Letters in shapes: D width of a token; h hidden width of a gated MLP.
"""

import re

import torch
from torch import Tensor

from tessera.encoders.errors import WeightsError
from tessera.encoders.loading import State

CHUNKED = re.compile(r"blocks\.\d+\.(\d+)\.")
"""Pattern of block names in DINOv2's training code, `blocks.CHUNK.BLOCK.`. BLOCK is the index of the block in the whole
model."""
BLOCKS = {
    "cls_token": "embeddings.cls_token",
    "mask_token": "embeddings.mask_token",
    "reg_token": "embeddings.register_tokens",
    ".ls1.gamma": ".layer_scale1.lambda1",
    ".ls2.gamma": ".layer_scale2.lambda1",
}
DINOV2 = BLOCKS | {
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
    "blocks.": "encoder.layer.",
    ".attn.q.": ".attention.attention.query.",
    ".attn.k.": ".attention.attention.key.",
    ".attn.v.": ".attention.attention.value.",
    ".attn.proj.": ".attention.output.dense.",
    ".mlp.w12.": ".mlp.weights_in.",
    ".mlp.w3.": ".mlp.weights_out.",
    "norm.": "layernorm.",
}
DINOV3 = BLOCKS | {
    "patch_embed.proj.": "embeddings.patch_embeddings.",
    "blocks.": "layer.",
    ".attn.q.": ".attention.q_proj.",
    ".attn.k.": ".attention.k_proj.",
    ".attn.v.": ".attention.v_proj.",
    ".attn.proj.": ".attention.o_proj.",
    ".mlp.fc1.": ".mlp.up_proj.",
    ".mlp.fc2.": ".mlp.down_proj.",
    ".mlp.w1.": ".mlp.gate_proj.",
    ".mlp.w2.": ".mlp.up_proj.",
    ".mlp.w3.": ".mlp.down_proj.",
}
"""Maps from parts of names in this project to those of DINOv2 and DINOv3 models in transformers. A part without a dot
in front is the start of a name."""
EVA = {
    r"(blocks\.\d+\.)gamma_([12])$": r"\1ls\2.gamma",
    r"(blocks\.\d+\.)attn\.([qv])_bias$": r"\1attn.\2.bias",
    r"(blocks\.\d+\.)mlp\.fc1_g\.": r"\1mlp.w1.",
    r"(blocks\.\d+\.)mlp\.fc1_x\.": r"\1mlp.w2.",
}
"""Map from regular expressions for name prefixes of timm's DINOv3 models to name prefixes in this project."""


def of_other_architecture(state: State) -> str | None:
    """Return the name of a known architecture that no encoder of this project has, or None."""
    first = "blocks.0.attn.qkv.weight" in state and "patch_embed.proj.weight" in state
    positioned = ("pos_embed", "neck.", "rope_embed.", "storage_tokens", "register_tokens")
    if any(re.match(r"blocks\.\d+\.proj\.weight$", name) for name in state):
        return "a Hiera"
    if any(name.startswith("rope.") for name in state):
        return "a ViT of timm with rotary positions"
    if first and any(name.endswith("relative_position_bias_table") for name in state):
        return "a BEiT"
    if first and not of_eva(state) and not any(name.startswith(positioned) for name in state):
        missing = "Missing from the checkpoint: pos_embed"
        return f"a ViT without a position table, such as the ViTs of timm with rotary positions ({missing})"
    if any(name.endswith(".attn.logit_scale") for name in state):
        return "a Swin Transformer V2"
    if any(name.startswith("norm_pre.") for name in state):
        return "a CLIP"
    if any(name.removeprefix("vision_model.").startswith("embeddings.patch_embedding") for name in state):
        return None if of_transformers(state) else "a model of transformers that is neither DINOv2 nor DINOv3"
    return None


def of_transformers(state: State) -> bool:
    """Return True if `state` has the tensor names of a DINOv2 or DINOv3 model in transformers."""
    scaled = any(re.search(r"(^|\.)layer\.0\.layer_scale1\.lambda1$", name) for name in state)
    return "embeddings.cls_token" in state and scaled


def of_eva(state: State) -> bool:
    """Return True if `state` has the tensor names of a DINOv3 model in timm."""
    return "pos_embed" not in state and {"cls_token", "blocks.0.gamma_1", "blocks.0.attn.qkv.weight"} <= set(state)


def renamed(state: State, prefixes: dict[str, str]) -> State:
    """Replace name prefixes. `prefixes` maps regular expressions for prefixes to new prefixes, applied in order."""
    found = {}
    for name, tensor in state.items():
        for pattern, new in prefixes.items():
            name = re.sub(f"^{pattern}", new, name)
        found[name] = tensor
    return found


def named_as(state: State, parts: dict[str, str]) -> State:
    """Return `state` with new names. `parts` maps old to new parts; a part without a dot in front starts the name."""
    found = {}
    for name, tensor in state.items():
        for old, new in parts.items():
            if old.startswith("."):
                name = name.replace(old, new)
            elif name.startswith(old):
                name = new + name.removeprefix(old)
        found[name] = tensor
    return found


def from_transformers(theirs: State) -> State:
    """Convert the weights of a DINOv2 or DINOv3 model of Hugging Face to the tensor names of this project.

    Raises:
        WeightsError: some of the query, key and value weights are missing.
    """
    other = ".mlp.fc" if any(".mlp.gate_proj." in name for name in theirs) else ".mlp.w"
    parts = {new: ours for ours, new in DINOV2.items()}
    parts |= {new: ours for ours, new in DINOV3.items() if not ours.startswith(other)}
    # Depending on the version of transformers, layers have a prefix, and a DINOv2 has the names of DINOv3.
    state = {re.sub(r"^(encoder|model)\.layer\.", "layer.", name): tensor for name, tensor in theirs.items()}
    state = named_as(state, parts | {"layer.": "blocks."})
    if "mask_token" in state:
        state["mask_token"] = state["mask_token"].reshape(1, -1)
    return joined(without_empty_registers(state))


def without_empty_registers(state: State) -> State:
    """Return `state` without the tensor of register tokens if this tensor has no rows."""
    return {name: tensor for name, tensor in state.items() if name != "reg_token" or tensor.numel()}


def joined(state: State) -> State:
    """Join tensors that other projects store separately: queries, keys and values, and gate and value of a SwiGLU.

    A missing bias of queries, keys or values is replaced by zeros if the other biases exist.

    Raises:
        WeightsError: a part of a joint tensor is missing.
    """
    state = dict(state)
    for name in [name for name in state if name.endswith(".attn.q.weight")]:
        block = name.removesuffix("q.weight")
        state[f"{block}qkv.weight"] = torch.cat([_part(state, f"{block}{part}.weight") for part in "qkv"])
    for name in [name for name in state if name.endswith((".attn.q.bias", ".attn.v.bias"))]:
        block = name[: -len("q.bias")]
        if name in state:
            zeros = torch.zeros_like(state[name])
            state[f"{block}qkv.bias"] = torch.cat([state.pop(f"{block}{part}.bias", zeros) for part in "qkv"])
    for name in [name for name in state if re.search(r"\.mlp\.w1\.(weight|bias)$", name)]:
        gate, value = _part(state, name), _part(state, name.replace(".w1.", ".w2."))
        state[name.replace(".w1.", ".w12.")] = torch.cat([gate, value])
    return state


def _part(state: State, name: str) -> Tensor:
    if name not in state:
        raise WeightsError(f"The checkpoint is incomplete. Missing from the checkpoint: {name}.")
    return state.pop(name)


def split_gates(state: State) -> State:
    """Rename the layers of timm's packed SwiGLU. Its first layer has 2 h outputs, and its second layer has h inputs."""
    found = {}
    for name, tensor in state.items():
        block, dot, rest = name.partition(".mlp.")
        first, second = state.get(f"{block}.mlp.fc1.weight"), state.get(f"{block}.mlp.fc2.weight")
        if dot and first is not None and second is not None and len(first) == 2 * second.shape[1]:
            name = f"{block}.mlp." + rest.replace("fc1.", "w12.").replace("fc2.", "w3.")
        found[name] = tensor
    return found


def from_dinov2(state: State) -> State:
    """Return weights of DINOv2 or of timm's ViT with the tensor names of this project."""
    state = {name.replace("register_tokens", "reg_token"): tensor for name, tensor in state.items()}
    return split_gates({CHUNKED.sub(r"blocks.\1.", name): tensor for name, tensor in state.items()})


def from_dinov3(state: State) -> State:
    """Return weights of DINOv3, or of timm's DINOv3 models, with the tensor names of this project."""
    state = {name.replace("storage_tokens", "reg_token"): tensor for name, tensor in state.items()}
    if of_eva(state):
        state = renamed(state, EVA)
        gated = any(".mlp.w1." in name for name in state)
        if gated:
            state = {name.replace(".mlp.fc2.", ".mlp.w3."): tensor for name, tensor in state.items()}
    return joined(without_empty_registers(state))

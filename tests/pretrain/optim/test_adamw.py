import re

import pytest
import torch
from torch import nn

from tessera import encoders
from tessera.pretrain.optim.adamw import (
    OptimConfig,
    adamw,
    apply_schedules,
    clip_gradients,
    flat_blocks,
    layers,
    learning_rate_factors,
    parameter_groups,
)
from tessera.pretrain.optim.schedules import cosine
from tests.pretrain.small import MICRO

RESOLVED = OptimConfig(
    encoder_lr_factor=1.0,
    lr=1e-3,
    min_lr=1e-6,
    warmup_steps=2,
    weight_decay=0.04,
    weight_decay_end=0.4,
    betas=(0.9, 0.999),
    clip=3.0,
)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.last = nn.Linear(4, 3, bias=False)
        self.fixed = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.cls_token = nn.Parameter(torch.ones(1, 1, 4))


def test_groups_split_by_decay_and_freezing() -> None:
    toy = Toy()
    groups = parameter_groups(toy, {"last.": 5})
    names = {id(p): n for n, p in toy.named_parameters()}
    found = {(g["decays"], g["frozen_steps"]): sorted(names[id(p)] for p in g["params"]) for g in groups}
    assert found == {
        (True, 5): ["last.weight"],
        (True, 0): ["body.0.weight", "cls_token"],  # as in DINO, the class token is decayed
        (False, 0): ["body.0.bias", "body.1.bias", "body.1.weight"],
    }


# settings that make all tables; matrices and tables without weight decay by the papers, named in full
UNDECAYED = {
    "vit_micro": ({"mask_token": True, "registers": 2, "qk_norm": True}, r"(?!)"),  # none: DINO decays all of them
    "rope_vit_micro": ({"mask_token": True, "registers": 2}, r"(?!)"),
    "swin_micro": (
        {"mask_token": True, "absolute_positions": True},
        r"absolute_pos_embed|layers\.\d\.blocks\.\d\.attn\.relative_position_bias_table",
    ),
    "twins_svt_micro": ({"mask_token": True}, r"pos_block\.\d\.proj\.0\.weight"),
    "navit_micro": ({"mask_token": True}, r"(blocks\.\d\.attn|attn_pool\.attn)\.[qk]_norm\.gamma"),
    "sam_vit_micro": ({"mask_token": True}, r"pos_embed|blocks\.\d\.attn\.rel_pos_[hw]"),
}


@pytest.mark.parametrize("variant", MICRO)
@pytest.mark.parametrize("prefix", ["encoder.", "student.encoder."])
def test_weight_decay_leaves_alone_what_the_papers_do(variant: str, prefix: str) -> None:
    settings, exempt = UNDECAYED[variant]
    with torch.device("meta"):
        method: nn.Module = nn.ModuleDict({"encoder": encoders.build(variant, **settings)})
        if prefix != "encoder.":
            method = nn.ModuleDict({"student": method, "rel_pos_head": nn.Linear(2, 2)})
    names = {parameter: name for name, parameter in method.named_parameters()}
    decays = {names[p]: group["decays"] for group in parameter_groups(method, {}) for p in group["params"]}
    assert len(decays) == len(names)
    assert decays.get("rel_pos_head.weight", True)  # a name matters in encoders alone
    found = 0
    for parameter, name in names.items():
        inside = name.removeprefix(prefix)
        vector = parameter.ndim == 1 or name.endswith(".bias")
        assert decays[name] == (not vector and not re.fullmatch(exempt, inside)), name
        found += not vector and not decays[name]
    assert (found == 0) == (exempt == r"(?!)")


def test_schedules_reach_the_groups_and_frozen_ones_do_not_move() -> None:
    toy = Toy()
    optimizer = torch.optim.AdamW(parameter_groups(toy, {"last.": 3}), lr=1.0)
    before = toy.last.weight.detach().clone()
    for step in range(5):
        apply_schedules(optimizer, RESOLVED, step, 10, 512)
        lr, decay = cosine(step, 10, 2e-3, 1e-6, 2), cosine(step, 10, 0.04, 0.4)
        for group in optimizer.param_groups:
            assert group["lr"] == (0.0 if group["frozen_steps"] > step else lr)
            assert group["weight_decay"] == (decay if group["decays"] else 0.0)
        (toy.last(toy.body(torch.ones(1, 4))) + toy.cls_token.sum()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(toy.last.weight, before) == (step < 3)


@pytest.mark.parametrize("by", ["tensor", "module", "global"])
@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_clipping_equals_a_loop(by: str, limit: float) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))]
    for p in [p for part in parts for p in part.parameters()]:
        p.grad = torch.randn_like(p)
    grads = [[p.grad.double().clone() for p in part.parameters()] for part in parts]
    flat = [g for part in grads for g in part]
    units = {"tensor": [[g] for g in flat], "module": grads, "global": [flat]}[by]
    for unit in units:
        norm = torch.sqrt(sum((g.square().sum() for g in unit), torch.zeros((), dtype=torch.float64)))
        for g in unit:
            g *= min(1.0, limit / (norm.item() + 1e-6)) if limit else 1.0
    total = clip_gradients([[p.grad for p in part.parameters()] for part in parts], limit, by)
    for p, g in zip([p for part in parts for p in part.parameters()], flat, strict=True):
        torch.testing.assert_close(p.grad.double(), g, rtol=1e-6, atol=1e-8)
    if limit == 0:
        expected = torch.nn.utils.get_total_norm([p.grad for part in parts for p in part.parameters()])
        torch.testing.assert_close(total, expected)


def test_layer_decay_equals_timm() -> None:
    import timm
    from timm.optim import param_groups_layer_decay

    ours = encoders.build("vit_tiny", image_size=32)
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    expected = {}
    names = {parameter: name for name, parameter in theirs.named_parameters()}
    for group in param_groups_layer_decay(theirs, weight_decay=0.1, layer_decay=0.75):
        expected |= {names[p]: group["lr_scale"] for p in group["params"]}
    config = RESOLVED.model_copy(update={"layer_decay": 0.75})
    optimizer = adamw(ours, config, {})
    names = {parameter: name for name, parameter in ours.named_parameters()}
    found = {names[p]: group["lr_factor"] for group in optimizer.param_groups for p in group["params"]}
    # timm counts the last norm to the last block; BEiT, MAE and DINOv2 count it to the head
    expected = {name: scale for name, scale in expected.items() if not name.startswith(("norm.", "head."))}
    assert {name: found.pop(name) for name in ("norm.weight", "norm.bias")} == {"norm.weight": 1.0, "norm.bias": 1.0}
    assert found == pytest.approx(expected, rel=1e-12)
    assert found["cls_token"] == 0.75**13
    apply_schedules(optimizer, config, 3, 10, 256)
    lr = cosine(3, 10, 1e-3, 1e-6, 2)
    assert all(group["lr"] == lr * group["lr_factor"] for group in optimizer.param_groups)


@pytest.mark.parametrize("variant", MICRO)
def test_every_encoder_has_layers_from_0_to_depth_plus_1(variant: str) -> None:
    with torch.device("meta"):
        encoder = encoders.build(variant)
    found = {name: layer for name, _, layer in layers(encoder)}
    assert list(found) == [name for name, _ in encoder.named_parameters()]
    assert set(found.values()) == set(range(len(flat_blocks(encoder)) + 2))
    assert {layer for name, layer in found.items() if name.startswith("patch_embed")} == {0}


def test_factors_of_the_encoder_and_of_its_patch_embedding_multiply() -> None:
    method = nn.ModuleDict({"encoder": encoders.build("vit_micro"), "head": nn.Linear(2, 2)})
    assert learning_rate_factors(method, RESOLVED) == {}
    slow = learning_rate_factors(method, RESOLVED.model_copy(update={"encoder_lr_factor": 0.1}))
    assert slow == dict.fromkeys(method["encoder"].parameters(), 0.1)
    both = RESOLVED.model_copy(update={"encoder_lr_factor": 0.5, "patch_embed_lr_factor": 0.2})
    factors = learning_rate_factors(method, both)
    named = {name: factors.get(p, 1.0) for name, p in method.named_parameters()}
    assert (named["head.weight"], named["encoder.norm.weight"]) == (1.0, 0.5)
    assert named["encoder.patch_embed.proj.weight"] == pytest.approx(0.1)


def test_default_settings_split_nothing() -> None:
    method = nn.ModuleDict({"encoder": encoders.build("vit_micro")})
    plain, with_settings = parameter_groups(method, {}), adamw(method, RESOLVED, {}).param_groups
    assert [g["params"] for g in plain] == [g["params"] for g in with_settings]
    assert {g["lr_factor"] for g in plain} == {1.0}


@pytest.mark.parametrize(("rule", "expected"), [("linear", 4e-3), ("sqrt", 1e-3), ("none", 1e-3)])
def test_scaling_of_the_learning_rate(rule: str, expected: float) -> None:
    config = OptimConfig.model_validate(RESOLVED.model_dump() | {"lr_scaling": rule})
    assert config.scaled_lr(1024) == pytest.approx(expected)
    assert config.scaled_lr(256) == pytest.approx({"linear": 1e-3, "sqrt": 5e-4, "none": 1e-3}[rule])


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("linear", " (optim.lr 0.002 * 64 / 256; see optim.lr_scaling)"),
        ("sqrt", " (optim.lr 0.002 * sqrt(64 / 1024); see optim.lr_scaling)"),
        ("none", ""),
    ],
)
def test_the_log_says_how_the_learning_rate_is_scaled(rule: str, said: str) -> None:
    config = OptimConfig.model_validate(RESOLVED.model_dump() | {"lr": 2e-3, "lr_scaling": rule})
    assert config.scaling_rule(64) == said

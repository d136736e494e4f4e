"""Distillation against its formulas written out in float64, and its teacher."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.pixels import normalize
from tessera.encoders.base import IMAGENET, Features, Preprocessing
from tessera.encoders.errors import EncoderError
from tessera.extras.distill.distill import (
    Distill,
    DistillConfig,
    load_teacher,
    match_loss,
    renormalized,
    resized_tokens,
    resolve,
    teacher_hash,
)
from tessera.pretrain.methods.method import RunSize
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.preflight import dry_forward
from tessera.runtime.settings import SettingsError
from tests.pretrain.small import MICRO
from tests.views import batch_of

SIZE = RunSize(1000, 4, 10)
OTHER = Preprocessing((0.1, 0.2, 0.3), (0.5, 0.4, 0.3))


def save_teacher(folder: Path, **settings) -> Path:
    """Save an encoder of width 20 with tokens of 8 pixels."""
    torch.manual_seed(3)
    encoder = encoders.build("vit_micro", **({"dim": 20, "depth": 1, "heads": 2, "patch_size": 8} | settings))
    encoder.preprocessing = OTHER
    encoders.save(encoder, folder / "teacher.safetensors")
    return folder / "teacher.safetensors"


def make(teacher: Path, images: int = 4, variant: str = "vit_micro", **settings) -> tuple[Distill, Batch]:
    config, _ = resolve(DistillConfig(size=16, teacher=str(teacher), **settings), OptimConfig(), SIZE)
    torch.manual_seed(0)
    small = {"depth": 2, "dim": 24, "heads": 2} if variant == "vit_micro" else {}
    method = Distill(encoders.build(variant, **small), config, 10)
    return method, batch_of([torch.randn(images, 3, 16, 16, generator=torch.Generator().manual_seed(1))])


def resize_matrix(old: int, new: int) -> np.ndarray:
    """Weights (new, old) of a triangle filter, which is as wide as a step of the coarser grid."""
    step = old / new
    centres, places = (np.arange(new) + 0.5) * step, np.arange(old) + 0.5
    weights = np.maximum(0, 1 - np.abs(places - centres[:, None]) / max(step, 1))
    return weights / weights.sum(1, keepdims=True)


def naive_match(predicted: torch.Tensor, target: torch.Tensor, kind: str) -> torch.Tensor:
    cosine, smooth, squares = [], [], []
    for p, t in zip(predicted.double(), target.double(), strict=True):
        cosine.append(1 - (p * t).sum() / ((p * p).sum().sqrt() * (t * t).sum().sqrt()))
        d = (p - t).abs()
        smooth.append(torch.where(d < 1, d * d / 2, d - 0.5).sum() / len(d))
        squares.append((d * d).sum() / len(d))
    means = {"cosine": cosine, "smooth_l1": smooth, "mse": squares}
    found = {name: torch.stack(values).mean() for name, values in means.items()}
    return (found | {"mixed": 0.9 * found["cosine"] + 0.1 * found["smooth_l1"]})[kind]


@pytest.mark.parametrize("kind", ["cosine", "smooth_l1", "mse", "mixed"])
def test_losses_and_gradients_equal_naive_float64(kind) -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, target = (2 * torch.randn(6, 5, generator=generator) for _ in range(2))
    predicted.requires_grad_()
    ours, naive = match_loss(predicted, target, kind), naive_match(predicted, target, kind)
    torch.testing.assert_close(ours.double(), naive, rtol=1e-6, atol=0)
    (gradient,), (naive_gradient,) = (torch.autograd.grad(loss, predicted) for loss in (ours, naive))
    torch.testing.assert_close(gradient, naive_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("old", "new"), [((2, 2), (4, 4)), ((4, 6), (2, 3)), ((3, 5), (4, 2)), ((2, 3), (2, 3))])
def test_tokens_are_resized_bilinearly(old: tuple[int, int], new: tuple[int, int]) -> None:
    tokens = torch.randn(2 * old[0] * old[1], 7, generator=torch.Generator().manual_seed(0))
    features = Features(torch.zeros(2, 7), tokens, torch.tensor([old, old]))
    maps = tokens.double().numpy().reshape(2, *old, 7)
    rows, columns = (resize_matrix(a, b) for a, b in zip(old, new, strict=True))
    naive = np.einsum("ri,cj,bijd->brcd", rows, columns, maps).reshape(-1, 7)
    np.testing.assert_allclose(resized_tokens(features, new).numpy(), naive, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("projection", ["linear", "mlp"])
def test_method_loss_and_gradients_equal_naive_float64(projection: str, tmp_path: Path) -> None:
    """A teacher of another width, token size and normalisation. Images are normalised anew and maps are resized."""
    path = save_teacher(tmp_path)
    method, batch = make(path, projection=projection, token_weight=0.5)
    loss, metrics = method(batch, 0)
    loss.backward()
    twin = copy.deepcopy(method).double()
    twin.zero_grad()
    images = batch.views[0].images.double()
    pixels = images * torch.tensor(IMAGENET.std).view(3, 1, 1) + torch.tensor(IMAGENET.mean).view(3, 1, 1)
    teacher = encoders.load(path).double()
    with torch.no_grad():
        wanted = teacher(normalize(pixels, OTHER))  # 2 x 2 tokens
    grow = torch.from_numpy(resize_matrix(2, 4))
    tokens = torch.einsum("ri,cj,bijd->brcd", grow, grow, wanted.tokens.unflatten(0, (4, 2, 2))).flatten(0, 2)
    features = twin.encoder(images)  # 4 x 4 tokens

    def project(kind: str, x: torch.Tensor) -> torch.Tensor:
        layers = twin.projections[kind]
        if projection == "linear":
            return x @ layers.weight.T + layers.bias
        x = x @ layers[0].weight.T + layers[0].bias
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return x @ layers[3].weight.T + layers[3].bias

    naive = naive_match(project("pooled", features.pooled), wanted.pooled, "cosine")
    naive = naive + 0.5 * naive_match(project("token", features.tokens), tokens, "mixed")
    naive.backward()
    torch.testing.assert_close(loss.double(), naive, rtol=1e-5, atol=0)
    assert loss.item() == pytest.approx((metrics["pooled_loss"] + 0.5 * metrics["token_loss"]).item(), rel=1e-6)
    for (name, p), q in zip(method.named_parameters(), twin.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("variant", "size"), [("vit_micro", None), *((variant, 24) for variant in MICRO)])
def test_students_and_teachers_of_any_family(variant: str, size: int | None, tmp_path: Path) -> None:
    """A student of every family, and a teacher of the same family at its own size."""
    encoders.save(encoders.build(variant, image_size=24), tmp_path / "teacher.safetensors")
    method, batch = make(tmp_path / "teacher.safetensors", variant=variant, teacher_size=size)
    dry_forward(method)
    loss, _ = method(batch, 0)
    loss.backward()
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []
    assert 0 < loss.item() < 4
    assert method.health()["feature_rank"] > 1


@pytest.mark.parametrize("kind", ["pooled", "token"])
def test_a_term_of_weight_zero_has_no_projection(kind: str, tmp_path: Path) -> None:
    method, batch = make(save_teacher(tmp_path), variant="navit_micro", **{f"{kind}_weight": 0.0})
    loss, metrics = method(batch, 0)
    loss.backward()
    assert kind not in method.projections
    assert f"{kind}_loss" not in metrics
    assert method.collapse_signs({name: value.item() for name, value in metrics.items()}) == {}
    assert [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None] == []


def test_the_teacher_is_frozen_and_in_no_checkpoint(tmp_path: Path) -> None:
    method, batch = make(save_teacher(tmp_path, drop_path=0.5))
    teacher = method._teacher.encoder
    assert not any("teacher" in name for name in method.state_dict())
    assert {id(p) for p in teacher.parameters()}.isdisjoint({id(p) for p in method.parameters()})
    before = copy.deepcopy(teacher.state_dict())
    method.train()
    first = [method(batch, 0)[0].item() for _ in range(2)]
    assert first[0] == first[1]  # the teacher stays in evaluation mode, without drop path
    assert not any(p.requires_grad for p in teacher.parameters())
    assert copy.deepcopy(method)._teacher is method._teacher
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())


def test_another_teacher_is_refused(tmp_path: Path) -> None:
    path = save_teacher(tmp_path)
    config, _ = resolve(DistillConfig(size=16, teacher=str(path)), OptimConfig(), SIZE)
    again, _ = resolve(config, OptimConfig(), SIZE)
    assert again == config
    description = path.with_suffix(".json")
    description.write_text(description.read_text().replace("0.5", "0.6"))  # another normalisation is another teacher
    with pytest.raises(SettingsError, match="is not the teacher with which the run started"):
        resolve(config, OptimConfig(), SIZE)
    other, _ = resolve(DistillConfig(size=16, teacher=str(path)), OptimConfig(), SIZE)
    assert other.teacher_hash != config.teacher_hash


@pytest.mark.parametrize("teacher", [None, "missing.safetensors"])
def test_a_missing_teacher_is_named(teacher: str | None) -> None:
    with pytest.raises(SettingsError, match=r"distill\.teacher"):
        resolve(DistillConfig(teacher=teacher), OptimConfig(), SIZE)


def test_settings_that_contradict_the_teacher_are_refused(tmp_path: Path) -> None:
    path = save_teacher(tmp_path)
    with pytest.raises(SettingsError, match="both 0"):
        resolve(DistillConfig(teacher=str(path), pooled_weight=0, token_weight=0), OptimConfig(), SIZE)
    with pytest.raises(ValueError, match=r"4 pixels are smaller than a token of the teacher.*distill\.teacher_size"):
        make(path, teacher_size=4)
    config, _ = resolve(DistillConfig(size=16, teacher=str(path)), OptimConfig(), SIZE)
    with pytest.raises(ValueError, match="teacher takes images with 3 channels, but the student's images have 1"):
        Distill(encoders.build("vit_micro", channels=1), config, 10)


def test_images_that_the_teacher_does_not_support_are_named(tmp_path: Path) -> None:
    encoders.save(encoders.build("navit_micro"), tmp_path / "teacher.safetensors")
    method, _ = make(tmp_path / "teacher.safetensors", teacher_size=24)
    with pytest.raises(ValueError, match=r"The teacher does not support its input images: .* 24 pixels"):
        dry_forward(method)


def test_published_weights_are_a_teacher(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0).eval()
    torch.save(model.state_dict(), tmp_path / "published.pth")
    teacher = load_teacher(str(tmp_path / "published.pth"), 32)
    images = torch.randn(2, 3, 32, 32)
    features = teacher.features(images, IMAGENET)
    with torch.no_grad():
        wanted = model.forward_features(images)
    torch.testing.assert_close(features.pooled, wanted[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features.tokens, wanted[:, 1:].flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_signs_of_collapse_name_the_flag_of_their_term(tmp_path: Path) -> None:
    method, batch = make(save_teacher(tmp_path))
    for term in ("pooled", "token"):
        with torch.no_grad():
            twin = copy.deepcopy(method)
            twin.projections[term][3].weight.zero_()
        record = {name: value.item() for name, value in twin(batch, 0)[1].items()}
        signs = twin.collapse_signs(record)
        assert list(signs) == [term]
        assert f"distill.{term}_weight" in signs[term]
    healthy = {name: value.item() for name, value in method(batch, 0)[1].items()} | {"feature_rank": 5.0}
    assert method.collapse_signs(healthy) == {}
    assert any("distill.teacher" in line for line in method.advice(healthy | {"token_teacher_spread": 0.01}))


def test_a_model_of_timm_is_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    name, create = "vit_tiny_patch16_224.augreg_in21k", timm.create_model

    def offline(name: str, *, pretrained: bool, **options: Any) -> torch.nn.Module:
        assert pretrained
        torch.manual_seed(0)
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    model: Any = offline(name, pretrained=True).eval()
    teacher = load_teacher(f"timm:{name}", 224)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.forward_features(images)
    half = Preprocessing((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    torch.testing.assert_close(teacher.features(images, half).pooled, expected[:, 0], rtol=1e-4, atol=1e-4)
    assert len({teacher_hash(f"timm:{name}") for _ in range(2)}) == 1


def test_a_teacher_with_a_range_needs_images_of_this_range() -> None:
    images = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    given = Preprocessing((0.4,), (0.2,), "uint16", (0.0,), (900.0,))
    for wanted in (Preprocessing((0.5,), (0.1,)), replace(given, mean=(0.5,), std=(0.1,))):  # both get x from 0 to 1
        found = renormalized(images, given, wanted)
        np.testing.assert_allclose(found, (images.numpy() * 0.2 + 0.4 - 0.5) / 0.1, atol=1e-12)
    with pytest.raises(EncoderError, match=r"teacher takes uint16 images from \(0\.0,\) to \(90\.0,\), but those of"):
        renormalized(images, given, replace(given, high=(90.0,)))

"""`tessera conformance`: this project's losses agree, and a defect in any of them is found."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.evaluation import references
from tessera.extras.conformance import losses as ours
from tessera.extras.conformance.conformance import (
    Case,
    ConformanceError,
    ConformanceSettings,
    cases,
    compare,
    normal,
    run,
)

TOLERANCE = ConformanceSettings().tolerance
NAMES = sorted({case.function for case in cases()})


def worst(name: str, function: Callable[..., Tensor]) -> float:
    """Return the largest difference over the cases of a function."""
    return max(d for case in cases() if case.function == name for d in compare(case, function).values())


def changed(name: str, *factors: float) -> Callable[..., Tensor]:
    """Return a function of this project whose last arguments are multiplied by factors."""
    function = getattr(ours, name)

    def defective(*arguments):
        kept = len(arguments) - len(factors)
        return function(*arguments[:kept], *(a * f for a, f in zip(arguments[kept:], factors, strict=True)))

    return defective


def ibot_without_empty_crops(student, teacher, mask, *others) -> Tensor:
    kept = mask.any(1)
    return ours.ibot_loss(student[kept], teacher[kept], mask[kept], *others)


def nearest(features: Tensor, *, unit: bool = True, itself: bool = False, detached: bool = False) -> Tensor:
    """Return the distance of each row to its nearest row."""
    rows = F.normalize(features, dim=1) if unit else features
    similarity = -torch.cdist(rows, rows)
    if not itself:
        similarity = similarity.detach().fill_diagonal_(-torch.inf)
    others = rows[similarity.argmax(1)]
    return (rows - (others.detach() if detached else others)).norm(dim=1)


def sinkhorn(logits: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    assignment = (logits / temperature).exp()
    for _ in range(iterations):
        for dim in (0, 1):
            assignment = assignment / assignment.sum(dim, keepdim=True)
    return assignment / assignment.sum(1, keepdim=True)


def gram(student: Tensor, teacher: Tensor, *, unit: bool = True, pooled: bool = False) -> Tensor:
    matrices = []
    for tokens in (student, teacher):
        tokens = F.normalize(tokens, dim=-1) if unit else tokens
        tokens = tokens.flatten(0, 1) if pooled else tokens
        matrices.append(tokens @ tokens.mT)
    return F.mse_loss(*matrices)


def sigreg_to(last: float, points: int) -> Callable[..., Tensor]:
    def defective(embeddings: Tensor, directions: Tensor) -> Tensor:
        t = torch.linspace(-last, last, points)
        phi = (-t.square() / 2).exp()
        angles = (embeddings @ directions).unsqueeze(-1) * t
        distance = (angles.cos().mean(1) - phi).square() + angles.sin().mean(1).square()
        return embeddings.shape[1] * torch.trapezoid(distance * phi, t).mean()

    return defective


def mae(predicted: Tensor, patches: Tensor, mask: Tensor, *, unbiased: bool = True, variance: float = 1e-6) -> Tensor:
    centred = patches - patches.mean(-1, keepdim=True)
    target = centred / (patches.var(-1, unbiased=unbiased, keepdim=True) + variance).sqrt()
    return F.mse_loss(predicted[mask], target[mask])


DEFECTS: list[tuple[str, str, Callable[..., Tensor]]] = [
    ("dino_loss", "student temperature", changed("dino_loss", 1.01, 1)),
    ("dino_loss", "no centring", changed("dino_loss", 0, 1, 1)),
    ("ibot_loss", "crops without hidden tokens left out", ibot_without_empty_crops),
    ("koleo_loss", "rows not normalised", lambda x: -nearest(x, unit=False).log().mean()),
    ("koleo_loss", "each row its own neighbour", lambda x: -(nearest(x, itself=True) + 1e-8).log().mean()),
    ("koleo_loss", "no gradient of the neighbour", lambda x: -nearest(x, detached=True).log().mean()),
    ("sinkhorn", "two iterations", functools.partial(sinkhorn, iterations=2)),
    ("sinkhorn", "temperature", changed("sinkhorn", 1.01)),
    ("gram_loss", "tokens not normalised", functools.partial(gram, unit=False)),
    ("gram_loss", "pairs of tokens of different crops", functools.partial(gram, pooled=True)),
    ("sigreg", "integral to 5", sigreg_to(5, 33)),
    ("sigreg", "half of the points", sigreg_to(3, 17)),
    ("sigreg", "not multiplied by the images", lambda x, d: ours.sigreg(x, d) / x.shape[1]),
    ("mae_loss", "biased variance", functools.partial(mae, unbiased=False)),
    ("mae_loss", "no epsilon", functools.partial(mae, variance=0.0)),
    ("center_updates", "sum of rows", lambda x, m: ours.center_updates(x * x.shape[1], m)),
    ("teacher_updates", "momentum", lambda x, m: ours.teacher_updates(x, 1 - m)),
    ("teacher_updates", "one step late", lambda x, m: ours.teacher_updates(torch.cat([x[:1], x[:-1]]), m)),
]


@pytest.mark.parametrize(("name", "defect"), [(name, defect) for name, _, defect in DEFECTS],
                         ids=[f"{name}: {title}" for name, title, _ in DEFECTS])  # fmt: skip
def test_a_defect_is_found(name: str, defect: Callable[..., Tensor]) -> None:
    assert not worst(name, defect) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_defect_is_planted_in_every_function_and_the_formula_is_accepted(name: str) -> None:
    assert name in {defect[0] for defect in DEFECTS}
    assert worst(name, getattr(references, name)) < TOLERANCE / 10


def test_variants_without_their_defects_agree() -> None:
    """The defective functions above differ because of their defects, not because of their form."""
    correct = {
        "dino_loss": changed("dino_loss", 1, 1, 1),
        "koleo_loss": lambda x: -nearest(x).log().mean(),
        "sinkhorn": sinkhorn,
        "gram_loss": gram,
        "sigreg": sigreg_to(3, 33),
        "mae_loss": mae,
    }
    for name, function in correct.items():
        assert worst(name, function) < TOLERANCE, name


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.function}: {case.title}")
def test_the_losses_of_this_project_are_accurate(case: Case) -> None:
    found = compare(case, getattr(ours, case.function))
    assert found["value"] < 1e-6
    assert found.get("gradient", 0.0) < 1e-5


def test_the_losses_of_this_project_agree(capsys: pytest.CaptureFixture[str]) -> None:
    run(ConformanceSettings())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(cases())
    assert all(line.split()[-1] == "agrees" for line in lines[1:])


def test_tensors_are_fixed() -> None:
    torch.testing.assert_close(normal(0, 3), torch.tensor([1.4158808, 0.3070072, 0.2468798]), rtol=1e-6, atol=0)
    many = normal(1, 100, 100).double()
    assert many.std().item() == pytest.approx(1, abs=0.03)
    assert many.pow(4).mean().item() == pytest.approx(3, abs=0.3)


def test_an_adapter_may_lack_functions_and_its_errors_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("partial_adapter.py").write_text(
        "from tessera.evaluation.references import gram_loss\n"
        "def koleo_loss(features): return features.detach().sum()\n"
        "def sinkhorn(logits, temperature): return logits[0]\n"
        "def center_updates(logits, momentum): return float('nan') * logits[:, 0]\n"
    )
    with pytest.raises(ConformanceError, match="in center_updates, koleo_loss, sinkhorn"):
        run(ConformanceSettings(adapter="partial_adapter"))
    results = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "agrees" in results["gram_loss"]
    assert "not provided" in results["dino_loss"]
    assert "fails: RuntimeError" in results["koleo_loss"]
    assert "fails: ValueError: the result has the shape (5,), not (12, 5)" in results["sinkhorn"]
    assert "differs" in results["center_updates"]
    Path("empty_adapter.py").write_text("")
    with pytest.raises(ConformanceError, match="none of the functions dino_loss"):
        run(ConformanceSettings(adapter="empty_adapter"))
    with pytest.raises(ConformanceError, match="cannot be imported: No module named 'missing_adapter'"):
        run(ConformanceSettings(adapter="missing_adapter"))

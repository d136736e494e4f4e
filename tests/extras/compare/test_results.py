"""The result and the page of a comparison: its verdict, its limits, its cost, and the recommended command."""

import json
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tessera.extras.compare.compute import FILE, spent
from tessera.extras.compare.page import render, table
from tessera.extras.compare.plan import Cell, CompareSettings, Plan
from tessera.extras.compare.results import _cost
from tessera.runtime.settings import validate
from tests.extras.compare.made import IMAGES, STEPS, made


class Text(HTMLParser):
    """Collects the texts outside of styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside != "style" and data.strip():
            self.texts.append(" ".join(data.split()))


def test_a_clear_winner_is_recommended_with_its_command(tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.8, "mae": 0.5})
    assert found["best"] == "lejepa"
    assert found["not_different"] == []
    assert found["verdict"].startswith("lejepa is best: its linear probe is ")
    row = found["arms"]["lejepa"]
    assert row["error"] == pytest.approx((row["error_of_seeds"] ** 2 + row["error_of_images"] ** 2) ** 0.5)
    assert row["mean"] == pytest.approx(sum(row["of_seeds"]) / 3)
    words = shlex.split(found["command"])
    assert words[:6] == ["tessera", "pretrain", "--method", "lejepa", "--data", "my photos/*.tar"]
    assert words[words.index("--steps") + 1] == str(STEPS)
    assert found["scored_images"] == IMAGES
    assert (row["steps"], row["images"]) == (STEPS, 8 * STEPS)
    assert found["arms"]["raw pixels"]["error_of_seeds"] == 0
    assert json.loads(json.dumps(found, allow_nan=False))["best"] == "lejepa"
    page = render(found)
    texts = Text(page).texts
    assert found["verdict"] in texts
    assert found["command"] in texts
    assert "yes" in texts
    assert page.count("<svg") == 1
    assert "raw pixels" in page[page.index("<svg") : page.index("</svg>")]


def test_equal_methods_are_called_equal(tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.7, "dino": 0.7, "mae": 0.5})
    assert found["verdict"].startswith("No difference: ")
    assert {found["best"], *found["not_different"]} == {"lejepa", "dino"}
    assert f"--method {found['best']}" in found["command"]
    assert "no difference" in Text(render(found)).texts


def test_methods_that_learn_nothing_are_not_called_better_than_no_training(tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.3, "mae": 0.3})
    assert found["command"] is None  # the same training again would learn nothing either
    assert "No method is better than before training and raw pixels" in found["verdict"].replace(
        "raw pixels and before training", "before training and raw pixels"
    )


def test_without_labels_no_method_is_recommended(tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.8, "mae": 0.5}, labels=False)
    assert found["score"] == "view retrieval"
    assert found["command"] is None
    assert "no method is recommended" in found["limits"][0]
    assert list(found["arms"]) == ["lejepa", "mae", "before training"]
    texts = Text(render(found)).texts
    assert found["limits"][0] in texts
    assert "Recommended command" not in texts


def test_one_seed_is_said_to_decide_nothing(tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.8, "mae": 0.5}, seeds=1)
    mean = 100 * found["arms"]["lejepa"]["mean"]
    assert found["verdict"] == f"lejepa has the highest linear probe, {mean:.1f} %, with one seed."
    assert "--method lejepa" in found["command"]
    assert "± twice the standard error over the images alone." in table(found)
    assert "no difference can be told from chance" in found["limits"][0]
    assert found["arms"]["lejepa"]["error"] is None
    assert "not known" in Text(render(found)).texts


@pytest.mark.parametrize(("slow", "said"), [(1.05, False), (1.2, True), (0.8, True)])
def test_the_true_compute_stands_beside_the_planned_one(slow: float, said: bool, tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.8, "mae": 0.5}, slow=slow)
    run = found["cost"]["runs"]["mae-2"]
    assert run["planned"] == 60
    assert run["training"] == pytest.approx(60 * slow)  # the interval with an evaluation of 100 seconds is left out
    assert run["total"] == pytest.approx(5 + 25 * 1.5 * slow + 100)
    assert bool(found["cost"]["problems"]) == said
    if said:
        assert found["cost"]["problems"][0].startswith("The compute of 6 of 6 trainings differs from the plan by more")
        assert f"{100 * slow - 100:+.0f} %" in found["cost"]["problems"][0]


def test_compute_of_gpus_is_called_so_and_counts_from_the_start_of_the_process(tmp_path: Path) -> None:
    run = tmp_path / "mae-0"
    run.mkdir()
    lines = [
        {"step": s, "start": 1.0, "evaluated": False, "cpu": 0.0, "wall": 130.0 + s, "gpu": True, "began": 100.0}
        for s in (0, 10, 20)
    ]
    (run / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = spent(run)
    assert found is not None
    assert (found.per_step, found.total) == (1.0, 50.0)
    settings = validate(CompareSettings, {"methods": ["mae"], "seeds": 1, "steps": 20, "output": str(tmp_path)})
    cost = _cost(settings, Plan({"mae": 20}, {}, gpu=False), [Cell("mae", 0, 20)])
    assert (cost["unit"], cost["arms"]) == ("GPU", {"mae": 20.0})


def test_methods_of_an_earlier_command_count_as_compared(tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.8, "mae": 0.5}, earlier=("dino",))
    assert len(found["comparisons"]) == 6
    assert found["corrected_for"] == 10
    assert any("for 10 comparisons" in text for text in Text(render(found)).texts)


def test_names_are_escaped(tmp_path: Path) -> None:
    found = made(tmp_path, {"lejepa": 0.8, "mae": 0.5})
    found |= {"data": "<script>alert(1)</script>", "encoder": "<script>alert(1)</script>"}
    found["arms"]["<script>alert(1)</script>"] = found["arms"].pop("raw pixels")
    assert "<script>alert" not in render(found)

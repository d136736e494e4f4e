"""Draw the k-NN accuracy of runs over the course of training, one panel per data set.

    python benchmarks/curves.py --output CURVES.png \\
        --panels '{"photographs": ["runs/a", "runs/b"], "digits": ["runs/c"]}'

A curve is labelled with the run's method. Runs of one method have one colour. `tessera report` compares
single runs.
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tessera.evaluation.reporting.curves import PALETTE, Chart, Look
from tessera.evaluation.reporting.curves import draw as draw_chart
from tessera.evaluation.reporting.runs import read_runs
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Settings, parse

NAMES = {"dino": "DINO", "dinov2": "DINOv2", "dinov3": "DINOv3", "lejepa": "LeJEPA", "mae": "MAE"}


class CurvesSettings(Settings):
    """Draw the k-NN accuracy of runs over the course of training."""

    panels: dict[str, list[Path]]
    """run folders of each panel, by the title of the panel"""
    output: Path
    """PNG file for the picture"""


def curve(run: Path, metric: str = "knn_top1") -> dict[int, float]:
    """Return a k-NN accuracy, 0 to 1, at each step where it was measured."""
    return read_runs([run])[0][0].curve(metric)


def draw(panels: dict[str, list[Path]], output: Path) -> None:
    """Draw one panel per data set, with the accuracy of the raw pixels as a dashed line.

    Args:
        panels: run folders by the title of the panel. The runs of a panel use one data set.
        output: PNG file.
    """
    runs_of = {title: read_runs(folders)[0] for title, folders in panels.items()}
    every = list(dict.fromkeys(run.method for runs in runs_of.values() for run in runs))
    color = {method: PALETTE[number] for number, method in enumerate(every)}
    figure = Figure(figsize=(5 * len(panels), 3.6), dpi=120, layout="tight")
    for axes, (title, runs) in zip(figure.subplots(1, len(panels), squeeze=False)[0], runs_of.items(), strict=True):
        look = {run.name: Look(color[run.method], "solid") for run in runs}
        lines = {run.name: {step: 100 * top1 for step, top1 in run.curve("knn_top1").items()} for run in runs}
        draw_chart(Chart(title, lines, reference=100 * runs[0].curve("knn_pixels")[0]), axes, look)
        axes.set_ylabel("20-NN accuracy, %")
        methods = dict.fromkeys(run.method for run in runs)
        handles = [Line2D([], [], color=color[one], label=NAMES.get(one, one)) for one in methods]
        # below the axes, where it hides no curve
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=len(handles), frameon=False)
    figure.savefig(output)


if __name__ == "__main__":
    with exit_on_user_error():
        settings = parse(CurvesSettings)
        draw(settings.panels, settings.output)

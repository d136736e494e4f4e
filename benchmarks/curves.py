"""Draw the k-NN accuracy of runs over the course of training, one panel per data set.

    python benchmarks/curves.py --output CURVES.png \\
        --panels '{"photographs": ["runs/a", "runs/b"], "digits": ["runs/c"]}'

A curve is labelled with the run's method. Runs of one method have one colour.
"""

import json
from pathlib import Path

import yaml

from runtime.processes import exit_on_user_error
from runtime.settings import Settings, parse


class CurvesSettings(Settings):
    """Draw the k-NN accuracy of runs over the course of training."""

    panels: dict[str, list[Path]]
    """run folders of each panel, by the title of the panel"""
    output: Path
    """PNG file for the picture"""


def curve(run: Path, metric: str = "knn_top1") -> dict[int, float]:
    """Return a k-NN accuracy, 0 to 1, at each step where it was measured."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[metric] for record in records if metric in record}


def draw(panels: dict[str, list[Path]], output: Path) -> None:
    """Draw one panel per data set, with the accuracy of the raw pixels as a dashed line.

    Args:
        panels: run folders by the title of the panel. The runs of a panel use one data set.
        output: PNG file.
    """
    import matplotlib.pyplot as plt

    figure, row = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.6), dpi=120, squeeze=False)
    for axes, (title, runs) in zip(row[0], panels.items(), strict=True):
        colours: dict[str, str] = {}
        for run in runs:
            method = yaml.safe_load((run / "config.yaml").read_text())["method"]
            label = None if method in colours else {"dino": "DINO", "mae": "MAE"}.get(method, method)
            colour = colours.setdefault(method, f"C{len(colours)}")
            points = curve(run)
            accuracies = [100 * accuracy for accuracy in points.values()]
            axes.plot(list(points), accuracies, "o-", color=colour, label=label, markersize=4)
        pixels = curve(runs[0], "knn_pixels")[0]
        axes.axhline(100 * pixels, color="gray", linestyle="--", label="raw pixels")
        axes.set(xlabel="step", ylabel="20-NN accuracy, %", title=title)
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    with exit_on_user_error():
        settings = parse(CurvesSettings)
        draw(settings.panels, settings.output)

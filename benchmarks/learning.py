"""Measure the k-NN accuracy during training, and the accuracy of a linear probe after it, for each method and seed.

    python benchmarks/learning.py --train TRAIN_SHARDS --val VAL_SHARDS --run='--encoder vit_tiny' --steps 2000 \\
        [--methods dino,mae] [--seeds 0,1,2] [--output TABLE.md] [--picture CURVES.png]

Each row of the table is one run of `pretrain/run.py`, which evaluates at equal intervals, followed by
`evaluation/linear_probe.py`. The run folders stay in `--folder`, and a finished run is not repeated.
benchmarks/other_libraries.py trains an encoder of this project with methods of other libraries, as baselines.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from pydantic import Field
from tables import machine, publish, table

from tessera.runtime.files import atomic_write
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Settings, parse

ROOT = Path(__file__).parent.parent
NAMES = {"dino": "DINO", "dinov2": "DINOv2", "dinov3": "DINOv3", "lejepa": "LeJEPA", "mae": "MAE"}


class LearningBenchmark(Settings):
    """Measure how fast the methods learn on labelled shards."""

    train: str
    """labelled SHARDS to train on; pretraining ignores their labels, and the k-NN evaluation uses them as its bank"""
    val: str
    """labelled SHARDS on which the accuracy is measured"""
    methods: tuple[str, ...] = ("dino", "mae")
    """methods to run"""
    seeds: tuple[int, ...] = (0,)
    """seeds with which to run each method"""
    run: str = ""
    """further flags of pretrain/run.py, as one string"""
    steps: int = Field(default=2000, ge=1)
    """optimizer steps of each run"""
    points: int = Field(default=6, ge=1)
    """number of evaluations, not counting the evaluation before training"""
    folder: Path = Path("runs/learning")
    """folder in which the run folders are created"""
    output: Path | None = None
    """Markdown file for the table"""
    picture: Path | None = None
    """PNG file for the curves of the k-NN accuracy"""
    panels: dict[str, list[Path]] = Field(default_factory=dict)
    """run folders of additional panels of the picture, by the title of the panel"""


def pretrain(settings: LearningBenchmark, method: str, seed: int) -> Path:
    """Pretrain, unless the run folder holds a finished run. Return the run folder."""
    output = settings.folder / f"{method}-{seed}"
    if (output / "seconds.json").exists():
        return output
    every = max(settings.steps // settings.points, 1)
    command = ["--method", method, "--seed", str(seed), "--output", str(output), "--steps", str(settings.steps)]
    command += ["--evaluate_every", str(every), "--data", settings.train, "--evaluation.val", settings.val]
    command += shlex.split(settings.run)
    started = time.perf_counter()
    call("pretrain/run.py", *command)
    with atomic_write(output / "seconds.json") as part:
        part.write_text(json.dumps(time.perf_counter() - started))
    return output


def probe(settings: LearningBenchmark, run: Path) -> dict[str, Any]:
    """Return the result of the linear probe of a run, trained on centre crops."""
    path = run / "evaluation" / "linear_probe-learning.json"
    if not path.exists():
        shards = ("--train", settings.train, "--val", settings.val)
        options = ("--no-augment", "--batch_norm", "--output", str(path))
        call("evaluation/linear_probe.py", "--checkpoint", str(run), *shards, *options)
    return json.loads(path.read_text())


def call(script: str, *arguments: str) -> None:
    """Run a script of the project, such as pretrain/run.py."""
    subprocess.run([sys.executable, str(ROOT / script), *arguments], check=True)


def curve(run: Path, metric: str = "knn_top1") -> dict[int, float]:
    """Return the values of an accuracy metric in percent, by step."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: 100 * record[metric] for record in records if metric in record}


def results(settings: LearningBenchmark, runs: dict[tuple[str, int], Path]) -> str:
    """Return the table: one row per run, one column per evaluated step."""
    steps = curve(next(iter(runs.values())))
    rows = []
    for (method, seed), run in runs.items():
        shown = [f"{accuracy:.1f}" for accuracy in curve(run).values()]
        minutes = json.loads((run / "seconds.json").read_text()) / 60
        rows.append([method, str(seed), *shown, f"{100 * probe(settings, run)['top1']:.1f}", f"{minutes:.0f}"])
    return table(["method", "seed", *map(str, steps), "linear probe", "minutes"], rows)


def draw(panels: dict[str, list[Path]], output: Path) -> None:
    """Draw one panel per title, with the accuracy of the raw pixels as a dashed line.

    The runs of a panel use one data set. If their encoders differ, the accuracy is drawn over the minutes of the runs,
    which `seconds.json` contains, and the line style shows the encoder.

    Args:
        panels: run folders by the title of the panel.
        output: PNG file.
    """
    figure = Figure(figsize=(5 * len(panels), 3.6), dpi=120, layout="tight")
    for axes, (title, runs) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
        encoders = list(dict.fromkeys(config["encoder"]["variant"] for config in configs))
        for run, config in zip(runs, configs, strict=True):
            method, encoder = config["method"], config["encoder"]["variant"]
            steps, accuracies = zip(*curve(run).items(), strict=True)
            label = NAMES.get(method, method)
            if len(encoders) > 1:
                minutes = json.loads((run / "seconds.json").read_text()) / 60
                steps, label = [step / config["steps"] * minutes for step in steps], f"{label}, {encoder}"
            style = ("-", "--", ":", "-.")[encoders.index(encoder)]
            color = f"C{list(NAMES).index(method)}" if method in NAMES else "gray"
            axes.plot(steps, accuracies, style, color=color, label=label)
        axes.axhline(curve(runs[0], "knn_pixels")[0], color="gray", linewidth=0.8, label="raw pixels")
        axes.set(title=title, xlabel="step" if len(encoders) == 1 else "minutes", ylabel="20-NN accuracy, %")
        axes.spines[["top", "right"]].set_visible(False)
        lines, labels = axes.get_legend_handles_labels()
        shown = dict(zip(labels, lines, strict=True))  # one entry for the runs of all seeds
        # put the legend below the axes, where it hides no curve
        columns = len(shown) if len(encoders) == 1 else 2
        axes.legend(shown.values(), shown, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=columns, frameon=False)
    figure.savefig(output)


def main() -> None:
    """Run all pretrainings and linear probes, and print the table."""
    settings = parse(LearningBenchmark)
    runs = {(method, seed): pretrain(settings, method, seed) for method in settings.methods for seed in settings.seeds}
    pixels = curve(next(iter(runs.values())), "knn_pixels")[0]
    command = shlex.join(["python", "benchmarks/learning.py", *sys.argv[1:]])
    how = f"{machine()}. 20-NN accuracy in percent at each step; raw pixels: {pixels:.1f}."
    publish([f"`{command}`", how, results(settings, runs)], settings.output)
    if settings.picture:
        draw({"": list(runs.values())} | settings.panels, settings.picture)


if __name__ == "__main__":
    with exit_on_user_error():
        main()

"""Train every method briefly on data sets, image sizes, encoders and batch sizes that differ in one thing from a base.

    python benchmarks/grid.py --photos 'imagenette5-train-*.tar' --photos_val 'imagenette5-val-*.tar' \\
        --few imagenette5-train-000000.tar --small 'cifar10-train-*.tar.gz' --small_bank cifar10-train-000000.tar.gz \\
        --small_val cifar10-test-000000.tar.gz [--methods dino,lejepa] [--output TABLE.md] [--picture GRID.png]

Settings of the methods are the derived ones. The table and the picture show the accuracy before and after training, so
that a cell that collapses, or ends below its untrained encoder, is seen. The run folders stay in `--folder`, and a
finished run is not repeated.
"""

import shlex
import sys
from pathlib import Path

from learning import NAMES, call, curve
from matplotlib.figure import Figure
from pydantic import Field
from tables import machine, publish, table

from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Settings, parse

CELLS = {
    "base": "",
    "fewer photographs": "--data {few}",
    "32 pixels": "--{size} 32 --encoder.patch_size 4",
    "96 pixels": "--{size} 96 --steps 75",
    "other images of 32 pixels": "--data {small} --evaluation.train {small_bank} --evaluation.val {small_val} "
    "--{size} 32 --encoder.patch_size 4",
    "batch 32": "--batch_size 32 --steps 300",
    "batch 256": "--batch_size 256 --steps 60",
    "batch 512": "--batch_size 512 --steps 30",
    "vit_tiny with patch 8": "--encoder vit_tiny --encoder.patch_size 8 --steps 75",
    "swin_micro with patch 4": "--encoder swin_micro --encoder.patch_size 4",
    "timm:resnet18": "--encoder timm:resnet18",
}
"""Flags that each cell changes. The base trains `vit_mini` on photographs of 64 pixels for 150 steps of 64 images."""


class GridBenchmark(Settings):
    """Measure whether the methods hold when data, sizes, encoders and batches change."""

    photos: str
    """SHARDS of labelled photographs to train on"""
    photos_val: str
    """SHARDS on which runs on photographs are scored"""
    few: str
    """a part of `photos`"""
    small: str
    """SHARDS of other labelled images, of 32 pixels"""
    small_val: str
    """SHARDS on which runs on these images are scored"""
    small_bank: str
    """part of `small` on which their k-NN and linear probe are trained"""
    methods: tuple[str, ...] = ("dino", "dinov2", "lejepa", "mae")
    """methods to run"""
    cells: tuple[str, ...] = tuple(CELLS)
    """cells to run"""
    seed: int = Field(default=0, ge=0)
    """seed of all runs"""
    flags: str = ""
    """further flags of pretrain/run.py, as one string"""
    folder: Path = Path("runs/grid")
    """folder in which the run folders are created"""
    output: Path | None = None
    """Markdown file for the table"""
    picture: Path | None = None
    """PNG file: one panel for each method"""


def pretrain(settings: GridBenchmark, method: str, cell: str) -> Path:
    """Train one cell, unless its run folder holds a finished run. Return the run folder."""
    output = settings.folder / f"{method}-{cell.replace(' ', '-').replace(':', '-')}-{settings.seed}"
    if (output / "encoder.safetensors").exists():
        return output
    size = "mae.size" if method == "mae" else f"{method}.global_size"
    base = f"--method {method} --encoder vit_mini --{size} 64 --batch_size 64 --steps 150 --seed {settings.seed}"
    fixed = "--data {photos} --evaluation.val {photos_val} --evaluate_every 1000 --evaluation.pictures 0"
    names = {name: shlex.quote(value) for name, value in settings if isinstance(value, str)}
    words = shlex.split(f"{base} {fixed} {CELLS[cell]}".format(size=size, **names))
    words += [*shlex.split(settings.flags), "--output", str(output)]
    flags = dict(zip(words[::2], words[1::2], strict=True))  # a cell replaces flags of the base
    call("pretrain/run.py", *(word for pair in flags.items() for word in pair), "--overwrite")
    return output


def change(run: Path) -> str:
    """Return k-NN and linear probe, before -> after training."""
    knn, probe = ([*curve(run, name).values()] for name in ("knn_top1", "linear_top1"))
    return f"{knn[0]:.1f} -> {knn[-1]:.1f} / {probe[0]:.1f} -> {probe[-1]:.1f}"


def draw(runs: dict[str, dict[str, Path]], output: Path) -> None:
    """Draw an arrow from the accuracy before training to that after it, for each cell, with a panel for each method."""
    figure = Figure(
        figsize=(3.2 * len(runs) + 1.8, 0.36 * len(next(iter(runs.values()))) + 1.3), dpi=120, layout="constrained"
    )
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True, sharex=True)[0]
    for axes, (method, cells) in zip(panels, runs.items(), strict=True):
        for row, run in enumerate(cells.values()):
            for shift, metric, color in ((-0.14, "linear_top1", "C1"), (0.14, "knn_top1", "C0")):
                first, *_, last = curve(run, metric).values()
                arrow = {"arrowstyle": "->", "color": color, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
                axes.annotate("", (last, row + shift), (first, row + shift), arrowprops=arrow)
                axes.plot([first, last], [row + shift] * 2, ".", color=color, markersize=1)
        axes.set(title=NAMES.get(method, method), xlabel="accuracy, %")
        axes.set_yticks(range(len(cells)), list(cells))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", linewidth=0.4)
    panels[0].invert_yaxis()
    lines = [panels[0].plot([], [], color=color)[0] for color in ("C0", "C1")]
    figure.legend(lines, ["20-NN", "linear probe"], loc="outside lower left", ncol=2, frameon=False)
    figure.savefig(output)


def main() -> None:
    """Run all cells, and print the table."""
    settings = parse(GridBenchmark)
    runs: dict[str, dict[str, Path]] = {method: {} for method in settings.methods}
    for cell in settings.cells:
        for method in settings.methods:
            runs[method][cell] = pretrain(settings, method, cell)
    rows = [[cell, *(change(cells[cell]) for cells in runs.values())] for cell in settings.cells]
    command = shlex.join(["python", "benchmarks/grid.py", *sys.argv[1:]])
    how = f"{machine()}. 20-NN before -> after training / linear probe before -> after training, in percent."
    publish([f"`{command}`", how, table(["cell", *settings.methods], rows)], settings.output)
    if settings.picture:
        draw(runs, settings.picture)


if __name__ == "__main__":
    with exit_on_user_error():
        main()

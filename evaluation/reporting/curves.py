"""Charts of a report, drawn by matplotlib: metrics over the steps of training, and scores over checkpoints."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tessera.evaluation.reporting.runs import Run
from tessera.evaluation.reporting.table import online_evaluations

PALETTE = ("#3b6fb6", "#d1722e", "#3f9160", "#b04a7c", "#8267b8", "#a8862b", "#3c97a8", "#8a6a5a")
"""Colours of runs. Each is readable on white and on dark gray."""
DASHES = ("solid", "dashed", "dotted", "dashdot")
INK, FAINT = "#010203", "#040506"
"""Colours of text and of grid lines in a chart. `to_svg` replaces both by colours of the page."""
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.parse_math": False,  # a name may hold dollar signs
}


@dataclass(frozen=True)
class Look:
    """Colour and dashes of a run in all charts and on the page."""

    color: str
    dashes: str


@dataclass(frozen=True)
class Chart:
    """A chart with one line per run."""

    title: str
    lines: Mapping[str, Mapping[int, float]]
    """Values by step, by the name of the run."""
    unit: str = ""
    reference: float | None = None
    """Value of the raw pixels, drawn as a horizontal line."""


def looks(runs: Sequence[Run]) -> dict[str, Look]:
    """Return the look of each run. The dashes change when all colours are used."""
    styles = [Look(color, dashes) for dashes in DASHES for color in PALETTE]
    return dict(zip((run.name for run in runs), islice(cycle(styles), len(runs)), strict=True))


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of some runs: accuracies during training, scores of checkpoints, loss.

    Values that cannot be compared are in different charts: accuracies on different images, and losses of different
    methods.
    """
    found = online_charts(runs) + checkpoint_charts(runs)
    for method in dict.fromkeys(run.method for run in runs):
        found.append(Chart(f"loss of {method}", {run.name: run.curve("loss") for run in runs if run.method == method}))
    return [chart for chart in found if any(chart.lines.values())]


def online_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart of each evaluation during training. That of k-NN also shows the accuracy of the raw pixels."""
    found = []
    for title, metric, curves in online_evaluations(runs):
        scored = [(run, curve) for run, curve in zip(runs, curves, strict=True) if curve]
        pixels = [value for run, _ in scored for value in run.curve("knn_pixels").values() if metric == "knn_top1"]
        lines = {run.name: _percent(curve) for run, curve in scored}
        found.append(Chart(title, lines, "%", reference=100 * pixels[0] if pixels else None))
    return found


def checkpoint_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart of each evaluation that scored a run at several steps."""
    found = []
    for name in dict.fromkeys(result.name for run in runs for result in run.results):
        lines = {run.name: _percent(run.scores(name)) for run in runs}
        if any(len(line) > 1 for line in lines.values()):
            found.append(Chart(f"{name}, checkpoints", lines, "%"))
    return found


def _percent(curve: Mapping[int, float]) -> dict[int, float]:
    return {step: 100 * value for step, value in curve.items()}


def draw(chart: Chart, axes: Axes, look: Mapping[str, Look]) -> None:
    """Draw a chart. Few values are also marked by dots."""
    for name, line in chart.lines.items():
        if line:
            dots = "o" if len(line) <= 20 else ""
            style = {"color": look[name].color, "linestyle": look[name].dashes, "marker": dots, "markersize": 3.5}
            axes.plot(list(line), list(line.values()), linewidth=1.6, **style)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=INK, linewidth=0.9, linestyle=(0, (2, 3)))
        axes.annotate(
            f"raw pixels {chart.reference:.1f}", (1, chart.reference), xycoords=("axes fraction", "data"),
            xytext=(0, -11), textcoords="offset points", ha="right", fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_title(textwrap.fill(f"{chart.title}, {chart.unit}" if chart.unit else chart.title, 46), pad=10)
    axes.set_xlabel("step")
    axes.set_axisbelow(True)


def to_svg(chart: Chart, look: Mapping[str, Look]) -> str:
    """Return a chart as an SVG element whose text and grid take the colours of the page."""
    with rc_context(STYLE | {"svg.hashsalt": chart.title}):  # so that two charts of a page share no id
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(chart, axes, look)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration, which HTML does not allow
    return svg.replace(INK, "currentColor").replace(FAINT, "var(--line)")

"""Charts of a report, drawn by matplotlib: scores of evaluations and losses over the steps of training."""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tessera.extras.report.run_folders import RunFolder

PALETTE = ("#3b6fb6", "#d1722e", "#3f9160", "#b04a7c", "#8267b8", "#a8862b", "#3c97a8", "#8a6a5a")
"""Colours of runs. Each is readable on white and on dark gray."""
DASHES = ("solid", "dashed", "dotted", "dashdot")
INK, FAINT = "#010203", "#040506"
"""Placeholder colours of text and of grid lines in a chart. `to_svg` replaces both by colours of the page."""
STYLE: Any = {
    "svg.fonttype": "none",  # write text as text elements, which use the font of the page
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.parse_math": False,  # a name may contain dollar signs, which do not mark formulas
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
    """Dictionary from the name of a run to its values by step."""
    reference: float | None = None
    """Value of the raw pixels, drawn as a horizontal line."""


def looks(runs: Sequence[RunFolder]) -> dict[str, Look]:
    """Return the look of each run by name. Once all colours are used, they repeat with other dashes."""
    styles = [Look(color, dashes) for dashes in DASHES for color in PALETTE]
    return dict(zip((run.name for run in runs), islice(cycle(styles), len(runs)), strict=True))


def charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Return one chart for each evaluation that scored a run at several steps, and one chart of the losses per method.

    Losses of different methods cannot be compared.
    """
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.scores):
        scores = {run.name: run.scores.get(name, {}) for run in runs}
        lines = {run: {step: 100 * score for step, score in curve.items()} for run, curve in scores.items()}
        pixels = [run.curve("knn_pixels").get(0) for run in runs if run.names.get(run.online("knn_top1")) == name]
        reference = next((100 * score for score in pixels if score is not None), None)
        if any(len(line) > 1 for line in lines.values()):
            found.append(Chart(f"{name}, %", lines, reference))
    for method in dict.fromkeys(run.method for run in runs):
        lines = {run.name: run.curve("loss") for run in runs if run.method == method}
        found += [Chart(f"loss of {method}", lines)] if any(lines.values()) else []
    return found


def draw(chart: Chart, axes: Axes, look: Mapping[str, Look]) -> None:
    """Draw a chart. In lines with at most 20 values, a dot marks each value."""
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
    axes.set_title(textwrap.fill(chart.title, 46), pad=10)
    axes.set_xlabel("step")


def to_svg(chart: Chart, look: Mapping[str, Look]) -> str:
    """Return a chart as an SVG element whose text and grid take the colours of the page."""
    return axes_to_svg(chart.title, lambda axes: draw(chart, axes, look))


def axes_to_svg(key: str, paint: Callable[[Axes], None], size: tuple[float, float] = (4.6, 2.9)) -> str:
    """Return what `paint` draws as an SVG element whose text and grid take the colours of the page.

    Args:
        key: text that makes the ids of the elements unique on the page.
        paint: function that draws into axes.
        size: width and height in inches.
    """
    with rc_context(STYLE | {"svg.hashsalt": key}):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]  # remove the XML declaration, which HTML does not allow
    return svg.replace(INK, "currentColor").replace(FAINT, "var(--line)")

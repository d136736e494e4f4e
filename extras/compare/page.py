"""The page of a comparison: one HTML file with the look of `tessera report`, without a server or a network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes

from tessera.extras.compare.plan import RAW
from tessera.extras.report import page as report_page
from tessera.extras.report.curves import INK, PALETTE, axes_to_svg


def render(found: Mapping[str, Any]) -> str:
    """Return the HTML text of the page. All names are escaped.

    Args:
        found: result of `results`.
    """
    folders = (Path(__file__).parent, Path(report_page.__file__).parent)
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(folder) for folder in folders]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["percent"] = lambda value: "–" if value is None else f"{100 * value:.1f}"
    environment.filters["minutes"] = lambda value: "–" if value is None else f"{value / 60:.1f}"
    rows = sorted(found["arms"].items(), key=lambda row: -row[1]["mean"])
    trained = [name for name, row in found["arms"].items() if row["trained"]]
    colors = {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(trained)}
    return environment.get_template("compare.html").render(
        title="Comparison of methods",
        found=found,
        rows=rows,
        others=[name for name in score_names(found) if name != found["score"]],
        colors=colors,
        chart=Markup(curves(found, colors)),  # matplotlib escapes the texts
    )


def score_names(found: Mapping[str, Any]) -> list[str]:
    """Return the names of all scores."""
    return list(dict.fromkeys(name for row in found["arms"].values() for name in row["scores"]))


def table(found: Mapping[str, Any]) -> str:
    """Return the table of a document in Markdown: scores, images and compute of each arm."""
    names = score_names(found)
    unit = f"minutes of {found['cost']['unit']} time"
    lines = [" | ".join(["| method", *(f"{name}, %" for name in names), "images", f"{unit} |"])]
    lines.append("|---|" + "--:|" * (len(names) + 2))
    for arm, row in sorted(found["arms"].items(), key=lambda row: -row[1]["mean"]):
        cells = [_plus_minus(row["scores"].get(name)) for name in names]
        seconds = found["cost"]["arms"].get(arm)
        cells += [f"{row['images']:,}" if row["trained"] else "", f"{seconds / 60:.1f}" if seconds else ""]
        lines.append(" | ".join([f"| {arm}", *cells]) + " |")
    seeds = f"{found['seeds']} seed{'' if found['seeds'] == 1 else 's'}"
    only = "" if found["seeds"] > 1 else " over the images alone"
    note = f"{found['encoder']}, {seeds}, {found['scored_images']:,} scored images; ± twice the standard error{only}."
    return "\n".join([*lines, "", f"{note} {found['verdict']}"]) + "\n"


def _plus_minus(score: Mapping[str, Any] | None) -> str:
    """Return a score in percent with its error; empty without a score."""
    if score is None:
        return ""
    error = score["error"] if score["error"] is not None else score["error_of_images"]
    return f"{100 * score['mean']:.1f} ± {100 * error:.1f}"


def curves(found: Mapping[str, Any], colors: Mapping[str, str]) -> str:
    """Return the curves as SVG: mean over the seeds, and a band from the lowest to the highest seed."""

    def draw(axes: Axes) -> None:
        ends = dict[str, tuple[float, float]]()
        for name, color in colors.items():
            row = found["arms"][name]
            if not row["method"]:  # another library, which is scored at its end
                place, end, error = _place(found, row, row["steps"]), 100 * row["mean"], 100 * (row["error"] or 0)
                axes.errorbar(place, end, error or None, color=color, marker="D", markersize=5, capsize=3)
                ends[name] = place, end
                continue
            runs = [dict(curve) for curve in row["curves"].values()]
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            if not steps:
                continue
            values = 100 * np.array([[run[step] for step in steps] for run in runs])  # (seeds, points)
            places = [_place(found, row, step) for step in steps]
            axes.fill_between(places, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
            axes.plot(places, values.mean(0), color=color, linewidth=1.8, marker="o", markersize=3.5)
            ends[name] = places[-1], float(values.mean(0)[-1])
        if RAW in found["arms"]:
            pixels = 100 * found["arms"][RAW]["mean"]
            axes.axhline(pixels, color=INK, linewidth=0.9, linestyle=(0, (2, 3)))
            axes.annotate(
                f"raw pixels {pixels:.1f}", (1, pixels), (0, -11), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", fontsize=9, color=INK,
            )  # fmt: skip
        _label(axes, ends)  # after all that is drawn, which sets the limits of the axes
        axes.set_title(f"{found['score']}, %", pad=10)
        axes.set_xlabel(f"minutes of {found['cost']['unit']} time" if found["minutes"] else "step")

    return axes_to_svg("comparison", draw, size=(7.6, 4.0))


def _place(found: Mapping[str, Any], row: Mapping[str, Any], step: int) -> float:
    """Return the place of a step on the axis of the curves: planned compute in minutes, or the step."""
    return step / row["steps"] * found["minutes"] if found["minutes"] else step


def _label(axes: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Write the name of each curve at its end. Names that would overlap move up."""
    axes.margins(x=0.12)
    low, high = axes.get_ylim()
    lowest = -np.inf
    for name, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        lowest = max(y, lowest + 0.07 * (high - low))
        axes.annotate(name, (x, lowest), (6, 0), textcoords="offset points", color=INK, va="center")

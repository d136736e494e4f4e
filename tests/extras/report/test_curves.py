"""Charts: the drawn values, one look for each run, and SVG that belongs into a page."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tessera.extras.report.curves import Chart, Look, charts, draw, looks, to_svg
from tessera.extras.report.run_folders import read_runs
from tests.extras.report.made import add_result, make_run, record


def test_charts_hold_the_metrics_of_the_runs(tmp_path: Path) -> None:
    both = {"knn_top1": 0.1, "linear_top1": 0.2}
    last = record(20, 2.0, knn_top1=0.5, linear_top1=0.75)
    settings = {"evaluation": {"val": "val.tar", "k": 20, "linear_iterations": 100}}
    make_run(tmp_path / "a", [{"step": 0, "knn_pixels": 0.8, **both}, last], **settings)
    make_run(tmp_path / "b", [record(10, 3.0)])
    make_run(tmp_path / "c", [record(10, 0.7)], method="mae")
    runs, _ = read_runs([tmp_path])
    knn, linear, dino, mae = charts(runs)
    assert (knn.title, knn.reference) == ("20-NN in training, val, %", 80.0)
    assert knn.lines == {"a": {0: 10.0, 20: 50.0}, "b": {}, "c": {}}
    assert linear.title == "linear probe of 100 iterations in training, val, %"
    assert (linear.lines["a"], linear.reference) == ({0: 20.0, 20: 75.0}, None)
    assert (dino.title, dino.lines) == ("loss of dino", {"a": {20: 2.0}, "b": {10: 3.0}})
    assert (mae.title, mae.lines) == ("loss of mae", {"c": {10: 0.7}})
    figure = Figure()
    axes = figure.subplots()
    look = looks(runs)
    draw(dino, axes, look)
    for line, name in zip(axes.lines, ("a", "b"), strict=True):
        expected = np.array(list(dino.lines[name].items()))
        np.testing.assert_array_equal(np.stack([line.get_xdata(), line.get_ydata()], 1), expected)
        assert to_hex(line.get_color()) == look[name].color


def test_only_evaluations_of_several_steps_are_drawn(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, [record(20, 2.0)])
        add_result(tmp_path / name, "once.json", protocol="once", top1=0.1, step=20)
    for step, score in ((20, 0.75), (10, 0.5)):
        add_result(tmp_path / "a", f"{step}.json", protocol="linear probe", top1=score, step=step)
    chart, loss = charts(read_runs([tmp_path])[0])
    assert (chart.title, chart.lines) == ("linear probe, %", {"a": {10: 50.0, 20: 75.0}, "b": {}})
    assert loss.title == "loss of dino"


def test_svg_takes_the_colours_of_the_page() -> None:
    chart = Chart("a <b> & $x$ \N{GREEK SMALL LETTER LAMDA}", {"run": {0: 1.0, 5: 2.0}})
    look = {"run": Look("#3b6fb6", "solid")}
    svg = to_svg(chart, look)
    texts = ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert chart.title in texts
    assert "currentColor" in svg
    assert "var(--line)" in svg
    assert "#010203" not in svg
    assert svg == to_svg(chart, look)  # the same bytes every time

"""The page: its data, and its behaviour in Chromium when it is opened from a file."""

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.data.exclude import read_names
from tessera.extras.explore import page
from tessera.extras.explore.findings import Findings
from tests.launched import ROOT

EVIL = '</script><img src=x onerror="document.title=1">,"\n'
FITTED = 0.92
"""Share of the map that the page fills when it opens."""


def jpeg(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, 40, 90)).save(buffer, "JPEG")
    return buffer.getvalue()


def made(count: int = 300) -> tuple[Findings, np.ndarray]:
    """Return findings, and places on the map: images 0 to 99, 100 to 199 and so on are in three separate squares."""
    random = np.random.default_rng(0)
    labels = np.arange(count) // 100
    centres = np.array([[-0.7, -0.7], [0.7, -0.7], [0.0, 0.7]])
    places = (centres[labels % 3] + random.uniform(-0.2, 0.2, (count, 2))).astype(np.float32)
    sets = np.zeros(count, np.int8)
    sets[[1, 120]] = 1
    outliers = np.zeros(count, bool)
    outliers[[3, 150, 299]] = True
    findings = Findings(
        keys=[EVIL, *(f"a,{number}" for number in range(1, count))],
        sets=sets,
        labels=np.where(np.arange(count) == 5, -1, labels),
        class_names=["fish", "dog", "truck"],
        features=random.normal(size=(count, 8)).astype(np.float32),
        scores={"outlier": np.append(np.linspace(0, 1, count - 1), np.nan).astype(np.float32)},
        flags={"outlier": outliers, "blank": np.zeros(count, bool)},
        cluster=(labels % 2).astype(np.int32),
        medoids=np.array([7, 107]),
        pairs=np.array([[0, 1], [11, 12], [10, 11], [20, 21]]),  # 10-11-12 is a group; 1 is of validation
        pair_similarity=np.array([0.97, 0.99, 0.98, 0.95], np.float32),
        pair_margin=np.array([0.5, 0.4, 0.3, 0.2], np.float32),
        pair_kind=np.array([1, 0, 0, 0]),
        notes={"threshold": np.float32(0.5), "recall": {"flip": 0.25}},
    )
    return findings, places


def write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Findings, np.ndarray, Path]:
    findings, places = made()
    monkeypatch.setattr(page, "project", lambda features: places)
    return findings, places, page.write_page(findings, [jpeg(number) for number in range(len(places))], folder)


def read_script(file: Path) -> Any:
    """Return the JSON between the first and the last bracket of a script."""
    text = file.read_text()
    start = min(place for place in (text.find("{"), text.find("[")) if place >= 0)
    return json.loads(text[start:].rstrip(");\n"))


def numbers(text: str, dtype: str) -> list[float]:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()


def test_the_scripts_hold_the_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings, places, file = write(tmp_path, monkeypatch)
    data = read_script(tmp_path / "page" / "data.js")
    assert file == tmp_path / "index.html"
    assert data["keys"] == findings.keys
    assert numbers(data["x"], "<f4") == places[:, 0].tolist()
    assert numbers(data["labels"], "<i4") == findings.labels.tolist()
    assert {name: numbers(flag, "<u4") for name, flag in data["flags"].items()} == {
        "outlier": [3, 150, 299],
        "blank": [],
    }
    assert numbers(data["pairs"]["i"], "<u4") == [0, 11, 10, 20]  # the order of pairs.parquet
    assert numbers(data["pairs"]["j"], "<u4") == [1, 12, 11, 21]
    assert numbers(data["pairs"]["kind"], "u1") == [1, 0, 0, 0]
    assert data["notes"] == [["threshold", 0.5], ["recall flip", 0.25]]
    packs = [read_script(tmp_path / "page" / "thumbnails" / f"{pack}.js") for pack in range(2)]
    assert [len(pack) for pack in packs] == [page.PACK, 300 - page.PACK]
    pictures = [base64.b64decode(picture) for pack in packs for picture in pack]
    assert [pictures[int(slot)] for slot in numbers(data["slots"], "<u4")] == [jpeg(number) for number in range(300)]


def test_a_page_without_clusters_pairs_and_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = Findings(["a", "b"], np.zeros(2, np.int8), np.array([-1, 1]), [], np.eye(2, dtype=np.float32))
    page.write_page(findings, [b"", b""], tmp_path)
    data = read_script(tmp_path / "page" / "data.js")
    assert data["class_names"] == ["class 0", "class 1"]
    assert data["pairs"]["i"] == data["cluster"] == ""
    assert numbers(data["x"], "<f4") == [1, -1] or numbers(data["x"], "<f4") == [-1, 1]


def test_an_older_page_leaves_no_thumbnails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch)
    (tmp_path / "page" / "thumbnails" / "7.js").write_text("old")
    (tmp_path / "findings.parquet").write_text("kept")
    write(tmp_path, monkeypatch)
    assert sorted(file.name for file in (tmp_path / "page" / "thumbnails").iterdir()) == ["0.js", "1.js"]
    assert (tmp_path / "findings.parquet").exists()


def test_images_with_close_numbers_are_close_on_the_map() -> None:
    places = np.random.default_rng(0).uniform(-1, 1, (4096, 2)).astype(np.float32)
    order = page.along_map(places)
    assert sorted(order) == list(range(4096))
    spread = [np.ptp(places[order[start : start + 256]], axis=0).max() for start in range(0, 4096, 256)]
    assert np.median(spread) < 0.8  # of 2; without an order it is 2


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_few_images_are_placed_without_umap(count: int, channels: int) -> None:
    features = np.random.default_rng(0).normal(size=(count, channels)).astype(np.float32)
    places = page.project(features)
    assert places.shape == (count, 2)
    assert places.dtype == np.float32
    assert np.abs(places).max() == pytest.approx(float(count > 1), abs=1e-5)


@pytest.mark.slow
def test_the_map_keeps_groups_apart_and_repeats() -> None:
    pytest.importorskip("umap", reason="umap-learn is not installed (pip install umap-learn)")
    random = np.random.default_rng(0)
    group = np.repeat(np.arange(4), 50)
    features = (random.normal(size=(4, 16))[group] * 3 + random.normal(size=(200, 16))).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    places = page.project(features)
    distances = np.linalg.norm(places[:, None] - places[None], axis=2)
    nearest = np.argsort(distances, axis=1)[:, 1:6]
    assert (group[nearest] == group[:, None]).mean() > 0.95
    assert np.abs(places).max() == pytest.approx(1)
    np.testing.assert_array_equal(places, page.project(features))


def test_the_files_of_the_page_are_in_the_wheel() -> None:
    listed = (ROOT / "pyproject.toml").read_text().split('"tessera.extras.explore" = ')[1].splitlines()[0]
    files = {file.name for file in (ROOT / "extras" / "explore").iterdir() if file.suffix in (".js", ".html", ".css")}
    assert set(json.loads(listed)) == files


def written(view: Any, button: str) -> list[list[str]]:
    """Press a button of the page. Return the rows of the file that it writes. `data.exclude` reads the same names."""
    with view.expect_download() as download:
        view.locator(button).click()
    file = Path(download.value.path()).with_suffix(".csv")
    download.value.save_as(file)
    with file.open(newline="") as text:
        rows = list(csv.reader(text))
    assert [[name] for name in read_names(str(file))] == rows[1:]
    return rows


class Opened:
    """The page in a browser. Points of the map are given from -1 to 1."""

    def __init__(self, browser: Any, file: Path) -> None:
        self.view = browser.new_page(viewport={"width": 1600, "height": 900})
        self.said, self.requests = list[str](), list[str]()
        self.view.on("console", lambda message: self.said.append(message.text))
        self.view.on("pageerror", lambda error: self.said.append(str(error)))
        self.view.on("request", lambda request: self.requests.append(request.url))
        self.view.goto(file.as_uri())
        self.view.wait_for_function(f"view && Math.abs(view[0] - {FITTED}) < 1e-6")
        self.area = self.view.locator("#canvas").bounding_box()

    def on_screen(self, x: float, y: float) -> tuple[float, float]:
        half, area = self.area["height"] / 2 * FITTED, self.area  # the map is wider than high
        return float(area["x"] + area["width"] / 2 + x * half), float(area["y"] + area["height"] / 2 - y * half)

    def lasso(self, *corners: tuple[float, float]) -> None:
        mouse = self.view.mouse
        mouse.move(*self.on_screen(*corners[0]))
        mouse.down()
        for corner in (*corners[1:], corners[0]):
            mouse.move(*self.on_screen(*corner), steps=8)
            self.view.wait_for_timeout(30)
        mouse.up()


@pytest.mark.slow
def test_the_page_in_chromium(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, places, file = write(tmp_path, monkeypatch)
    expect = pytest.importorskip("playwright.sync_api").expect
    expect.set_options(timeout=30_000)
    opened = Opened(browser, file)
    points_and_lasso(opened, places, expect)
    filters_and_copies(opened.view, expect)
    keys_and_widths(opened.view, expect)
    opened.view.close()
    assert [text for text in opened.said if "GL Driver Message" not in text] == []
    outside = [url for url in opened.requests if not url.startswith(("data:", "blob:", f"{tmp_path.as_uri()}/"))]
    assert outside == []


@pytest.mark.slow
def test_a_page_that_is_opened_and_zoomed_while_it_has_no_size(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, monkeypatch)
    for style in ("display: none", "width: 0; height: 700px", "width: 900px; height: 0"):
        frame = f'<iframe src="index.html" style="{style}; border: 0"></iframe>'
        (tmp_path / "outer.html").write_text(frame)
        outer, said = browser.new_page(), list[str]()
        outer.on("pageerror", lambda error, said=said: said.append(str(error)))
        outer.goto((tmp_path / "outer.html").as_uri())
        inner = outer.frames[1]
        inner.wait_for_function("plot?.get('points')?.length === 300")
        for shown in ("width: 900px; height: 700px", style, "width: 900px; height: 700px"):
            outer.locator("iframe").evaluate("(frame, style) => frame.style.cssText = style", f"{shown}; border: 0")
            outer.wait_for_timeout(300)  # for frames, which draw
            if shown != style:
                inner.wait_for_function(f"Math.abs(plot.get('cameraView')[0] - {FITTED}) < 1e-6")
            inner.evaluate("look_at(0.5, 0, 0)")
            outer.wait_for_timeout(300)
            inner.evaluate("fit()")
        assert said == []
        outer.close()


def points_and_lasso(opened: Opened, places: np.ndarray, expect: Any) -> None:
    view = opened.view
    expect(view.locator("#shown")).to_have_text("300 of 300 images shown")
    assert view.locator("#legend button").all_inner_texts() == ["fish\n99", "dog\n100", "truck\n100", "no class\n1"]
    view.mouse.move(*opened.on_screen(*places[150]))
    view.wait_for_selector("#tip:not([hidden])")
    expect(view.locator("#image-facts")).to_contain_text("a,150")
    view.wait_for_function("document.querySelector('#tip img').naturalWidth === 8")

    view.keyboard.press("Tab")
    view.locator("#canvas").focus()
    view.keyboard.press("l")
    opened.lasso((0.4, -0.4), (1.0, -0.4), (1.0, -1.0), (0.4, -1.0))  # the square of images 100 to 199
    expect(view.locator("#selected")).to_have_text("100 images selected: 99 of training, 1 of validation")
    assert written(view, "#write-data") == [["key"], *([f"a,{n}"] for n in range(100, 200) if n != 120)]
    assert written(view, "#write-val") == [["key"], ["a,120"]]
    view.locator("#mode").select_option("remove")
    across = np.sort(places[100:200, 0])
    gap = int(np.argmax(np.diff(across)))
    border = (across[gap] + across[gap + 1]) / 2  # far from all images, because corners are rounded to pixels
    opened.lasso((0.4, -0.4), (border, -0.4), (border, -1.0), (0.4, -1.0))
    kept = [number for number in range(100, 200) if places[number, 0] > border and number != 120]
    assert 0 < len(kept) < 99
    expect(view.locator("#selected")).to_contain_text(f"{len(kept)} of training")
    assert written(view, "#write-data") == [["key"], *([f"a,{number}"] for number in kept)]


def filters_and_copies(view: Any, expect: Any) -> None:
    view.locator("#flags input").first.check()
    expect(view.locator("#shown")).to_have_text("3 of 300 images shown")
    view.locator("#mode").select_option("new")
    view.locator("#select-shown").click()
    assert written(view, "#write-data") == [["key"], ["a,3"], ["a,150"], ["a,299"]]
    view.locator("#legend button").nth(2).click()
    expect(view.locator("#shown")).to_have_text("1 of 300 images shown")
    view.locator("#reset").click()
    view.locator("#colour").select_option("outlier")
    expect(view.locator("#legend")).to_contain_text("1 image without a value")
    view.locator("#low").fill("0.9")
    expect(view.locator("#shown")).to_have_text("30 of 300 images shown")
    view.locator("#reset").click()

    view.locator("#clear").click()
    assert view.locator("#copies li").count() == 4
    assert view.locator("#copies li p").all_inner_texts()[0] == "margin 0.500 · similarity 0.970"
    view.locator("#select-copies").click()  # 0 has a copy in validation; 10 and 20 are the first of their groups
    assert written(view, "#write-data") == [["key"], [EVIL], ["a,11"], ["a,12"], ["a,21"]]
    view.locator("#copies .thumbnail").nth(0).click()
    assert written(view, "#write-data") == [["key"], ["a,11"], ["a,12"], ["a,21"]]


def keys_and_widths(view: Any, expect: Any) -> None:
    view.locator("#canvas").focus()
    view.keyboard.press("Escape")
    view.keyboard.press("v")
    expect(view.locator("#selected")).to_contain_text("300 images selected")
    view.keyboard.press("Escape")
    view.keyboard.press("n")
    view.keyboard.press("Enter")
    expect(view.locator("#selected")).to_contain_text("1 image selected")
    view.keyboard.press("+")
    view.keyboard.press("ArrowLeft")
    view.wait_for_function("view[0] > 1.1 && view[12] > 0.05")

    for width in (1600, 800, 380):
        view.set_viewport_size({"width": width, "height": 800})
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
    assert view.title() == "Map of the images"

"""Fixtures of other folders for the extras, and a browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.evaluation.conftest import cache, digits, shards  # noqa: F401
from tests.pretrain.conftest import chosen, fresh_engine, start  # noqa: F401

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SOFTWARE_GL = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *SOFTWARE_GL])
        yield chromium
        chromium.close()

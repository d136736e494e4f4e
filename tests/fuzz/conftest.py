"""Settings of the fuzz tests: no log, and a cache of their own."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path_factory.mktemp("cache")))
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)

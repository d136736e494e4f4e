"""The Python examples of docs/own_data.md run, in their order."""

import re

import numpy as np
import pytest
import webdataset as wds

import tessera
from tests.data.batches import saved
from tests.launched import ROOT
from tests.tessera.test_interface import SMALL

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_data.md").read_text(), re.DOTALL)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Small shards and small settings; the examples train for one step."""
    folder = tmp_path / "shards" / "train"
    folder.mkdir(parents=True)
    with wds.TarWriter(str(folder / "train-000000.tar")) as writer:
        for number in range(64):
            pixels = np.random.default_rng(number).integers(30, 256, (24, 24, 3), dtype=np.uint8)
            writer.write({"__key__": f"{number:03d}", "jpg": saved(pixels, "JPEG"), "cls": str(number % 2).encode()})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pretrain, batches = tessera.pretrain, tessera.training_batches
    encoder = {"variant": "vit_micro", "depth": 1, "dim": 24, "heads": 2}
    given = {"steps": 1, "batch_size": 16, "workers": 0, "evaluation": {"pictures": 0}, "encoder": encoder}

    def small_pretrain(**settings):
        return pretrain(**settings | given | {"lejepa": {"global_size": 16}})

    def small_batches(**settings):
        return list(batches(**settings | given | {"dino": SMALL["dino"] | {"global_size": 16, "local_size": 16}}))

    monkeypatch.setattr(tessera, "pretrain", small_pretrain)
    monkeypatch.setattr(tessera, "training_batches", small_batches)
    return tmp_path


@pytest.mark.medium
def test_examples_run(small, capsys):
    assert len(BLOCKS) == 5
    found = []
    for block in BLOCKS:
        if block.startswith("# "):
            (small / block.partition("\n")[0].removeprefix("# ")).write_text(block)
            continue
        names: dict = {}
        exec(block, names)
        found.append(names)
    assert found[0]["run"].config["data"]["shards"] == "python:FakeData"
    assert [len(batch) for batch in found[1]["batches"]] == [16]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("32 ")] == [
        "160",
        "192",
        "224",
    ]
    assert len(found[3]["batches"][0].views) == 2

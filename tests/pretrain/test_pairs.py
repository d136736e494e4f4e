"""Every method with every encoder, through the real command: some steps on the embedded images,
exported, loaded, scored by k-NN. Some of each method and of each encoder are also stopped and resumed, and run on two
processes beside one.

`-k "dino and swin_micro"` chooses methods and encoders.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tessera import encoders
from tessera.pretrain.methods import METHODS
from tests.launched import records, same_encoder, timeless
from tests.pretrain.small import MICRO, arguments

SCRIPT = Path(__file__).with_name("runs_in_turn.py")
SETTINGS: dict[str, dict[str, str]] = {
    "mae of navit_micro, native sizes in blocks": {"native": "true", "mask": "block", "smallest_size": "12"},
    "mae of rope_vit_micro, native sizes in blocks": {"native": "true", "mask": "block", "smallest_size": "12"},
    "mae of vit_micro, in place": {"drop": "false", "decoder_depth": "1"},
    "dino of rope_vit_micro, random coordinates": {"encoder.rope_shift": "0.1", "encoder.rope_rescale": "2"},
    "distill of vit_micro, two students": {"students": "swin_micro"},
    "dinov3 of rope_vit_micro, mixed sizes": {
        "sizes": "{16/12: 0.5, 24/16/32: 0.5}", "gram_size": "16", "gram_start": "1"
    },
}  # fmt: skip
"""Other settings of a method and of an encoder."""
RUNS = {f"{method} of {variant}": {} for method in METHODS.names() for variant in MICRO}
ALONE = {
    f"{method} of {variant}"
    for i, method in enumerate(METHODS.names())
    for j, variant in enumerate(MICRO)
    if (i + j) % 6
}
"""Pairs that run once, on one process: five of six. Neither DDP nor a checkpoint knows the family of an encoder."""
RUNS |= {name: given for name, given in SETTINGS.items() if name.partition(" of ")[0] in METHODS}


def command(name: str, output: Path, *more: str) -> list[str]:
    """The command line of the run `METHOD of ENCODER, more`."""
    method, _, variant = name.partition(",")[0].partition(" of ")
    given = RUNS.get(name, {})
    own = {f"--{key}" if "." in key else f"--{method}.{key}": value for key, value in given.items()}
    return arguments(method, variant, output, *(word for pair in own.items() for word in pair), *more)


class Both:
    """The chosen runs on one process; those that are not `ALONE` also resumed, and on two processes."""

    def __init__(self, start: Callable, names: list[str], folder: Path, script: Path = SCRIPT) -> None:
        self.folder = folder
        whole = [command(name, folder / "one" / name) for name in names]
        two = [name for name in names if name not in ALONE]
        resumed = [command(name, folder / "one" / name, "--resume") for name in two]
        shared = [command(name, folder / "two" / name, "--evaluation.pictures", "0") for name in two]
        self.launches = start(script, [*whole, *resumed]), start(script, shared, processes=2)

    def check(self, name: str) -> None:
        """Check that the run trained and was scored, resumed bit for bit, and is the same on two processes."""
        for launch in self.launches:
            launch.wait()
        one = self.folder / "one" / name
        lines = {line["step"]: line for line in records(one)}
        assert sorted(lines) == list(range(7))
        score = "val_top1" if METHODS[name.partition(" of ")[0]].supervised else "knn_top1"
        assert {step for step, line in lines.items() if score in line} == {0, 6}
        before = encoders.load(one / "checkpoints" / "step-00000003" / "encoder.safetensors").state_dict()
        after = encoders.load(one).state_dict()
        assert any(not torch.equal(tensor, before[key]) for key, tensor in after.items())
        if name not in ALONE:
            assert timeless(one) == timeless(one / "uninterrupted")
            assert same_encoder(one, one / "uninterrupted")
            shared = [line for line in records(self.folder / "two" / name) if "loss" in line]
            assert len(shared) == 6
            for line in shared:
                assert line["loss"] == pytest.approx(lines[line["step"]]["loss"], rel=1e-5, abs=1e-5), line["step"]


@pytest.fixture(scope="module")
def runs(start: Callable, chosen: list[dict], tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(start, [given["name"] for given in chosen], tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_pairing_trains_resumes_exports_and_scores(name: str, runs: Both) -> None:
    runs.check(name)


def test_every_family_has_a_smallest_encoder() -> None:
    families = {encoders.family(variant) for variant in MICRO}
    assert families == {encoders.family(variant) for variant in encoders.VARIANTS}

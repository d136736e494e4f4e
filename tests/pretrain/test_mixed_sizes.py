"""Runs of DINOv3 whose crop sizes are drawn for each step: resumption, dry run, preview, and the count of a step."""

import shutil
from pathlib import Path

import pytest

from tessera.data.demo import demo_shards
from tessera.pretrain.build import build_method
from tessera.pretrain.command_line import load
from tessera.pretrain.methods.dinov3 import DINOv3
from tessera.pretrain.preflight import activation_bytes
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main
from tests.installed import needs_extra
from tests.launched import same_encoder, timeless

SIZES = "{16/8: 0.5, 24/12/32: 0.5}"
WORDS = (
    "--method dinov3 --encoder rope_vit_micro --encoder.depth 2 --encoder.dim 24 --encoder.heads 2 --batch_size 16 "
    "--steps 6 --seed 1 --record_every 1 --checkpoint_every 3 --workers 0 --evaluation.pictures 1 "
    "--encoder.drop_path 0.2 --encoder.rope_rescale 2 --dinov3.prototypes 64 --dinov3.hidden_dim 32 "
    "--dinov3.bottleneck_dim 16 --dinov3.local_crops 2 --dinov3.gram_start 1 --evaluation.view_images 16"
)


def command(sizes: str = SIZES) -> list[str]:
    return ["--data", demo_shards()[0], *WORDS.split(), "--dinov3.sizes", sizes]


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_with_the_sizes_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[int]]] = []
    forward = DINOv3.forward

    def watched(method, batch, step):
        if batch.positions is not None:  # the images of the checks before a run have none
            seen.append((step, [view.images.shape[-1] for view in batch.views]))
        return forward(method, batch, step)

    monkeypatch.setattr(DINOv3, "forward", watched)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main([*command(), "--output", str(whole)]) == 0
    first = dict(seen)
    assert sorted(first) == list(range(6))
    for part in (range(3), range(3, 6)):
        assert {tuple(first[step]) for step in part} == {(16, 8), (24, 12, 32)}
    shutil.copytree(whole, resumed, symlinks=True)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    seen.clear()
    assert main(["--resume", str(resumed)]) == 0
    assert dict(seen) == {step: first[step] for step in range(3, 6)}
    assert timeless(resumed) == timeless(whole)
    assert same_encoder(resumed, whole)


def test_a_dry_run_checks_all_sizes_and_prints_the_memory_of_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    def activations(sizes: str) -> int:
        return activation_bytes(build_method(resolve(load(command(sizes)), 1437), fresh=False), "fp32", 8)

    assert activations(SIZES) == activations("{24/12/32: 1}") > activations("{16/8: 1}")
    assert main([*command(), "--dry_run", "full"]) == 0
    assert "16/8: 0.5" in capsys.readouterr().out
    assert main([*command("{16/8: 1, 22/8: 1}"), "--dry_run"]) == 2
    assert "sizes 22/8: A side is not a multiple of 4 pixels, the side of a token" in capsys.readouterr().err


@needs_extra("forecast")
@pytest.mark.slow
def test_the_roofline_counts_a_step_of_the_largest_crops() -> None:
    import roofline  # of benchmarks/, which count with the device of the forecast

    def flop(sizes: dict[str, float]) -> float:
        settings = {"sizes": sizes, "gram_start": 0, "gram_warmup_steps": 0, "prototypes": 64}
        given = {"method": "dinov3", "encoder": "rope_vit_micro", "batch_size": 2}
        return roofline.count_step(roofline.RooflineBenchmark(**given, settings=settings)).total().flop

    assert flop({"16/8": 1, "24/12/32": 1}) == flop({"24/12/32": 1})

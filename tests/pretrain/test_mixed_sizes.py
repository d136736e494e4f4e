"""Runs of DINOv3 whose crop sizes are drawn for each step: resumption, dry run, preview, and the count of a step."""

import pytest

from tessera.data.demo import demo_shards
from tessera.pretrain.activations import activations
from tessera.pretrain.build import build_method
from tessera.pretrain.command_line import load
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main

SIZES = "{16/8: 0.5, 24/12/32: 0.5}"
WORDS = (
    "--method dinov3 --encoder rope_vit_micro --encoder.depth 2 --encoder.dim 24 --encoder.heads 2 --batch_size 16 "
    "--steps 6 --seed 1 --record_every 1 --checkpoint_every 3 --workers 0 --evaluation.pictures 1 "
    "--encoder.drop_path 0.2 --encoder.rope_rescale 2 --dinov3.prototypes 64 --dinov3.hidden_dim 32 "
    "--dinov3.bottleneck_dim 16 --dinov3.local_crops 2 --dinov3.gram_start 1 --evaluation.view_images 16"
)


def command(sizes: str = SIZES) -> list[str]:
    return ["--data", demo_shards()[0], *WORDS.split(), "--dinov3.sizes", sizes]


def test_a_dry_run_checks_all_sizes_and_prints_the_memory_of_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    def kept(sizes: str) -> int:
        return activations(build_method(resolve(load(command(sizes)), 1437), fresh=False), "fp32", 8).kept

    assert kept(SIZES) == kept("{24/12/32: 1}") > kept("{16/8: 1}")
    assert main([*command(), "--dry_run", "full"]) == 0
    assert "16/8: 0.5" in capsys.readouterr().out
    assert main([*command("{16/8: 1, 22/8: 1}"), "--dry_run"]) == 2
    assert "sizes 22/8: A side is not a multiple of 4 pixels, the side of a token" in capsys.readouterr().err

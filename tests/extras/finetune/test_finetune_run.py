"""A fine-tuning through the real commands: it starts from a run, learns, and resumes bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tessera import encoders
from tessera.data.demo import demo_shards
from tessera.extras.exports import command as export
from tessera.extras.finetune.command import command
from tessera.pretrain.run import main
from tests.launched import ROOT, records, same_encoder, timeless

TINY = "--encoder vit_micro --encoder.depth 2 --encoder.dim 48 --encoder.heads 3 --workers 1 --evaluation.pictures 0"
START = f"--method mae --mae.decoder_dim 16 --mae.decoder_heads 2 {TINY} --steps 2"
# the recipe of configs/digits_finetune.yaml, with some mixing
RECIPE = (
    "--steps 220 --batch_size 64 --workers 1 --record_every 1 --checkpoint_every 176 --evaluate_every 110 "
    "--evaluation.pictures 0 --optim.lr 1.6e-2 --finetune.scale 0.5,1 --finetune.flip 0 --finetune.mixup 0.2 "
    "--finetune.cutmix 0 --finetune.erasing 0 --finetune.randaugment 0 --encoder.drop_path 0.05"
)


@pytest.mark.slow
def test_fine_tuning_beats_the_knn_of_its_start_and_resumes_exactly(fork, tmp_path: Path) -> None:
    train, val = demo_shards()
    start = tmp_path / "start"
    finetune = command(["--checkpoint", str(start), "--train", train, "--val", val, *RECIPE.split()])
    commands = [[*START.split(), "--output", str(start)], finetune, [*finetune, "--resume"]]
    (tmp_path / "runs.json").write_text(json.dumps(commands))
    fork([str(tmp_path / "runs.json")], script=ROOT / "tests" / "pretrain" / "runs_in_turn.py").wait()
    folder = start / "finetune"
    lines = records(folder)
    scores = {line["step"]: line["val_top1"] for line in lines if "val_top1" in line}
    assert list(scores) == [0, 110, 220]
    assert scores[220] > records(start)[-1]["knn_top1"]
    result = json.loads((start / "evaluation" / "finetune.json").read_text())
    assert (result["top1"], result["run"], result["steps"]) == (scores[220], str(folder), 220)
    assert timeless(folder) == timeless(folder / "uninterrupted")
    assert same_encoder(folder, folder / "uninterrupted")
    tuned, first = encoders.load(folder / "encoder.safetensors"), encoders.load(start / "encoder.safetensors")
    # the variant, the size and the depth are those of the start
    changed = {name: value for name, value in tuned.settings.items() if value != first.settings[name]}
    assert changed == {"drop_path": 0.05, "positions": "learned"}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_engine")
def test_a_run_with_low_rank_updates_is_exported_in_any_form(tmp_path: Path) -> None:
    """Of a checkpoint, an export loads the method with its updates, which no format knows."""
    train, _ = demo_shards()
    run = tmp_path / "run"
    words = f"--method finetune {TINY} --finetune.lora_rank 2 --finetune.classes 10 --steps 3 --batch_size 16"
    assert main([*words.split(), "--data", train, "--optim.lr", "0.5", "--output", str(run)]) == 0
    images = torch.randn(2, 3, 16, 16)
    expected = encoders.load(run)(images).pooled
    for form in ("ours", "timm"):
        file = tmp_path / f"{form}.safetensors"
        assert "finetune after 3 steps" in export.export(run, file, to=form)
    torch.testing.assert_close(encoders.load(tmp_path / "ours.safetensors")(images).pooled, expected)
    assert not [name for name in load_file(tmp_path / "timm.safetensors") if "lora" in name]

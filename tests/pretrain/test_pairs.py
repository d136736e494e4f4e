"""Every method with every encoder, through the real command: some steps on the embedded images, stopped and resumed,
exported, loaded, scored by k-NN; two processes beside one."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tessera import encoders
from tessera.data.demo import demo_shards
from tessera.pretrain.methods import METHODS
from tests.teachers import small_settings

VARIANTS = [name for name in encoders.VARIANTS if name.endswith("_micro")]
PAIRS = [(method, variant) for method in METHODS for variant in VARIANTS]
NATIVE = {"--mae.native": "true", "--mae.mask": "block", "--mae.smallest_size": "12"}
IN_PLACE = {"--mae.drop": "false", "--mae.decoder_depth": "1"}
RUNS: dict[str, dict[str, str]] = {
    f"{method} of {variant}": {"--method": method, "--encoder": variant} for method, variant in PAIRS
}
RUNS["mae of navit_micro, native sizes in blocks"] = {"--method": "mae", "--encoder": "navit_micro"} | NATIVE
RUNS["mae of rope_vit_micro, native sizes in blocks"] = {"--method": "mae", "--encoder": "rope_vit_micro"} | NATIVE
RUNS["dino of rope_vit_micro, random coordinates"] = {
    "--method": "dino",
    "--encoder": "rope_vit_micro",
    "--encoder.rope_shift": "0.1",
    "--encoder.rope_rescale": "2",
}
RUNS["distill of vit_micro, two students"] = {
    "--method": "distill",
    "--encoder": "vit_micro",
    "--distill.students": "swin_micro",
}
RUNS["dinov3 of rope_vit_micro, mixed sizes"] = {
    "--method": "dinov3",
    "--encoder": "rope_vit_micro",
    "--dinov3.sizes": "{16/12: 0.5, 24/16/32: 0.5}",
    "--dinov3.gram_size": "16",
    "--dinov3.gram_start": "1",
}
RUNS["mae of vit_micro in place"] = {"--method": "mae", "--encoder": "vit_micro"} | IN_PLACE


def small(method: str) -> dict[str, str]:
    """The method's small settings as flags."""
    return {f"--{method}.{name}": str(value).lower() for name, value in small_settings(METHODS[method]).items()}


def scored_shards() -> tuple[str, str]:
    """One shard of the training digits and one of those held out. To score all would take most of the time of a run."""
    train, val = (f"{shards.partition('{')[0]}000000.tar" for shards in demo_shards())
    return train, val


def arguments(run: dict[str, str], output: Path, *more: str) -> list[str]:
    """The command line of a small run."""
    common = {"--steps": "6", "--batch_size": "16", "--record_every": "1", "--checkpoint_every": "3", "--workers": "1"}
    common["--optim.lr"] = "1e-3"  # at the preset's own, rounding grows tenfold a step
    train, val = scored_shards()
    common |= {"--evaluation.train": train, "--evaluation.val": val, "--evaluation.linear_iterations": "0"}
    if "drop_path" in inspect.signature(encoders.family(run["--encoder"])).parameters:
        common["--encoder.drop_path"] = "0"
    chosen = small(run["--method"]) | run | common | {"--output": str(output)}
    return [*(word for pair in chosen.items() for word in pair), *more]


@pytest.mark.slow
def test_every_pairing_trains_resumes_exports_and_scores(launch, tmp_path: Path) -> None:
    found = {(run["--method"], encoders.family(run["--encoder"])) for run in RUNS.values()}
    assert found == {(method, encoders.family(name)) for method in METHODS for name in encoders.VARIANTS}
    check_runs(launch, tmp_path, RUNS, script=Path(__file__).parent / "runs_in_turn.py")


def check_runs(launch, tmp_path: Path, runs: dict[str, dict[str, str]], script: Path) -> None:
    whole = [arguments(run, tmp_path / name) for name, run in runs.items()]
    resumed = [arguments(run, tmp_path / name, "--resume") for name, run in runs.items()]
    shared = [arguments(run, tmp_path / "two" / name) for name, run in runs.items()]
    for file, commands in (("one.json", [*whole, *resumed]), ("two.json", shared)):
        (tmp_path / file).write_text(json.dumps(commands))
    one = launch([str(tmp_path / "one.json")], script=script)
    two = launch([str(tmp_path / "two.json")], processes=2, script=script)
    logs = one.wait(900), two.wait(900)
    assert (one.process.returncode, two.process.returncode) == (0, 0), "".join(log[-5000:] for log in logs)
    for name, run in runs.items():
        folder = tmp_path / name
        assert (folder / "encoder.safetensors").exists(), name
        assert (tmp_path / "two" / name / "encoder.safetensors").exists(), name
        lines = numbers(folder / "metrics.jsonl")
        assert sorted(lines) == list(range(7)), name
        score = "val_top1" if METHODS[run["--method"]].supervised else "knn_top1"
        assert {step for step, line in lines.items() if score in line} == {0, 6}, name
        assert lines == numbers(folder / "uninterrupted.jsonl"), name  # bit for bit
        for step, other in numbers(tmp_path / "two" / name / "metrics.jsonl").items():
            if step:
                assert other["loss"] == pytest.approx(lines[step]["loss"], rel=1e-5, abs=1e-5), (name, step)
        trained = encoders.load(folder / "encoder.safetensors")
        before = encoders.load(folder / "checkpoints" / "step-00000003" / "encoder.safetensors").state_dict()
        changed = [not torch.equal(tensor, before[key]) for key, tensor in trained.state_dict().items()]
        assert any(changed), name
        again = load_file(folder / "uninterrupted.safetensors")
        assert all(torch.equal(tensor, again[key]) for key, tensor in trained.state_dict().items()), name


def numbers(file: Path) -> dict[int, dict[str, float]]:
    """The lines of a metrics.jsonl by step, without what depends on the clock."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    clock = ("images_per_second", "data_wait")
    return {line["step"]: {k: v for k, v in line.items() if k not in clock} for line in lines}

"""Every engine on several processes against one process, through the real command.

Losses, weights, moments, teacher and centre differ by the order of sums only: by 1e-7, which ten steps make 1e-6.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tessera.data.demo import demo_shards
from tests.launched import Launched, records
from tests.teachers import small_teacher

Run = tuple[list[str], dict[int, tuple[int, int, str]]]
SCRIPT = Path(__file__).with_name("poisoned_runs.py")
CONFIGS = Path(__file__).parents[3] / "configs" / "accelerate"
CLOSE = 1e-5
LOOSE = 3e-4
"""of weights whose gradient is small beside its rounding: AdamW makes of it as large a step as of any other"""
SMALL = {
    "dino": "--dino.global_size 16 --dino.local_size 12 --dino.local_crops 2 --dino.hidden_dim 32 "
    "--dino.bottleneck_dim 16 --dino.prototypes 64",
    "lejepa": "--lejepa.global_size 16 --lejepa.local_size 12 --lejepa.local_crops 2 --lejepa.hidden_dim 32 "
    "--lejepa.output_dim 8 --lejepa.directions 32",
    "dinov2": "--dinov2.global_size 16 --dinov2.local_size 12 --dinov2.local_crops 2 --dinov2.hidden_dim 32 "
    "--dinov2.bottleneck_dim 16 --dinov2.prototypes 64",
    "dinov3": "--dinov3.global_size 16 --dinov3.local_size 12 --dinov3.local_crops 2 --dinov3.hidden_dim 32 "
    "--dinov3.bottleneck_dim 16 --dinov3.prototypes 64 --dinov3.gram_start 1 --dinov3.gram_refresh_steps 1",
    "mae": "--mae.size 16 --mae.decoder_dim 16 --mae.decoder_heads 2 --mae.decoder_depth 2",
    "distill": f"--distill.size 16 --distill.teacher {small_teacher()}",
    "finetune": "--finetune.size 16",
}
NARROW = "--encoder.depth 2 --encoder.dim 24 --encoder.heads 2"
OTHERS = ("rope_vit_micro", "swin_micro", "twins_svt_micro", "navit_micro", "sam_vit_micro")


def run(method: str, more: str = "", poison: dict[int, tuple[int, int, str]] | None = None, steps: int = 10) -> Run:
    """A command line without --output, and its poison: step -> process, forward pass of the step, what."""
    shards, _ = demo_shards()
    common = (
        "--batch_size 24 --record_every 1 --checkpoint_every 100 --workers 0 --optim.lr 1e-3 --encoder.drop_path 0.2"
    )
    encoder = "" if "--encoder " in more else f"--encoder vit_micro {NARROW}"
    if (method.startswith("dino") or method == "lejepa") and "batch_norm" not in more:
        more += f" --{method}.batch_norm false"  # with it, AdamW moves some biases by rounding errors
    words = f"--method {method} {SMALL[method]} {encoder} {common} --evaluation.pictures 0 --steps {steps} {more}"
    return ["--data", shards, *words.split()], poison or {}


RUNS: dict[str, Run] = {
    "dino": run("dino", "--optim.clip 0.1 --optim.clip_by module --dino.freeze_steps 4 --optim.weight_decay 0.5"),
    "distill": run("distill"),
    "distill, two students": run("distill", "--distill.students navit_micro --optim.lr 3e-4", steps=4),
    # with seed 0, one input of a ReLU is 3e-8 at the fifth step, so that rounding decides whether it has a gradient
    "lejepa": run("lejepa", "--optim.clip 0.1 --optim.clip_by module --seed 1"),
    "dinov2": run("dinov2", "--optim.clip 0.1 --dinov2.freeze_steps 4"),
    "dinov3": run("dinov3", "--dinov3.gram_size 24 --dinov3.gram_refreshes 2"),
    "dinov3, sizes": run("dinov3", '--dinov3.gram_size 24 --dinov3.sizes {"16/12/24":0.5,"12/8/24":0.5}', steps=6),
    "mae": run("mae", "--optim.clip 0.05 --optim.clip_by tensor"),
    "dino, skipped": run(
        "dino",
        "--accumulate 3 --optim.clip 0.1 --optim.clip_by global --dino.norm_last_layer false",
        {2: (1, 1, "loss"), 3: (0, 3, "image"), 9: (1, 2, "gradient")},
    ),
    "mae, skipped": run("mae", "--accumulate 2", {0: (1, 2, "gradient"), 5: (0, 1, "image")}),
    "finetune": run("finetune", "--optim.layer_decay 0.5"),
    "finetune, evaluated": run("finetune", "--evaluate_every 1 --evaluation.val HELD_OUT --accumulate 2", steps=2),
    "mae, evaluated": run("mae", "--evaluation.pictures 2 --evaluate_every 1 --evaluation.val HELD_OUT", steps=2),
}
SHARDED: dict[str, Run] = {  # what only engines that gather weights could get wrong
    "dino, over all": run("dino", "--dino.batch_norm true --dino.centering sinkhorn", steps=4),
    "lejepa, over all": run("lejepa", "--lejepa.batch_norm true", steps=4),
    # without Sinkhorn, which turns the rounding of logits into differences of 5e-4 in some biases
    # tests/pretrain/methods/test_dinov2.py has it over two processes
    "dinov2, two heads": run("dinov2", "--dinov2.separate_head true", steps=4),
    "dino, in chunks": run("dino", "--dino.norm_last_layer false", steps=4),
    "dinov2, in chunks": run("dinov2", steps=4),
    "dino, checkpointed": run("dino", "--encoder.checkpoint_activations true", steps=4),
    "mae, checkpointed": run("mae", "--encoder.checkpoint_activations true", steps=4),
    "dino, selective": run("dino", "--encoder.checkpoint_activations selective", steps=4),
    "mae, selective": run("mae", "--encoder.checkpoint_activations selective", steps=4),
    "navit, native": run(
        "mae", "--encoder navit_micro --mae.native true --mae.mask block --mae.smallest_size 12", steps=4
    ),
} | {
    f"{method} of {variant}": run(method, f"--encoder {variant} --optim.lr 3e-4", steps=4)
    for method in ("dino", "dinov2", "mae")  # the other methods hold no other kinds of modules
    for variant in OTHERS
}
BF16: dict[str, Run] = {f"{method}, bf16": run(method, "--precision bf16") for method in ("dino", "dinov2", "mae")}
BF16["dino of swin_micro, bf16"] = run("dino", "--encoder swin_micro --optim.lr 3e-4 --precision bf16", steps=4)
BF16["dino, bf16 between blocks"] = run("dino", "--precision bf16 --encoder.bf16_residuals true")

# a user's own DeepSpeed files, with buckets smaller than tensors and groups smaller than an encoder
FILES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1, "overlap_comm": True, "contiguous_gradients": False, "reduce_bucket_size": 1000},
    "zero2": {
        "stage": 2, "overlap_comm": True, "reduce_bucket_size": 3000, "allgather_bucket_size": 1000,
        "parameter_alignment": True, "offload_optimizer": {"device": "cpu"},
    },
    "zero3": {
        "stage": 3, "sub_group_size": 3000, "reduce_bucket_size": 2000, "stage3_prefetch_bucket_size": 500,
        "stage3_max_live_parameters": 3000, "stage3_max_reuse_distance": 100, "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}  # fmt: skip


class Started:
    """Runs in one launch, started; `folder(name)` waits for them."""

    def __init__(
        self, launch: Callable[..., Launched], runs: dict[str, Run], output: Path, averages: bool = False, **how: Any
    ) -> None:
        self.output = output
        output.mkdir(parents=True)
        _, held_out = demo_shards()
        lines = [
            {
                "arguments": [*(held_out if w == "HELD_OUT" else w for w in words), "--output", str(output / name)],
                "poison": poison,
                "in_chunks": name.endswith("in chunks"),
            }
            for name, (words, poison) in runs.items()
        ]
        lines += [{"averages": str(output / "averages")}] if averages else []
        (output / "runs.json").write_text(json.dumps(lines))
        self.launched = launch([str(output / "runs.json")], script=SCRIPT, **how)

    def folder(self, name: str) -> Path:
        log = self.launched.wait(900)
        assert self.launched.process.returncode == 0, log[-5000:]
        return self.output / name


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Started]]:
    """Start runs: `start(RUNS, processes=2, engine="zero2")`. Whatever still runs at the end is killed."""
    started: list[Launched] = []

    def launch(
        arguments: list[str], script: Path, processes: int = 1, engine: str | None = None, **environment: str
    ) -> Launched:
        log = Path(arguments[0]).with_name("log.txt")
        started.append(Launched(arguments, processes, engine, log, environment, script, False))
        return started[-1]

    yield lambda runs, **how: Started(launch, runs, tmp_path_factory.mktemp("runs") / "all", **how)
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def alone(start: Callable[..., Started]) -> Started:
    """All runs on one process without an engine."""
    return start(RUNS | SHARDED | BF16)


def state(folder: Path) -> dict[str, Tensor]:
    """The last checkpoint's tensors, by torch's own reader."""
    checkpoint = folder / "checkpoints" / "latest"
    stored: dict[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.full(tuple(t.size), torch.nan, dtype=t.properties.dtype) for name, t in stored.items()}
    dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)  # pyright: ignore[reportPrivateImportUsage]
    return tensors


def noise(reference: dict[str, Tensor], name: str) -> Tensor:
    """Where a gradient is nothing but rounding (of a bias that is subtracted again): AdamW makes whole steps of it."""
    _, _, parameter = name.partition(".")
    student = parameter.replace("gram_teacher.", "student.encoder.").replace("teacher.", "student.")
    squares = reference.get(f"exp_avg_sq.{student}")
    largest = max(float(t.max()) for key, t in reference.items() if key.startswith("exp_avg_sq.") and t.numel())
    return torch.zeros_like(reference[name], dtype=torch.bool) if squares is None else squares < 1e-8 * largest


def assert_same(folder: Path, reference: Path, within: float = CLOSE) -> None:
    """Records and checkpoints of two runs are the same but for the order of sums.

    Args:
        within: of weights, moments, teacher and centre; losses are always CLOSE.
    """
    lines, expected = records(folder), records(reference)
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, wanted in zip(lines, expected, strict=True):
        assert line.keys() == wanted.keys()
        for key in {"loss", "grad_norm", "lr", "weight_decay", "teacher_entropy", "knn_top1", "val_top1"} & line.keys():
            where = (folder.name, line["step"], key)
            error = {"rel": {"grad_norm": within}.get(key, CLOSE)}
            if key in ("knn_top1", "val_top1"):
                error = {"abs": 1.01 / 360}  # neighbours or classes that are equally near: one image may change sides
            assert line[key] == (wanted[key] and pytest.approx(wanted[key], **error)), where  # None where not finite
        assert line.get("skipped_steps") == wanted.get("skipped_steps")
    ours, wanted = state(folder), state(reference)
    assert ours.keys() == wanted.keys()
    assert {str(t.dtype) for t in ours.values()} == {"torch.float32"}
    for name, tensor in ours.items():
        near = (tensor - wanted[name]).abs() <= within * wanted[name].abs().max()
        assert bool((near | noise(wanted, name)).all()), (folder.name, name)
    steps = [
        json.loads((f / "checkpoints/latest/trainer.json").read_text())["optimizer_steps"] for f in (folder, reference)
    ]
    assert steps[0] == steps[1]


def assert_near(folder: Path, reference: Path) -> None:
    """Losses of two runs in bf16 are near. It rounds by 4e-3; what it says of a batch depends on how it was split."""
    for line, wanted in zip(records(folder), records(reference), strict=True):
        assert line.get("loss") == pytest.approx(wanted.get("loss"), rel=2e-2), (folder.name, line["step"])
    assert {str(t.dtype) for t in state(folder).values()} == {"torch.float32"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_two_processes_equal_one(engine: str, start: Callable[..., Started], alone: Started) -> None:
    runs = RUNS | (SHARDED if engine in ("zero3", "fsdp2") else {})
    sharded_teacher = engine in ("zero3", "fsdp2")
    several = start(runs | BF16, processes=2, engine=engine, averages=sharded_teacher)
    for name in runs:
        assert_same(several.folder(name), alone.folder(name), CLOSE if name in RUNS else LOOSE)
    for name in BF16:
        assert_near(several.folder(name), alone.folder(name))
        exact = records(alone.folder(name.partition(", bf16")[0]))
        first = records(several.folder(name))[0]["loss"]
        assert first != pytest.approx(exact[0]["loss"], rel=1e-6)  # it did round
    if sharded_teacher:
        check_averages(several.folder("averages"))


@pytest.mark.slow
def test_compiled_blocks_on_sharded_weights_equal_one_process(
    start: Callable[..., Started], alone: Started, tmp_path: Path
) -> None:
    name, cache = "dino, over all", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    words, _ = SHARDED[name]
    several = start({name: ([*words, "--compile", "true"], {})}, processes=2, engine="fsdp2", **cache)
    assert_same(several.folder(name), alone.folder(name), LOOSE)
    assert any(tmp_path.rglob("*.py"))  # the code of compiled blocks


def check_averages(folder: Path) -> None:
    """A sharded teacher follows the formula in float64 for a thousand steps."""
    for process in range(2):
        start, ended, exact = torch.load(folder / f"{process}.pt")
        for name, tensor in exact.items():
            # a thousand roundings of numbers near 1 walk about sqrt(1000) * 1.2e-7 / sqrt(12)
            torch.testing.assert_close(ended[name].double(), tensor, rtol=0, atol=1e-5, msg=name)
            assert 0.05 < (tensor - start[name]).mean() < 0.15, name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_users_deepspeed_file_changes_nothing(
    engine: str, start: Callable[..., Started], alone: Started, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": FILES[engine]}))
    launcher = tmp_path / "launcher.yaml"
    launcher.write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path / 'deepspeed.json'}\n"
        "  zero3_init_flag: false\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 1\n"
    )
    names = [name for name in RUNS if "skipped" in name]
    several = start({name: RUNS[name] for name in names}, processes=2, engine=str(launcher.with_suffix("")))
    for name in names:
        assert_same(several.folder(name), alone.folder(name))


@pytest.mark.slow
def test_two_groups_of_two_processes_equal_one(start: Callable[..., Started], alone: Started, tmp_path: Path) -> None:
    """HSDP: each group holds copies of all shards."""
    launcher = (CONFIGS / "hsdp.yaml").read_text().replace("dp_shard_size: 8", "dp_shard_size: 2")
    (tmp_path / "hsdp.yaml").write_text(launcher)
    names = ("dino", "distill, two students", "dinov3", "dino, skipped", "mae, skipped", "mae, evaluated")
    runs = {name: RUNS[name] for name in names} | {"dino, bf16": BF16["dino, bf16"]}
    several = start(runs, processes=4, engine=str(tmp_path / "hsdp"))
    assert_near(several.folder("dino, bf16"), alone.folder("dino, bf16"))
    for name in names:
        known = json.loads((several.folder(name) / "checkpoints/latest/trainer.json").read_text())
        assert known["engine"] == "hsdp"
        assert_same(several.folder(name), alone.folder(name))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_three_processes_with_uneven_and_empty_parts_equal_one(
    engine: str, start: Callable[..., Started], alone: Started
) -> None:
    name = "mae, skipped"  # its mask token has one row
    several = start({name: RUNS[name]}, processes=3, engine=engine)
    assert_same(several.folder(name), alone.folder(name))

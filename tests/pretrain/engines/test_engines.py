"""Every engine on several processes against one process, through the real command.

Losses, weights, moments, teacher and centre differ by the order of sums only: by 1e-7, which six steps make 1e-6.
`-k "zero2 and mae"` chooses engines, methods and encoders.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tessera.data.demo import demo_shards
from tessera.pretrain.methods import METHODS
from tests.launched import MEASURED, records
from tests.pretrain.small import MICRO, flags

Run = tuple[list[str], dict[int, tuple[int, int, str]]]
SCRIPT = Path(__file__).with_name("poisoned_runs.py")
CONFIGS = Path(__file__).parents[3] / "configs" / "accelerate"
CLOSE = 1e-5
LOOSE = 3e-4
"""of weights whose gradient is small beside its rounding: AdamW makes of it as large a step as of any other"""
NARROW = "--encoder vit_micro --encoder.depth 2 --encoder.dim 24 --encoder.heads 2"
OTHERS = [name for name in MICRO if name != "vit_micro"]
COMMON = "--batch_size 24 --record_every 1 --checkpoint_every 100 --workers 0 --optim.lr 1e-3 --encoder.drop_path 0.2"
COMMON += " --evaluation.view_images 0"  # the records of step 0 are those of runs with labels


def run(method: str, more: str = "", poison: dict[int, tuple[int, int, str]] | None = None, steps: int = 6) -> Run:
    """A command line without --output, and its poison: step -> process, forward pass of the step, what."""
    shards, _ = demo_shards()
    small = " ".join(f"{flag} {value}" for flag, value in flags(method).items())
    if "batch_norm" in METHODS[method].Config.model_fields and "batch_norm" not in more:
        more += f" --{method}.batch_norm false"  # with it, AdamW moves some biases by rounding errors
    encoder = "" if "--encoder " in more else NARROW
    words = f"--method {method} {small} {encoder} {COMMON} --evaluation.pictures 0 --steps {steps} {more}"
    return ["--data", shards, *words.split()], poison or {}


OWN = {
    "dino": "--optim.clip 0.1 --optim.clip_by module --dino.freeze_steps 4 --optim.weight_decay 0.5",
    # with seed 0, one input of a ReLU is 3e-8 at the fifth step, so that rounding decides whether it has a gradient
    "lejepa": "--optim.clip 0.1 --optim.clip_by module --seed 1",
    "dinov2": "--optim.clip 0.1 --dinov2.freeze_steps 4",
    "dinov3": "--dinov3.gram_size 24 --dinov3.gram_start 1 --dinov3.gram_refresh_steps 1 --dinov3.gram_refreshes 2",
    "mae": "--mae.decoder_depth 2 --optim.clip 0.05 --optim.clip_by tensor",
    "finetune": "--optim.layer_decay 0.5",
}
"""Settings of a method beside the small ones."""
SIZES = '--dinov3.gram_start 1 --dinov3.gram_refresh_steps 1 --dinov3.sizes {"16/12/24":0.5,"12/8/24":0.5}'
# not more steps: rounding grows fastest in DINOv3, whose moments differ by 1.4e-5 after ten steps on an AMD EPYC
LENGTH = {"distill": 10}  # after six steps, a bias of its attention keys is on the edge of `noise`
NAMES = METHODS.names()
RUNS: dict[str, Run] = {method: run(method, OWN.get(method, ""), steps=LENGTH.get(method, 6)) for method in NAMES} | {
    "dinov3, sizes": run("dinov3", f"--dinov3.gram_size 24 {SIZES}"),
    "dino, skipped": run(
        "dino",
        "--accumulate 3 --optim.clip 0.1 --optim.clip_by global --dino.norm_last_layer false",
        {2: (1, 1, "loss"), 3: (0, 3, "image"), 5: (1, 2, "gradient")},
    ),
    "mae, skipped": run("mae", "--mae.decoder_depth 2 --accumulate 2", {0: (1, 2, "gradient"), 4: (0, 1, "image")}),
    "mae, evaluated": run("mae", "--evaluation.pictures 2 --evaluate_every 2 --evaluation.val HELD_OUT", steps=2),
}
OF_EXTRAS = {
    "finetune, lora": ("--finetune.lora_rank 4", 3),
    "finetune, evaluated": ("--evaluate_every 2 --evaluation.val HELD_OUT --accumulate 2", 2),
    "distill, two students": ("--distill.students navit_micro --optim.lr 3e-4", 3),
}
for name, (more, steps) in OF_EXTRAS.items():
    if (method := name.partition(",")[0]) in METHODS:
        RUNS[name] = run(method, more, steps=steps)
SKIPPED = ("dino, skipped", "mae, skipped")
SHARDED: dict[str, Run] = {  # what only engines that gather weights could get wrong
    "dino, over all": run("dino", "--dino.batch_norm true --dino.centering sinkhorn", steps=3),
    "lejepa, over all": run("lejepa", "--lejepa.batch_norm true", steps=3),
    # without Sinkhorn, which turns the rounding of logits into differences of 5e-4 in some biases
    # tests/pretrain/methods/test_dinov2.py has it over two processes
    "dinov2, two heads": run("dinov2", "--dinov2.separate_head true", steps=3),
    "dinov2, in chunks": run("dinov2", "--encoder.layer_scale 0.5", steps=3),
    "mae, checkpointed": run("mae", "--encoder.checkpoint_activations true", steps=3),
    "dino, selective": run("dino", "--encoder.checkpoint_activations selective", steps=3),
    "mae of navit_micro, native": run(
        "mae", "--encoder navit_micro --mae.native true --mae.mask block --mae.smallest_size 12", steps=3
    ),
}
FAMILIES: dict[str, Run] = {  # crops, and tokens that are left out
    f"{method} of {variant}": run(method, f"--encoder {variant} --optim.lr 3e-4", steps=3)
    for method in ("dino", "mae")
    for variant in OTHERS
}
BF16: dict[str, Run] = {f"{method}, bf16": run(method, "--precision bf16", steps=2) for method in NAMES}
BF16["dino of swin_micro, bf16"] = run("dino", "--encoder swin_micro --optim.lr 3e-4 --precision bf16", steps=2)
BF16["dino, bf16 between blocks"] = run("dino", "--precision bf16 --encoder.bf16_residuals true", steps=2)
OVER_ALL = {
    "dino": "--dino.batch_norm true --dino.centering sinkhorn",
    "dinov2": "--dinov2.batch_norm true --dinov2.centering sinkhorn --dinov2.separate_head true",
    "dinov3": "--dinov3.batch_norm true",
    "lejepa": "--lejepa.batch_norm true",
}
"""Settings with statistics over the images of a forward pass."""
# forward passes of three images, on four processes: one of them has none
EMPTY: dict[str, Run] = {
    f"{method}, empty": run(method, f"{OVER_ALL.get(method, '')} --accumulate 8", steps=2) for method in NAMES
}
EMPTY["mae, native, empty"] = run("mae", "--mae.native true --mae.mask block --accumulate 8", steps=2)
ALL = RUNS | SHARDED | FAMILIES | BF16 | EMPTY
# every method under DDP; under the others those whose parts differ most, since the engine knows no method
ON_ENGINES = {
    "ddp": RUNS | BF16,
    "zero1": SKIPPED,  # the rest is the code of ZeRO-2
    # weights are full, as under DDP, and the rest is that of ZeRO-3: each kind of clipping, and groups of parameters
    "zero2": ["dino", "dinov3", "mae", *SKIPPED, *(name for name in ("finetune",) if name in RUNS), "dino, bf16"],
    # each family, and each kind of bf16, here or there; tests/pretrain/test_pairs.py has every pair under DDP
    "zero3": [*RUNS, *SHARDED, "dino, bf16", "dino of swin_micro, bf16", *list(FAMILIES)[::2]],
    "fsdp2": [*RUNS, *SHARDED, "dinov3, bf16", "dino, bf16 between blocks", *list(FAMILIES)[1::2]],
}

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


def exact(name: str) -> str:
    """The run in float32 of the name of a run."""
    return name.partition(", bf16")[0]


class Started:
    """Runs in one launch, started; `folder(name)` waits for them."""

    def __init__(self, start: Callable, runs: dict[str, Run], output: Path, **how: Any) -> None:
        self.output = output
        _, held_out = demo_shards()
        lines = [
            {
                "arguments": [*(held_out if w == "HELD_OUT" else w for w in words), "--output", str(output / name)],
                "poison": poison,
                "in_chunks": name.endswith("in chunks"),
            }
            for name, (words, poison) in runs.items()
        ]
        self.launched = start(SCRIPT, lines, **how)

    def folder(self, name: str) -> Path:
        self.launched.wait()
        return self.output / name


@pytest.fixture(scope="module")
def several(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Started]:
    """Start runs on several processes: `several(names, engine="zero2")`."""

    def started(names: Iterable[str], processes: int = 2, **how: Any) -> Started:
        runs = {name: ALL[name] for name in names}
        return Started(start, runs, tmp_path_factory.mktemp("runs"), processes=processes, **how)

    return started


@pytest.fixture(scope="module")
def alone(start: Callable, chosen: list[dict], tmp_path_factory: pytest.TempPathFactory) -> Started:
    """All chosen runs on one process without an engine."""
    names = [name for given in chosen if "name" in given for name in (given["name"], exact(given["name"]))]
    return Started(start, {name: ALL[name] for name in (*names, *SKIPPED)}, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def started(several: Callable, chosen: list[dict]) -> Callable[[str], Started]:
    """The chosen runs under an engine on two processes, which start once."""
    running: dict[str, Started] = {}

    def of(engine: str) -> Started:
        if engine not in running:
            own = [given["name"] for given in chosen if given.get("engine") == engine and "name" in given]
            running[engine] = several(own, engine=engine)
        return running[engine]

    return of


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
        assert line.keys() - MEASURED == wanted.keys() - MEASURED
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
        # the relative error of a square is twice that of its gradient
        error = 2 * within if name.startswith("exp_avg_sq.") else within
        near = (tensor - wanted[name]).abs() <= error * wanted[name].abs().max()
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
@pytest.mark.parametrize(
    ("engine", "name"),
    [(engine, name) for engine, names in ON_ENGINES.items() for name in names],
)
def test_two_processes_equal_one(engine: str, name: str, started: Callable[[str], Started], alone: Started) -> None:
    folder, reference = started(engine).folder(name), alone.folder(name)
    if name not in BF16:
        assert_same(folder, reference, CLOSE if name in RUNS else LOOSE)
        return
    assert_near(folder, reference)
    first, exactly = records(folder)[0], records(alone.folder(exact(name)))[0]
    assert first["grad_norm"] != pytest.approx(exactly["grad_norm"], rel=1e-6)  # it did round
    # The first loss of finetune is ln 10 in any precision, as its head starts at 0. That of dinov3 is near a constant.
    if not name.startswith(("finetune", "dinov3")):
        assert first["loss"] != pytest.approx(exactly["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mae"])
def test_compiled_blocks_on_sharded_weights_equal_one_process(
    name: str, several: Callable, alone: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, poison = ALL[name]
    monkeypatch.setitem(ALL, name, ([*words, "--compile", "true"], poison))
    compiled = several([name], engine="fsdp2", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert_same(compiled.folder(name), alone.folder(name), LOOSE)
    assert any(tmp_path.rglob("*.py"))  # the code of compiled blocks


ON_FOUR = {"ddp": EMPTY} | {engine: ["dino, empty", "lejepa, empty"] for engine in ("zero2", "zero3", "fsdp2")}


@pytest.fixture(scope="module")
def on_four(several: Callable, chosen: list[dict]) -> Callable[[str], Started]:
    """The chosen runs under an engine on four processes, which start once."""
    running: dict[str, Started] = {}

    def of(engine: str) -> Started:
        if engine not in running:
            names = [given["name"] for given in chosen if given.get("engine") == engine and given["name"] in EMPTY]
            running[engine] = several(names, processes=4, engine=engine)
        return running[engine]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine, names in ON_FOUR.items() for name in names])
def test_uneven_and_empty_shares_equal_one_process(
    engine: str, name: str, on_four: Callable[[str], Started], alone: Started
) -> None:
    ours, wanted = ([line for line in records(one.folder(name)) if "loss" in line] for one in (on_four(engine), alone))
    assert [line["step"] for line in ours] == [line["step"] for line in wanted] == [1, 2]
    for line, one in zip(ours, wanted, strict=True):
        assert line.keys() - MEASURED == one.keys() - MEASURED
        assert line["loss"] == pytest.approx(one["loss"], rel=1e-6)
        for key in one.keys() - MEASURED:
            assert line[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_users_deepspeed_file_changes_nothing(file: str, several: Callable, alone: Started, tmp_path: Path) -> None:
    (tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": FILES[file]}))
    (tmp_path / "launcher.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path / 'deepspeed.json'}\n"
        "  zero3_init_flag: false\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 1\n"
    )
    runs = several(SKIPPED, engine=str(tmp_path / "launcher"))
    for name in SKIPPED:
        assert_same(runs.folder(name), alone.folder(name))


IN_GROUPS = ("dinov3", "lejepa", "dino, skipped", "dino, bf16")


@pytest.fixture(scope="module")
def in_groups(several: Callable, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """HSDP on two groups of two processes: each group holds copies of all shards."""
    folder = tmp_path_factory.mktemp("hsdp")
    launcher = (CONFIGS / "hsdp.yaml").read_text().replace("dp_shard_size: 8", "dp_shard_size: 2")
    (folder / "hsdp.yaml").write_text(launcher)
    return several(IN_GROUPS, processes=4, engine=str(folder / "hsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_GROUPS)
def test_two_groups_of_two_processes_equal_one(name: str, in_groups: Started, alone: Started) -> None:
    folder = in_groups.folder(name)
    known = json.loads((folder / "checkpoints/latest/trainer.json").read_text())
    assert known["engine"] == "hsdp"
    (assert_near if name in BF16 else assert_same)(folder, alone.folder(name))

"""Tessera from Python and by the command `tessera`, also in a folder whose files have the names of its packages."""

import gc
import importlib.metadata
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import tessera
from tessera import __main__ as command_line
from tessera import encoders
from tessera.__main__ import next_step
from tessera.data.demo import demo_shards
from tessera.data.make_shards import main as make_shards
from tessera.interface import Run, _values, in_python
from tessera.launch import accelerate_launch
from tessera.pretrain.methods.dino import DINO
from tessera.pretrain.run import main
from tessera.runtime.user_error import UserError
from tests.launched import ROOT, TINY, records
from tests.pretrain.small import few_digits

SMALL = {
    "steps": 3,
    "batch_size": 16,
    "record_every": 1,
    "workers": 1,
    "encoder": {"depth": 1, "dim": 24, "heads": 2},
    "dino": {"hidden_dim": 32, "bottleneck_dim": 16, "prototypes": 64},
    "evaluation": {"pictures": 0, "linear_iterations": 0},
}


@pytest.mark.slow
def test_pretraining_from_python_equals_the_command(tmp_path: Path) -> None:
    run = tessera.pretrain("dino", output=str(tmp_path / "python"), **SMALL)
    flags = ["--encoder.depth", "1", "--steps", "3", "--checkpoint_every", "1000", "--evaluation.pictures", "0"]
    assert main([*TINY, *flags, "--output", str(tmp_path / "command")]) == 0
    losses = [record["loss"] for record in run.metrics if "loss" in record]
    assert losses == [record["loss"] for record in records(tmp_path / "command") if "loss" in record]
    assert run.config["steps"] == 3
    again = tessera.pretrain("dino", output=str(tmp_path / "bf16"), precision="bf16", **SMALL)  # another precision
    assert again.metrics[-1]["loss"] != losses[-1]


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("Continue with --resume, or choose another --output.", "Continue with resume=True, or choose another output."),
        ("--batch_size: too large. Set --accumulate 4.", "batch_size: too large. Set accumulate=4."),
        ("allow this with --source.allow_overlap true.", 'allow this with source={"allow_overlap": True}.'),
        ("for example --data.image=jpg (--image=jpg for", 'for example data={"image": "jpg"} (image="jpg" for'),
        ("Give --evaluation.val SHARDS", 'Give evaluation={"val": SHARDS}'),
        ("start it with --num_processes 2", "start it with --num_processes 2"),
        ("Call `tessera pretrain --resume`", "Call `tessera pretrain --resume`"),
        ("To continue: tessera pretrain --resume", "To continue: tessera pretrain --resume"),
    ],
)
def test_messages_name_arguments_in_place_of_flags(flags: str, arguments: str) -> None:
    assert in_python(flags) == arguments


def test_help_of_pretrain_is_that_of_the_function() -> None:
    assert "data: SHARDS to train on" in inspect.getdoc(tessera.pretrain)
    assert inspect.getdoc(tessera.pretrain).startswith(
        "pretrain(method: str | None = None, data: Any = None, **settings"
    )
    assert list(inspect.signature(tessera.pretrain).parameters) == ["method", "data", "settings"]


@pytest.mark.slow
def test_evaluations_from_python(tmp_path: Path) -> None:
    run = tessera.pretrain("dino", output=str(tmp_path / "run"), **SMALL)
    train, val = demo_shards()
    with pytest.raises(UserError, match=r"resume=True, delete it with overwrite=True, or choose another output\.$"):
        tessera.pretrain("dino", output=str(run.path), **SMALL)
    with pytest.raises(UserError, match=r"not a Run\. Give run\.encoder\.$"):
        tessera.embed(run, val)
    planned = tessera.pretrain("dino", output=str(tmp_path / "planned"), dry_run=True, **SMALL)
    assert (planned.path.exists(), planned.finished) == (False, False)
    for name in ("config", "metrics"):
        with pytest.raises(UserError, match="a dry run writes nothing"):
            getattr(planned, name)
    found = tessera.knn(run, train, val, k=[20], workers=0)
    assert found["top1"] == pytest.approx(run.metrics[-1]["knn_top1"], abs=0.003)  # one of 360 images
    assert json.loads((run.path / "evaluation" / "knn.json").read_text()) == found
    probed = tessera.linear_probe(run.path, train, val, augment=False, epochs=1, workers=0)
    assert probed["top1"] == json.loads((run.path / "evaluation" / "linear_probe.json").read_text())["top1"]
    with pytest.raises(UserError, match="No encoder found"):
        tessera.knn(tmp_path / "nowhere", train, val)


def resources() -> tuple[int, int, int]:
    """Return the numbers of tensors, open files and threads of this process."""
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return tensors, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
def test_a_run_of_another_method_continues_without_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = dict(zip(("train", "val"), few_digits(), strict=True))
    settings = SMALL | {"dino": None, "encoder": "vit_micro", "seed": 3} | {"evaluation": SMALL["evaluation"] | scored}
    run = tessera.pretrain("lejepa", output=str(tmp_path / "a run"), **settings)
    assert f"next:    tessera linear_probe --checkpoint '{run.path}' --train " in capsys.readouterr().out
    losses = [line["loss"] for line in run.metrics if "loss" in line]
    shutil.rmtree(run.path / "checkpoints")
    held = resources()
    again = tessera.pretrain(resume=run.path)  # short for resume=True, output=PATH
    assert all(now <= before for now, before in zip(resources(), held, strict=True))  # others may have been freed
    assert again.config == run.config
    assert [line["loss"] for line in again.metrics if "loss" in line] == losses
    batch = next(tessera.training_batches(resume=True, output=str(run.path)))
    assert len(batch.views) == len(next(tessera.training_batches("lejepa", **settings)).views)
    with pytest.raises(UserError, match="method is lejepa in the checkpoint and dino in this run"):
        tessera.pretrain("dino", resume=True, output=str(run.path))  # a choice, although it is the default


@pytest.mark.slow
def test_the_callers_state_neither_changes_a_run_nor_is_changed(tmp_path: Path) -> None:
    train, val = demo_shards()

    def results(name: str) -> tuple[object, ...]:
        run = tessera.pretrain("mae", output=str(tmp_path / name), **SMALL | {"dino": None, "precision": "bf16"})
        features = tessera.embed(run.encoder, val).features
        knn = tessera.knn(run.path, train, val, k=[20], workers=0)["top1"]
        image = Image.new("RGB", (20, 30), "red")
        return [line.get("loss") for line in run.metrics], features.tolist(), knn, tessera.transform(run.encoder)(image)

    *alone, pixels = results("alone")
    torch.set_default_dtype(torch.float64)
    generators = random.getstate(), torch.get_rng_state()
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            *within, same = results("within")
    finally:
        torch.set_default_dtype(torch.float32)
    assert within == alone
    torch.testing.assert_close(same, pixels, rtol=0, atol=0)
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])


@pytest.mark.slow
def test_ctrl_c_returns_the_run_and_sigterm_ends_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forward, pressed = DINO.forward, [signal.SIGINT]

    def pressing(self: DINO, batch, step: int):
        if step == 1 and pressed:
            for number in pressed:
                os.kill(os.getpid(), number)
        return forward(self, batch, step)

    monkeypatch.setattr(DINO, "forward", pressing)
    before, folder = signal.getsignal(signal.SIGINT), str(tmp_path / "a run")
    run = tessera.pretrain(output=folder, **SMALL)
    assert not run.finished
    assert run.metrics[-1]["step"] == 2
    said = f"Step 2 is done and saved. To continue: tessera.pretrain(resume=True, output={folder!r})\n"
    assert said in capfd.readouterr().out
    pressed[:] = [signal.SIGINT, signal.SIGINT]
    with pytest.raises(KeyboardInterrupt, match=r"tessera\.pretrain\(resume=True, output=") as caught:
        tessera.pretrain(output=str(tmp_path / "twice"), **SMALL)
    assert "\n" not in caught.value._render_traceback_()[0]  # pyright: ignore[reportAttributeAccessIssue]
    pressed[:] = [signal.SIGTERM]
    with pytest.raises(SystemExit) as stop:
        tessera.pretrain(output=str(tmp_path / "ended"), **SMALL)
    assert stop.value.code == 75
    assert "it received SIGTERM. Step 2 is done" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    again = tessera.pretrain(resume=True, output=run.path)
    assert again.finished
    assert again.metrics[-1]["step"] == 3


@pytest.mark.medium
def test_the_batches_are_those_of_the_run() -> None:
    batches = list(tessera.training_batches("dino", **SMALL))
    assert len(batches) == 3
    assert [tuple(view.images.shape) for view in batches[0].views] == [(32, 3, 16, 16), (32, 3, 12, 12)]
    again = next(iter(tessera.training_batches("dino", **SMALL)))
    torch.testing.assert_close(again.views[0].images, batches[0].views[0].images, rtol=0, atol=0)


def test_an_interrupted_import_says_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tessera, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Restart the kernel"):
        tessera.pretrain()


def test_paths_are_accepted_in_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"init_from": Path("a/b"), "evaluation": {"val": Path("v"), "train": [Path("x"), "y"]}, "steps": 2}
    texts = {"init_from": "a/b", "evaluation": {"val": "v", "train": ["x", "y"]}, "steps": 2}
    for data, shards in (
        (Path("t"), "t"),
        ([Path("t"), "u"], ["t", "u"]),
        ({Path("t"): 0.5, "u": {0: 1.0}}, {"t": 0.5, "u": {0: 1.0}}),
        ({"shards": Path("t")}, "t"),
    ):
        assert _values(None, data, dict(given), str) == texts | {"data": {"shards": shards}}
    monkeypatch.chdir(tmp_path)
    run = tessera.Run("runs/plates")
    monkeypatch.chdir("/")
    assert run.path == tmp_path / "runs" / "plates"
    (run.path / "checkpoints").mkdir(parents=True)
    (run.path / "config.yaml").write_text("steps: 7\n")
    assert tessera.Run(run.path).config == {"steps": 7}
    with pytest.raises(UserError, match="holds a run"):
        tessera.pretrain("dino", output=run.path, dry_run=True, **SMALL)
    with pytest.raises(UserError, match=r"in memory, use tessera\.embed"):
        tessera.knn(encoders.build("vit_micro", depth=1), "train", "val")


def test_one_prepared_image_equals_the_evaluation(tmp_path: Path) -> None:
    encoder = encoders.build("vit_micro", depth=1, image_size=24).eval()
    (tmp_path / "images" / "cat").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (40, 57, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "images" / "cat" / "a.png", exif=exif)
    make_shards([str(tmp_path / "images"), str(tmp_path / "shards")])
    found = tessera.embed(encoder, str(tmp_path / "shards"))
    prepared = tessera.transform(encoder)(Image.open(tmp_path / "images" / "cat" / "a.png"))
    with torch.inference_mode():
        torch.testing.assert_close(encoder(prepared[None]).pooled, found.features, rtol=1e-5, atol=1e-5)
    assert found.labels.tolist() == [-1]  # one folder of images has no classes
    with warnings.catch_warnings(action="error"):
        array = np.asarray(Image.open(tmp_path / "images" / "cat" / "a.png").convert("RGB"))  # read-only
        assert tessera.transform(encoder)(array).shape == (3, 24, 24)
    wrong = {
        "Give the image: PIL.Image.open('a.jpg')": "a.jpg",
        "Give values of the type uint8": np.zeros((9, 9, 3)),
        "Give a P": 3,
    }
    for message, image in wrong.items():
        with pytest.raises(UserError, match=re.escape(message)):
            tessera.transform(encoder)(image)
    for message, images in {"images[None]": prepared, "movedim(-1, 1)": prepared.movedim(0, -1)[None]}.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            encoder(images)
    encoder.preprocessing = encoders.Preprocessing((0.5,), (0.5,))
    with pytest.raises(ValueError, match="takes 1 channels"):
        tessera.transform(encoder)


def called(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """Return a folder of a user whose files have the names of Tessera's packages."""
    for name in ("data", "runtime", "encoders"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the user was imported')\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["--num_processes", "2"]])
def test_the_command_works_among_files_of_the_same_names(crowded: Path, processes: list[str]) -> None:
    done = called(crowded, "-m", "tessera", *processes, "pretrain", *TINY, "--steps", "2", "--output", "run")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in records(crowded / "run")] == [0, 1, 2]
    assert f"{processes[-1] if processes else 1} process(es)" in done.stderr
    refused = called(crowded, "-m", "tessera", *processes, "pretrain", *TINY, "--output", "run")
    assert refused.returncode == 2
    assert "holds a run" in refused.stderr.strip().splitlines()[-1]  # nothing is printed after it
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_help_says_what_each_setting_means() -> None:
    for command in ("knn", "embed", "pretrain"):
        words = [sys.executable, "-m", "tessera", command, "--help", *(["all"] if command == "pretrain" else [])]
        shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        flags = [line for line in shown.splitlines() if line.startswith("  --")]
        assert len(flags) > 15
        assert not [line for line in flags if re.fullmatch(r"  --\S+( \S+)?( +\(default: [^)]*\))?", line)]


def test_without_a_command_it_says_what_to_do_next(tmp_path: Path) -> None:
    assert "tessera pretrain --data IMAGES" in next_step(tmp_path, ["report"])
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    assert next_step(tmp_path, ["report"]).startswith("Runs here: 2. `tessera runs` lists them")
    assert "tessera report" not in next_step(tmp_path, [])


def test_unknown_commands_and_help(crowded: Path) -> None:
    helped, unknown = called(crowded, "-m", "tessera", "--help"), called(crowded, "-m", "tessera", "pretrian")
    assert (helped.returncode, unknown.returncode) == (0, 2)
    for name in ("pretrain", "linear_probe", "make_shards"):
        assert name in helped.stdout
        assert name in unknown.stderr
    assert unknown.stderr.endswith("'pretrian' is not a command. Did you mean 'pretrain'?\n")
    wrong = called(crowded, "-m", "tessera", "--gpus", "2", "pretrain")
    assert (wrong.returncode, wrong.stderr) == (2, "tessera: unknown flag --gpus. Did you mean --num_processes?\n")
    once = called(crowded, "-m", "tessera", "--num_processes", "1", "--cpu", "completion")
    assert once.stdout.count("\n_tessera()") == 1
    version = called(crowded, "-m", "tessera", "--version")
    assert version.stdout == f"tessera {importlib.metadata.version('tessera-ssl')}\n"
    assert "unknown flag --stps" in called(crowded, "-m", "tessera", "pretrain", "--stps", "3").stderr


def test_the_first_command_counts_also_if_it_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    monkeypatch.setattr(command_line, "installed_commands", lambda: {"report": ("own", "")})
    monkeypatch.setattr(command_line, "runs_in_one_process", lambda _: True)
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(main=lambda: called.extend(sys.argv)))
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit):
        command_line.run(["report", "pretrain"])
    assert called == ["tessera report", "pretrain"]


@pytest.mark.parametrize("words", [["--config_file", "a.yaml"], ["--config_file=a.yaml"], ["--config-file=a.yaml"]])
def test_an_engine_file_is_not_overridden(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate_launch, "main", lambda: None)
    monkeypatch.setattr(sys, "argv", [])
    command_line.run([*words, "pretrain"])
    assert sys.argv == ["tessera", *words, "--module", "tessera", "pretrain"]


def test_metrics_of_a_run_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 120}\n{"step": 14')
    assert Run(tmp_path).metrics == [{"step": 0}, {"step": 120}]

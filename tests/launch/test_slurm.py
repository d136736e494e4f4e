"""launch/slurm.py with fake sbatch, squeue, scontrol and scancel."""

import json
import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from tessera.launch.jobs import OF_CORE, evaluations, read_settings, read_settings_of_run
from tessera.pretrain.command_line import from_folder
from tests.launch.conftest import HARD, ROOT, SETTINGS, Slurm


def flags_of(argv: list[str]) -> list[str]:
    """Return the arguments after the name of the script."""
    return argv[next(place for place, word in enumerate(argv) if word.endswith(".sbatch")) + 1 :]


def test_one_job(slurm: Slurm) -> None:
    said = slurm.accepted("--nodes", "2", "--gpus", "8", "--partition=gpu", "--account=a", "--qos=q", "--mem=200G",
                          "--time=2-0", "--sbatch=--constraint='a100|h100' --exclusive")  # fmt: skip
    (call,) = slurm.commands.calls("sbatch")
    run = slurm.folder / "run"
    wanted = {
        "--parsable", "--hold", "--job-name=run", f"--output={run}/submitted/pretrain-%j.log", "--nodes=2",
        "--cpus-per-task=96", "--gpus-per-node=8", "--mem=200G", "--time=2-0", "--partition=gpu", "--account=a",
        "--qos=q", "--constraint=a100|h100", "--exclusive",
    }  # fmt: skip
    place = call["argv"].index(str(ROOT / "launch" / "pretrain.sbatch"))
    assert set(call["argv"][:place]) == wanted
    assert call["argv"][place + 1 :] == ["--config", f"{run}/submitted/config.yaml", "--output", str(run)]
    assert call["environment"]["TESSERA_ENGINE"] == f"{run}/submitted/engine.yaml"
    assert [call["argv"] for call in slurm.commands.calls("scontrol")] == [["release", "101"]]
    assert "job 101: pretrain" in said


@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_a_range_of_nodes_is_left_to_slurm(slurm: Slurm, engine: str) -> None:
    slurm.accepted("--nodes", "2-4", "--gpus", "8", "--accelerate", engine)
    (argv,) = slurm.submitted()
    assert "--nodes=2-4" in argv
    assert "--ntasks" not in " ".join(argv)


def test_settings_are_frozen(slurm: Slurm) -> None:
    (slurm.folder / "ds.json").write_text('{"zero": 1}')
    (slurm.folder / "engine.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 2}\n"
    )
    slurm.accepted("--accelerate", "engine.yaml", "--after-pretraining", "knn")
    for name in ("x.yaml", "ds.json", "engine.yaml"):
        (slurm.folder / name).write_text("edited: afterwards")
    submitted = slurm.folder / "run" / "submitted"
    assert (submitted / "config.yaml").read_text() == SETTINGS
    engine = yaml.safe_load((submitted / "engine.yaml").read_text())
    assert engine["distributed_type"] == "DEEPSPEED"
    assert engine["deepspeed_config"]["zero_stage"] == 2
    assert Path(engine["deepspeed_config"]["deepspeed_config_file"]).read_text() == '{"zero": 1}'
    record = json.loads((submitted / "jobs.json").read_text())
    assert [(job["name"], job["id"]) for job in record["jobs"]] == [("pretrain", "101"), ("knn", "102")]


@pytest.mark.parametrize(("engine", "file"), [([], "ddp"), (["--accelerate", "zero2"], "zero2")])
def test_engines_of_this_project_have_names(slurm: Slurm, engine: list[str], file: str) -> None:
    slurm.accepted(*engine)
    frozen = (slurm.folder / "run" / "submitted" / "engine.yaml").read_text()
    assert frozen == (ROOT / "configs" / "accelerate" / f"{file}.yaml").read_text()


def test_a_chain_waits_for_success(slurm: Slurm) -> None:
    run, shards = str(slurm.folder / "run"), ["--train", "a.tar", "--train", "b.tar", "--val", "v.tar"]
    own = {
        "probe": [],
        "knn": ["--k", "20", "--precision", "bf16"],
        "few-shot": ["--shares", "1,10"],
        "retrieval": [],
        "segmentation": ["--train", "scenes.tar", "--val=scenes-val.tar", "--classes", "7"],
        "ood": ["--ood", "others.tar"],
        "finetune": ["--steps", "5"],
    }
    own = {name: words for name, words in own.items() if name in evaluations()}  # an extra may be deleted
    given = [f"--{name}-flags={' '.join(words)}" for name, words in own.items() if words]
    slurm.accepted(
        "--gpus", "4", "--cpus", "40", "--partition=p", "--mem=1G", "--after-pretraining", ",".join(own), *given,
        "--", "--seed", "3",
    )  # fmt: skip
    pretrain, *others = slurm.submitted()
    jobs = dict(zip(own, others, strict=True))
    assert "--hold" in pretrain
    assert flags_of(pretrain)[-2:] == ["--seed", "3"]
    limits = {"probe": "12", "knn": "02", "few-shot": "04", "retrieval": "02"}
    for name, limit in limits.items():
        if (argv := jobs.get(name)) is None:
            continue
        assert "--hold" not in argv
        assert f"--time={limit}:00:00" in argv
        assert "--dependency=afterok:101" in argv
        assert "--kill-on-invalid-dep=yes" in argv
        assert str(ROOT / "launch" / "evaluation.sbatch") in argv
        assert {"--gpus-per-node=1", "--cpus-per-task=10", "--partition=p"} <= set(argv)
        assert not {"--mem=1G", "--gpus-per-node=4"} & set(argv)
    for name, argv in jobs.items():
        command = {"probe": "linear_probe"}.get(name, name.replace("-", "_"))
        images = [] if name == "segmentation" else shards
        assert flags_of(argv) == [command, "--checkpoint", run, *images, *own[name]]
        script = "pretrain" if name == "finetune" else "evaluation"
        assert {"--dependency=afterok:101", str(ROOT / "launch" / f"{script}.sbatch")} <= set(argv)
    assert [call["argv"] for call in slurm.commands.calls("scontrol")] == [["release", "101"]]  # once all are there


def test_evaluations_of_other_packages_have_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scores.py").write_text('import missing\n\nTIME_LIMIT = "01:00:00"\n')
    monkeypatch.syspath_prepend(tmp_path)
    modules = {"own_score": "own_scores", "gone": "tessera.extras.gone.gone", "no_limit": "tests.launched"}
    points = [EntryPoint(name, module, "tessera.evaluations") for name, module in modules.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    assert evaluations.__wrapped__() == OF_CORE | {"own-score": ("own_score", "01:00:00", "evaluation.sbatch")}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_refused_job_cancels_the_chain(slurm: Slurm, failing: int) -> None:
    answers = [(0, "101\n", ""), (0, "102\n", ""), (0, "103\n", "")]
    answers[failing] = (1, "", "sbatch: error: Batch job submission failed: Not today\n")
    slurm.commands.answer({"sbatch --parsable": answers})
    before = slurm.everything()
    said = slurm.refused("--after-pretraining", "probe,knn", output="a/b/run")
    assert "Batch job submission failed: Not today" in said
    cancelled = [call["argv"] for call in slurm.commands.calls("scancel")]
    assert cancelled == ([["101", "102"][:failing]] if failing else [])
    assert not slurm.commands.calls("scontrol")
    assert slurm.everything() == before


def test_a_chain_that_cannot_be_released_is_cancelled(slurm: Slurm) -> None:
    slurm.commands.answer({"scontrol release": [(1, "", "Access denied\n")]})
    assert "Access denied" in slurm.refused("--after-pretraining", "knn")
    assert [call["argv"] for call in slurm.commands.calls("scancel")] == [["101", "102"]]
    slurm.commands.answer({"scontrol release": [(0, "", "")]})
    slurm.accepted("--after-pretraining", "knn")


def test_a_refusal_leaves_an_older_submission(slurm: Slurm) -> None:
    slurm.accepted()
    before = (slurm.folder / "run" / "submitted" / "jobs.json").read_text()
    slurm.commands.answer({"sbatch --parsable": [(1, "", "no")], "squeue --noheader": [(0, "101|FAILED|None\n", "")]})
    slurm.refused()
    assert (slurm.folder / "run" / "submitted" / "jobs.json").read_text() == before
    assert [path.name for path in (slurm.folder / "run").iterdir()] == ["submitted"]


def test_paths_and_flags_are_passed_unchanged(slurm: Slurm) -> None:
    output = "it's a $HOME/100% käse"
    slurm.accepted("--after-pretraining", "knn", "--", *HARD, output=output)
    pretrain, knn = slurm.submitted()
    assert flags_of(pretrain)[4:] == HARD
    assert flags_of(knn)[:3] == ["knn", "--checkpoint", str(slurm.folder / output)]
    assert f"--output={slurm.folder}/it's a $HOME/100%% käse/submitted/pretrain-%j.log" in pretrain
    assert (slurm.folder / output / "submitted" / "config.yaml").exists()


def test_a_dry_run_prints_commands_to_paste(slurm: Slurm) -> None:
    before = slurm.everything()
    arguments = ["--processes", "2", "--after-pretraining", "probe"]
    plan = slurm.accepted("--dry_run", *arguments, "--", *HARD, output="it's $dry")
    assert slurm.everything() == before
    assert not slurm.commands.calls()
    pasted = subprocess.run(["bash", "-e", "-c", plan], cwd=slurm.folder, env=slurm.environment, text=True)
    assert pasted.returncode == 0
    by_hand = [(call["name"], call["argv"], call["environment"]) for call in slurm.commands.calls()]
    texts = {path.name: path.read_text() for path in (slurm.folder / "it's $dry" / "submitted").iterdir()}
    (slurm.folder / "commands" / "calls.jsonl").unlink()
    (slurm.folder / "commands" / "said sbatch --parsable").unlink()
    slurm.commands.answer({"sbatch --parsable": [(0, f"{number}\n", "") for number in (101, 102)]})
    slurm.accepted(*arguments, "--", *HARD, output="it's $dry")
    calls = [
        (call["name"], call["argv"], call["environment"]) for call in slurm.commands.calls() if call["name"] != "squeue"
    ]
    assert by_hand == calls
    for name, text in texts.items():
        assert (slurm.folder / "it's $dry" / "submitted" / name).read_text() == text


def test_without_slurm_nothing_is_written(slurm: Slurm) -> None:
    slurm.environment = slurm.environment | {"PATH": str(slurm.folder)}
    before = slurm.everything()
    assert "SLURM is not installed here" in slurm.refused()
    assert slurm.everything() == before


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ("steps: 3", [], "names no data. Add `data: SHARDS` there"),
        ("data: d.tar", ["--after-pretraining", "knn"], "an evaluation needs labelled shards"),
        (
            "data: {shards: {d.tar: 1.0}}\nevaluation: {val: v.tar}",
            ["--after-pretraining", "probe"],
            "an evaluation needs labelled",
        ),
        ("data: d.tar", ["--after-pretraining", "nnk"], "there is no evaluation 'nnk'. Choose from knn, probe"),
        ("- a\n- b", [], "must hold `name: value` lines, not a list"),
        ("data: [", [], "cannot read x.yaml"),
        ("data: d.tar", ["--accelerate", "zero9.yaml"], "there is no engine file zero9.yaml"),
        ("data: d.tar", ["--nodes", "0"], "--nodes: 0 is no number of nodes. Give a number, such as 2, or a range"),
        ("data: d.tar", ["--nodes", "4-2"], "--nodes: 4-2 is no number of nodes"),
        ("data: d.tar", ["--nodes", "2-"], "--nodes: 2- is no number of nodes"),
        (
            "data: d.tar",
            ["--nodes", "2-4", "--accelerate", "hsdp"],
            "sets the number of process groups (HSDP), which --nodes 2-4 leaves open. Give one number of nodes",
        ),
        ("data: d.tar", ["--gpus", "2", "--processes", "2"], "--processes is only for nodes without GPUs"),
        ("data: d.tar", ["--", "--output=elsewhere"], "Give --output before the separator"),
        ("data: d.tar", ["--", "--resume"], "Give --resume before the separator"),
        ("data: d.tar", ["--", "--dry_run"], "Give --dry_run before the separator"),
    ],
)
def test_wrong_options_are_refused_before_submission(
    slurm: Slurm, settings: str, arguments: list[str], said: str
) -> None:
    (slurm.folder / "x.yaml").write_text(settings)
    assert said in slurm.refused(*arguments)
    assert not slurm.submitted()
    assert not (slurm.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("metod: dino", "unknown setting 'metod'; did you mean 'method'?"),
        ("encoder: vit_smal", "Unknown encoder 'vit_smal'"),
        ("method: mae\nmae: {mask_ratio: 7}", "mae.mask_ratio"),
    ],
)
def test_settings_are_checked_before_submission(slurm: Slurm, settings: str, said: str) -> None:
    (slurm.folder / "x.yaml").write_text(f"data: d.tar\n{settings}\n")
    for more in ([], ["--dry_run"]):
        done = slurm.run("submit", "--config", "x.yaml", "--output", "run", *more, checked=True)
        assert done.returncode == 2
        assert said in done.stderr
    assert not slurm.submitted()


@pytest.mark.slow
def test_data_that_only_the_nodes_have_is_a_warning(slurm: Slurm) -> None:
    (slurm.folder / "x.yaml").write_text("data: [d.tar, photos/]\nmethod: dino")
    done = slurm.run("submit", "--config", "x.yaml", "--output", "run", "--dry_run", checked=True)
    assert done.returncode == 0
    assert "this machine does not have all data of the run: d.tar" in done.stderr


def test_each_job_gets_its_environment(slurm: Slurm) -> None:
    setup, python = "module load cuda\nconda activate tessera", "apptainer exec --nv 'my image.sif' python"
    slurm.accepted(
        "--after-pretraining",
        "knn",
        "--setup",
        setup,
        "--python",
        python,
        "--",
        "--evaluation.train=t.tar",
        "--evaluation.val",
        "v.tar",
    )
    for call in slurm.commands.calls("sbatch"):
        assert call["environment"]["TESSERA_PROLOGUE"] == setup
        assert call["environment"]["TESSERA_PYTHON"] == python


def test_shards_may_be_flags(slurm: Slurm) -> None:
    (slurm.folder / "x.yaml").write_text("steps: 3")
    shards = ["--data", "d.tar", "--evaluation.train=t.tar", "--evaluation.val", "v.tar", "w.tar", "--seed", "3"]
    slurm.accepted("--after-pretraining", "knn", "--", *shards)
    assert flags_of(slurm.submitted()[1])[3:] == ["--train", "t.tar", "--val", "v.tar", "--val", "w.tar"]


def test_another_run_is_not_touched(slurm: Slurm) -> None:
    (slurm.folder / "run").mkdir()
    (slurm.folder / "run" / "config.yaml").touch()
    assert "holds a run" in slurm.refused()
    slurm.accepted("--resume")
    assert "--resume" in flags_of(slurm.submitted()[0])


def test_a_run_that_continues_keeps_its_settings(slurm: Slurm) -> None:
    run = slurm.folder / "run"
    assert "run holds no run to continue" in slurm.fails("submit", "--resume", "run")
    assert "--output x contradict each other" in slurm.fails("submit", "--resume", "run", "--output", "x")
    slurm.accepted("--after-pretraining", "knn", "--", "--steps", "5000", "--evaluation.val", "w.tar")
    slurm.commands.answer({"squeue --noheader": [(0, "101|FAILED|None\n102|CANCELLED|None\n", "")]})
    (run / "config.yaml").write_text(f"{SETTINGS.replace('v.tar', 'w.tar')}steps: 5000\n")
    own = ["--output", str(run), "--resume"]
    same = slurm.accepted("--resume", "--after-pretraining", "knn")  # the same file, without the flags
    short = slurm.does("submit", "--resume", "run", "--after-pretraining", "knn", "--", "--seed", "1")
    assert all("# settings: run/config.yaml, and the flags after --" in said for said in (same, short))
    assert [flags_of(argv) for argv in slurm.submitted()[2::2]] == [own, [*own, "--seed", "1"]]
    assert flags_of(slurm.submitted()[-1])[-2:] == ["--val", "w.tar"]
    (slurm.folder / "x.yaml").write_text(SETTINGS + "seed: 7\n")
    assert "x.yaml over it" in slurm.accepted("--resume")
    assert flags_of(slurm.submitted()[-1]) == ["--config", f"{run}/submitted/config.yaml", *own]
    assert (run / "submitted" / "config.yaml").read_text().endswith("seed: 7\n")
    (run / "config.yaml").write_text("data: {shards: d.tar}\nevaluation: {train: labelled.tar, val: v.tar}\n")
    (slurm.folder / "x.yaml").write_text("evaluation: {val: new.tar}\n")
    slurm.accepted("--resume", "--after-pretraining", "knn")
    assert flags_of(slurm.submitted()[-1])[-4:] == ["--train", "labelled.tar", "--val", "new.tar"]


def test_a_chain_in_the_queue_is_not_replaced(slurm: Slurm) -> None:
    slurm.accepted("--after-pretraining", "knn")
    slurm.commands.answer({"squeue --noheader": [(0, "101|COMPLETED|None\n102|PENDING|Priority\n", "")]})
    assert "102 PENDING (Priority)" in slurm.refused()
    slurm.commands.answer({"squeue --noheader": [(0, "101|PREEMPTED|None\n102|CANCELLED|None\n", "")]})
    slurm.accepted("--after-pretraining", "knn")


def checkpoint(run: Path, step: int) -> str:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "encoder.safetensors").write_text(f"weights {step}")
    (folder / "encoder.json").write_text("{}")
    return folder.name


def test_status(slurm: Slurm) -> None:
    slurm.accepted("--after-pretraining", "knn,probe")
    run = slurm.folder / "run"
    answer = "101|RUNNING|None\n102|PENDING|Dependency\n999|RUNNING|None\n"
    slurm.commands.answer({"squeue --noheader": [(0, answer, "")]})
    assert "not begun" in slurm.does("status", "run")
    (run / "config.yaml").write_text("steps: 500")
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 120}\n{"step": 14')  # cut short by a kill
    step = checkpoint(run, 100)
    (run / "evaluation" / step).mkdir(parents=True)
    (run / "evaluation" / step / "encoder.json").write_text("{}")
    (run / "evaluation" / f"knn-v-{step}-20261124T101530Z.json").write_text('{"top1": 0.125}')
    (run / "evaluation" / "retrieval-v-20261124T101530Z.json").write_text('{"mean_average_precision": 0.75}')
    (run / "evaluation" / "ood-v-20261124T101530Z.json").write_text('{"auroc": 0.5}')
    (run / "evaluation" / "depth-v-20261124T101530Z.json").write_text('{"del')
    shown = slurm.does("status", "run")
    lines = [line.split() for line in shown.splitlines()]
    assert "training: step 120 of 500, newest checkpoint at step 100" in shown
    assert ["101", "pretrain", "RUNNING", "runs", "submitted/pretrain-101.log"] in lines
    waits = "starts after pretraining has succeeded submitted/knn-102.log"
    assert ["102", "knn", "PENDING", "(Dependency)", *waits.split()] in lines
    state = "over (SLURM no longer knows how it ended; see its log) submitted/probe-103.log"
    assert ["103", "probe", *state.split()] in lines
    assert "To continue" not in shown
    assert [f"knn-v-{step}-20261124T101530Z", "top-1", "12.50", "%"] in lines
    assert ["retrieval-v-20261124T101530Z", "mAP", "75.00", "%"] in lines
    assert ["ood-v-20261124T101530Z", "AUROC", "50.00", "%"] in lines
    assert ["depth-v-20261124T101530Z", "not", "a", "JSON", "file"] in lines
    assert "999" not in shown
    assert "encoder" not in shown


def test_status_of_jobs_that_slurm_forgot(slurm: Slurm) -> None:
    slurm.accepted()
    slurm.commands.answer({"squeue --noheader": [(1, "", "slurm_load_jobs error: Invalid job id specified\n")]})
    shown = slurm.does("status", "run")
    assert "no longer knows" in shown
    assert "not finished. Submit it again with the same" in shown
    (slurm.folder / "run" / "config.yaml").write_text("steps: 500")
    continued = f"To continue it, call `tessera slurm submit --resume {slurm.folder}/run` with the same"
    (slurm.folder / "run" / "encoder.safetensors").touch()  # exported before the run got more steps
    (slurm.folder / "run" / "metrics.jsonl").write_text('{"step": 20}\n')
    assert continued in (shown := slurm.does("status", "run"))
    assert "step 20 of 500\n" in shown
    (slurm.folder / "run" / "metrics.jsonl").write_text('{"step": 500}\n')
    assert "step 500 of 500, finished\n" in (shown := slurm.does("status", "run"))
    assert continued not in shown
    slurm.commands.add("sacct", (slurm.folder / "commands" / "squeue").read_text())
    slurm.commands.answer({"sacct --noheader": [(0, "101|CANCELLED by 0\n", "")]})
    assert "CANCELLED" in slurm.does("status", "run")
    slurm.commands.answer({"squeue --noheader": [(1, "", "Unable to contact slurm controller\n")]})
    assert "Unable to contact slurm controller" in slurm.fails("status", "run")


def test_the_record_of_another_version_is_read(slurm: Slurm) -> None:
    slurm.accepted()
    file = slurm.folder / "run" / "submitted" / "jobs.json"
    record = json.loads(file.read_text())
    record["jobs"][0]["after"] = None
    file.write_text(json.dumps(record))
    assert "101  pretrain" in slurm.does("status", "run")


def test_cancel_ends_what_is_not_over(slurm: Slurm) -> None:
    slurm.accepted("--after-pretraining", "knn,probe")
    first = (0, "101|RUNNING|None\n102|PENDING|Dependency\n103|FAILED|None\n", "")
    slurm.commands.answer({"squeue --noheader": [first]})
    assert "101, 102" in slurm.does("cancel", "run")
    assert [call["argv"] for call in slurm.commands.calls("scancel")] == [["101", "102"]]


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_a_folder_without_jobs(slurm: Slurm, command: str) -> None:
    assert "nowhere has no jobs" in slurm.fails(command, "nowhere")


READ = "data: {shards: d.tar, image: left.jpg, label: 'json:category.id', pages: first}\n"
READ += "evaluation: {train: a.tar, val: v.tar}\n"


def test_evaluations_read_samples_as_the_run_does(slurm: Slurm) -> None:
    (slurm.folder / "x.yaml").write_text(READ)
    own = ["--", "--data.label", "cls", "--data.stages", "m:f", "m:g"]
    slurm.accepted("--after-pretraining", "knn", "--knn-flags=--image right.jpg", *own)
    found = flags_of(slurm.submitted()[-1])[7:]
    assert found == ["--label", "cls", "--pages", "first", "--stages", "m:f", "m:g", "--image", "right.jpg"]


def test_a_fine_tuning_reads_samples_as_the_run_does(slurm: Slurm) -> None:
    pytest.importorskip("tessera.extras.finetune")
    (slurm.folder / "x.yaml").write_text(READ)
    slurm.accepted("--after-pretraining", "finetune", "--", "--data.label", "cls", "--data.stages", "m:f", "m:g")
    read = ["--data.image", "left.jpg", "--data.label", "cls", "--data.pages", "first", "--data.stages", "m:f", "m:g"]
    assert flags_of(slurm.submitted()[-1])[7:] == read


def test_shards_of_a_run_are_found_from_another_folder(slurm: Slurm) -> None:
    run, other = slurm.folder / "run", slurm.folder / "other"
    run.mkdir()
    other.mkdir()
    (run / "config.yaml").write_text("data: {shards: d.tar}\nevaluation: {train: null, val: v.tar}\n")
    (run / "machine.jsonl").write_text(json.dumps({"folder": str(slurm.folder)}) + "\n")
    (slurm.folder / "d.tar").touch()
    (slurm.folder / "v.tar").touch()
    slurm.folder = other
    slurm.does("submit", "--resume", str(run), "--after-pretraining", "knn")
    assert flags_of(slurm.submitted()[-1])[3:] == ["--train", f"{run.parent}/d.tar", "--val", f"{run.parent}/v.tar"]


def test_launchers_find_the_shards_that_the_run_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """launch/ needs no torch, so it has a function of its own."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    for name in ("a-0.tar", "a-1.tar", "b.tar", "labels.csv", "elsewhere/c.tar"):
        (tmp_path / name).touch()
    monkeypatch.chdir(elsewhere)
    file, machine = run / "config.yaml", run / "machine.jsonl"
    file.write_text(
        "data: {shards: {'a-{0..1}.tar': 1, 'a-*.tar': 1, c.tar: 2, 's3://x/y.tar': 1}, image: b.tar}\n"
        f"evaluation: {{train: [b.tar, {tmp_path}/b.tar, none.tar], val: null}}\nlabels: labels.csv\n"
    )
    machine.write_text(json.dumps({"folder": str(tmp_path)}) + "\n")
    found = read_settings_of_run(file)
    assert found == from_folder(read_settings(file), machine)
    assert found["evaluation"]["train"] == [f"{tmp_path}/b.tar", f"{tmp_path}/b.tar", "none.tar"]
    machine.unlink()
    assert read_settings_of_run(file) == from_folder(read_settings(file), machine) == read_settings(file)


def test_a_file_that_changes_a_part_of_the_data_keeps_the_shards(slurm: Slurm) -> None:
    (slurm.folder / "run").mkdir()
    (slurm.folder / "run" / "config.yaml").write_text(
        "data: {shards: d.tar, exclude: null}\nevaluation: {val: v.tar}\n"
    )
    (slurm.folder / "x.yaml").write_text("data: {exclude: x.txt}\n")
    slurm.accepted("--resume", "--after-pretraining", "knn")
    assert flags_of(slurm.submitted()[-1])[3:] == ["--train", "d.tar", "--val", "v.tar"]
    (slurm.folder / "nothing.yaml").write_text("steps: 3\n")
    slurm.does("submit", "--config", "nothing.yaml", "--output", "new", "--", "--data.shards", "d.tar")


def test_an_earlier_fine_tuning_is_named_before_submission(slurm: Slurm) -> None:
    pytest.importorskip("tessera.extras.finetune")
    (slurm.folder / "run" / "finetune").mkdir(parents=True)
    (slurm.folder / "run" / "finetune" / "config.yaml").touch()
    assert "Continue it with --finetune-flags=--resume" in slurm.refused("--after-pretraining", "finetune")
    slurm.accepted("--after-pretraining", "finetune", "--finetune-flags=--resume")


@pytest.mark.parametrize("option", ["--sbatch", "--knn-flags"])
def test_a_quote_that_is_not_closed_is_named(slurm: Slurm, option: str) -> None:
    assert f"{option}=it's is not a list of words: No closing quotation" in slurm.refused(
        "--after-pretraining", "knn", f"{option}=it's"
    )


def test_status_of_jobs_without_a_run(slurm: Slurm) -> None:
    slurm.accepted()
    file = slurm.folder / "run" / "submitted" / "jobs.json"
    file.write_text(file.read_text().replace('"name": "pretrain"', '"name": "mae-0"'))
    slurm.commands.answer({"squeue --noheader": [(0, "101|COMPLETED|None\n", "")]})
    shown = slurm.does("status", "run")
    assert "training" not in shown
    assert "No job is left" not in shown
    slurm.commands.answer({"squeue --noheader": [(0, "101|FAILED|None\n", "")]})
    assert "start the same command again" in slurm.does("status", "run")

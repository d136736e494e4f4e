"""The pages: every block of README.md, CONTRIBUTING.md and docs/ is parsed, and runs as a reader would run it.

A comment before a block, which the rendered page does not show, says what the block needs that a test lacks. Such a
block is only parsed, or its lines with a given word: `<!-- needs: gpu -->`, `<!-- needs: network for timm: -->`.

A page is one walk through a folder, in the order of its blocks. The tests shorten runs by `SHORT`, heads by `SHORTER`.
They take two processes for more, and `tessera slurm submit --dry_run`. Photographs, shards and runs that a page reads
but does not make are placeholders: crops of the two photographs of scikit-learn.
"""

import argparse
import ast
import contextlib
import functools
import gzip
import importlib
import inspect
import multiprocessing
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import timm
import torch
import webdataset
from accelerate.commands.launch import launch_command_parser
from PIL import Image
from sklearn.datasets import load_sample_image

import tessera
from tessera import __main__ as command_line
from tessera.__main__ import main
from tessera.data.check_shards import CheckShards
from tessera.data.make_shards import MakeShards
from tessera.data.make_shards import main as make_shards
from tessera.encoders.registry import VARIANTS
from tessera.extras.shard_tools import crop_preview
from tessera.extras.shard_tools.preview import OF_A_RUN
from tessera.launch import slurm
from tessera.launch.jobs import engine_file
from tessera.pretrain.command_line import load
from tessera.pretrain.config import RunConfig
from tessera.pretrain.methods import METHODS
from tessera.pretrain.monitoring.sinks import SINKS
from tessera.runtime.settings import SettingsError, flags, validate
from tests.installed import install_ijepa
from tests.launched import ROOT
from tests.ranks import run_command

COMMANDS = command_line.COMMANDS | command_line.installed_commands()
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "ijepa" / "README.md",
]  # fmt: skip
BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>\w+)(?: for (?P<word>\S+))? -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```",
    re.M | re.S,
)
NEEDS = {"gpu", "network", "cluster", "hours"}
SHORT = shlex.split("--steps 2 --batch_size 4 --workers 1 --evaluation.pictures 0 --evaluation.linear_iterations 10")
SHORT += ["--precision", "fp32"]  # many CPUs emulate bf16, which takes ten times as long
SHORTER = {
    "adapt": "--seeds 1",
    "compare": "--seeds 1 --encoder vit_micro --size 32",
    "segmentation": "--image_size 64 --epochs 1",
    "linear_probe": "--epochs 2",
}
SMALL_DINO = shlex.split("--dino.global_size 64 --dino.local_size 32")
TRAINING = ("pretrain", "adapt", "compare", "finetune")
OUTPUTS = ("--output", "--csv", "--markdown", "--site")
"""Flags whose values are written, not read."""
LOOKED_UP = {"pip", "pytest", "ruff", "bash", "kill", "tail", "tensorboard", "sbatch", "python", "accelerate"}
"""Programs that the tests do not run: they install, run these tests, do not end, or need what the test lacks."""


class Block(NamedTuple):
    """A block of a page."""

    page: Path
    line: int
    language: str
    text: str
    needs: str | None
    word: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[tuple[list[str], bool]]:
        """Return the commands of a shell block as lists of words, and whether each can run in a test."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                held = self.needs is not None and (self.word is None or any(self.word in word for word in words[:end]))
                found.append((words[:end], not held))
                words = words[end + 1 :]
        return found


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page,
            text[: found.start("language")].count("\n") + 1,
            found["language"],
            found["text"],
            found["needs"],
            found["word"],
        )
        for found in BLOCK.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def of_language(language: str) -> list[Any]:
    return [pytest.param(block, id=block.name) for block in ALL if block.language == language]


def pages(language: str) -> list[Any]:
    found = dict.fromkeys(block.page for block in ALL if block.language == language)
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


class Parsed(Exception):  # noqa: N818, because it is no error
    """Raised by a parser of argparse after it has parsed a command line."""


def parse(words: list[str]) -> None:
    """Parse a command line without running it. Raise an error if a flag, a setting, a name or a file does not exist."""
    program, *rest = words
    if program in ("accelerate", "sbatch"):
        script = next(word for word in rest if word.endswith((".py", ".sbatch")))
        assert (ROOT / script).is_file(), script
        rest = rest[rest.index(script) + 1 :]
        named = "pretrain" if script.startswith(("pretrain/", "launch/pretrain")) else Path(script).stem
        parse(["tessera", *([] if rest[0] in COMMANDS else [named]), *rest])
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), rest[0]
        text = (ROOT / rest[0]).read_text()
        known = {
            *re.findall(r'"--(\w+)"', text),
            *re.findall(r"^    (\w+): ", text, re.MULTILINE),
            *RunConfig.model_fields,
        }
        assert {word.removeprefix("--") for word in rest if word.startswith("--")} <= known
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in rest:
            assert set(re.findall(r"\w+", word.partition("[")[2])) <= extras.keys(), word
            if word.startswith((".", "examples")):
                assert (ROOT / word.partition("[")[0]).is_dir(), word
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
    elif program == "tessera":
        place = next(number for number, word in enumerate(rest) if word in COMMANDS)
        launched = launch_command_parser().parse_args([*rest[:place], "--module", "tessera"])
        assert not launched.config_file or engine_file(launched.config_file).is_file()
        with contextlib.suppress(Parsed), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["tessera", *rest[place + 1 :]])
            parse_command(rest[place], rest[place + 1 :], patch)
    else:
        assert program in LOOKED_UP, f"{program}: no test looks it up"


def without_weights(words: list[str]) -> list[str]:
    """Return a command line without the weights from which it starts. Published names must be known to timm."""
    if "--init_from" not in words:
        return words
    place = words.index("--init_from")
    source = words[place + 1]
    assert not source.startswith("timm:") or source.removeprefix("timm:") in timm.list_pretrained(), source
    return words[:place] + words[place + 2 :]


def parse_command(name: str, words: list[str], patch: pytest.MonkeyPatch) -> None:
    if "--help" in words or "-h" in words:
        with pytest.raises(SystemExit) as ended:
            load(words) if name == "pretrain" else main()
        assert not ended.value.code
        return
    words = [word if not word.startswith("configs/") else str(ROOT / word) for word in words]
    module = importlib.import_module(COMMANDS[name][0])
    if name == "pretrain":
        load(without_weights(words))
    elif name == "adapt":
        module.check(module.load_settings(without_weights(words), name, module.AdaptSettings)[1])
    elif name == "compare":
        module.check(module.load_settings(words, name)[1])
    elif name == "finetune":
        load(without_weights(module.command(words)))
    elif name == "preview" and any(word in OF_A_RUN for word in words):
        load([word for word in crop_preview.split(words)[1] if word != "--config" and not word.startswith("runs/")])
    elif hasattr(module, "run"):
        made = isinstance(module.main, functools.partial)
        model = module.main.args[0] if made else next(iter(get_type_hints(module.run).values()))
        validate(model, flags(model, words, name))
    elif name in ("make_shards", "check_shards"):
        model = {"make_shards": MakeShards, "check_shards": CheckShards}[name]
        validate(model, flags(model, words, name))
    elif name == "slurm":
        split = words.index("--") if "--" in words else len(words)
        options = slurm.parser().parse_args(words[:split])
        if words[split + 1 :]:
            load(["--data", "shards", *words[split + 1 :]])
        assert not hasattr(options, "accelerate") or options.accelerate.is_file()
    else:
        original = argparse.ArgumentParser.parse_args

        def parse_args(self: argparse.ArgumentParser, *_: Any) -> None:
            original(self, words)
            raise Parsed

        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        module.main()


@pytest.fixture(scope="module")
def ijepa(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Folders of `sys.path` with which examples/ijepa is installed. It is installed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        folders = install_ijepa(tmp_path_factory.mktemp("site-packages"))
        for folder in folders:
            patch.syspath_prepend(folder)
        yield folders
    METHODS.pop("ijepa", None)


def test_a_block_names_what_it_needs() -> None:
    marks = [mark for page in PAGES for mark in re.findall(r"^<!-- needs.*", page.read_text(), re.MULTILINE)]
    assert len(marks) == sum(block.needs is not None for block in ALL)
    assert {block.needs for block in ALL} - {None} <= NEEDS
    assert len(ALL) > 50


@pytest.mark.usefixtures("ijepa")
@pytest.mark.parametrize("block", of_language("bash"))
def test_a_command_of_a_page_has_existing_flags_and_files(block: Block) -> None:
    for words, _ in block.commands():
        parse(words)


def test_an_unknown_flag_on_a_page_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    for line, error, said in (
        ("tessera pretrain --data photos --epoch 3", SettingsError, "unknown flag --epoch; did you mean '--epochs'"),
        ("tessera knn --checkpoint a --train b --val c --kk 3", SettingsError, "unknown flag --kk; did you mean '--k'"),
        ("tessera preview --method mae --mae.ratios 1,2", SettingsError, "unknown flag --mae.ratios"),
        ("tessera slurm submit --config a.yaml -- --sed 1", SettingsError, "unknown flag --sed; did you mean '--seed'"),
        ("tessera --config_file zero9 pretrain", AssertionError, "zero9"),
        ("tessera export runs/mae --to timmm", SystemExit, "invalid choice: 'timmm'"),
        ("accelerate launch pretrain/runn.py", AssertionError, "pretrain/runn.py"),
        ('pip install -e ".[tim]"', AssertionError, ".[tim]"),
        ("tesseract knn", AssertionError, "no test looks it up"),
        ("python benchmarks/roofline.py --tops 3", AssertionError, "tops"),
    ):
        block = Block(ROOT / "README.md", 1, "bash", line, None, None)
        with pytest.raises(error) as found:
            parse(block.commands()[0][0])
        assert said in f"{found.value}{capsys.readouterr().err}", line


@pytest.mark.parametrize("block", of_language("yaml"))
def test_settings_of_a_page_are_valid(block: Block, tmp_path: Path) -> None:
    (tmp_path / "page.yaml").write_text(block.text)
    load(["--config", str(tmp_path / "page.yaml"), "--data", "shards"])


@pytest.mark.parametrize("block", of_language("toml"))
def test_entry_points_of_a_page_are_those_of_the_example(block: Block) -> None:
    points = tomllib.loads((ROOT / "examples/ijepa/pyproject.toml").read_text())["project"]["entry-points"]
    assert tomllib.loads(block.text)["project"]["entry-points"] == points


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with photographs in class folders, a shard of each set, scenes with maps, and a run."""
    folder = tmp_path_factory.mktemp("made")
    for label, name in enumerate(("china", "flower")):
        pixels = load_sample_image(f"{name}.jpg")  # (427, 640, 3)
        for number in range(18):
            path = folder / "photos" / ("train" if number < 12 else "val") / name / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            top, left = 150 * (number % 3), 90 * (number // 3)
            image = Image.fromarray(pixels[top : top + 100, left : left + 128])
            image.save(path)
            part = "training" if number < 12 else "validation"
            for kind in ("images", "annotations"):
                (folder / kind / part).mkdir(parents=True, exist_ok=True)
            image.save(folder / "images" / part / f"{name}{number}.jpg")
            Image.new("L", image.size, label + 1).save(folder / "annotations" / part / f"{name}{number}.png")
    for name in ("train", "val"):
        assert make_shards([str(folder / "photos" / name), str(folder / "shards" / name), "--workers", "1"]) == 0
    run = [
        "--method",
        "lejepa",
        "--lejepa.global_size",
        "64",
        "--encoder",
        "vit_micro",
        "--encoder.patch_size",
        "16",
        "--output",
    ]
    words = ["pretrain", *run, str(folder / "run"), "--data", str(folder / "photos/train"), *SHORT]
    code, printed = typed(["tessera", *words], folder, [])
    assert code == 0, printed
    return folder


def provide(words: list[str], folder: Path, made: Path) -> None:
    """Make the placeholders that a command reads in a folder."""
    for name in ("configs", "launch", "pretrain", "evaluation", "benchmarks", "examples"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    if words[1:2] == ["make_shards"]:
        words = [*words[:3], *words[4:]]  # the folder of the shards is written
    for flag, word in zip(["", *words], words, strict=False):
        path = folder / word
        if flag in OUTPUTS or word.startswith("--") or list(folder.glob(word.replace("{", "[{]"))):
            continue
        held_out = "val" in word or "test" in word
        shard = next((made / "shards" / ("val" if held_out else "train")).glob("*.tar"))
        if word.startswith(("photos", "mine")) and not word.endswith(".yaml"):
            shutil.copytree(made / "photos" / ("val" if held_out else "train"), path)
        elif word.startswith(("images/", "annotations/")):
            shutil.copytree(made / word, path)
        elif word.endswith((".tar", ".tar.gz")):
            path = folder / word.replace("*", "000000")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(shard.read_bytes()) if word.endswith(".gz") else shard.read_bytes())
        elif word.startswith("shards") or word == "SHARDS":
            path.mkdir(parents=True)
            shutil.copy(shard, path / f"{'val' if held_out else 'train'}-000000.tar")
        elif word.startswith("runs"):
            name = word.split("/")[1] if "/" in word else "photos"
            shutil.copytree(made / "run", folder / "runs" / name, dirs_exist_ok=True)
        elif word in ("tiles", "mixed"):  # the first and the last program of the page
            programs = [one.text for one in blocks(ROOT / "docs/other_images.md") if one.language == "python"]
            with contextlib.chdir(folder):
                exec(programs[0 if word == "tiles" else -1], {})
        elif word == "features.npz":
            np.savez(path, features=np.random.default_rng(0).normal(0, 1, (12, 4)), labels=np.arange(12) % 2)
        elif word == "photos.yaml":
            path.write_text(f"data: {made / 'photos/train'}\n")


def shortened(words: list[str], trained: int) -> list[str]:
    """Return a command that ends soon. `trained` is the number of trainings on the page before it."""
    words = list(words)
    if "--num_processes" in words:
        words[words.index("--num_processes") + 1] = "2"
    if "--methods" in words:  # the first two; a flag at the end would add methods
        place = words.index("--methods") + 1
        words[place] = ",".join(words[place].split(",")[:2])
    if words[1:3] == ["slurm", "submit"]:
        words.insert(3, "--dry_run")
    if words[1:2] == ["preview"] and {*OF_A_RUN} & {*words}:
        words += ["--batch_size", "4"]
    words += shlex.split(SHORTER.get(next((word for word in words[1:] if word in COMMANDS), ""), ""))
    if any(word in TRAINING for word in words) and not {"--dry_run", "--help"} & {*words}:
        words += ["--dino.prototypes", "1024"] if "dino" in words else []
        words += SMALL_DINO if {"dino", "--data"} <= {*words} and "--dino.global_size" not in words else []
        words += ["--profile", "1:2"] if "--profile" in words else []
        words += [*SHORT, "--steps", str(2 + trained)] if "--resume" in words else SHORT
    return words


def typed(words: list[str], folder: Path, paths: list[str]) -> tuple[int | None, str]:
    """Type a command in a folder. Return its exit code and its output."""
    log = folder / "output.txt"
    process = multiprocessing.get_context("forkserver").Process(target=run_command, args=(words, folder, log, paths))
    process.start()
    process.join(600)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", pages("bash"))
def test_the_commands_of_a_page_run(page: Path, made: Path, ijepa: list[str], tmp_path: Path) -> None:
    failed, trained = [], 0
    for block in blocks(page):
        for words, runs in block.commands() if block.language == "bash" else []:
            if not runs or words[0] in LOOKED_UP:
                continue
            provide(words, tmp_path, made)
            code, printed = typed(shortened(words, trained), tmp_path, ijepa)
            trained += any(word in TRAINING for word in words)
            if code or "Traceback" in printed:
                failed.append(f"{block.name}: {shlex.join(words)}\nexit code {code}\n{printed}")
    assert not failed, "\n\n".join(failed)


FILES = {"extending": ["runs/conv/losses.txt", "encoder.safetensors"], "own_data": ["runs/own/encoder.safetensors"]}
"""Files that the Python blocks of a page write."""


@pytest.mark.medium
@pytest.mark.parametrize("page", pages("python"))
def test_the_programs_of_a_page_run(page: Path, made: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "page", "image": Image.open(next(made.glob("photos/*/*/*.jpg")))}
    example = (ROOT / "examples/ijepa/tessera_ijepa.py").read_text()
    for block in blocks(page):
        first = block.text.partition("\n")[0]
        if block.language != "python" or block.text in example:
            continue
        if first.startswith("# ") and first.endswith(".py"):
            (small / first.removeprefix("# ")).write_text(block.text)
            continue
        provide(
            ["".join(words) for words in re.findall(r'"(shards/\w+)"|load\("(runs/\w+|\w+\.npz)"', block.text)],
            small,
            made,
        )
        exec(compile(block.text, block.name, "exec"), space)
    assert all((small / name).exists() for name in FILES.get(page.stem, []))
    if page.stem == "own_data":  # the first positions of steps 5, 6 and 7
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("32 ")]
        assert [line[1] for line in lines] == ["160", "192", "224"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the working folder. Runs and batches are small meanwhile: two steps of a tiny encoder on tiny crops."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given: dict[str, Any] = {"steps": 2, "batch_size": 8, "workers": 0, "evaluation": {"pictures": 0}}
    encoder = {"variant": "vit_micro", "depth": 1, "dim": 24, "heads": 2}

    def shorter(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(method: str = "dino", **settings: Any) -> Any:
            settings.pop("epochs", None)
            own = settings.get("encoder", "vit_")
            sized = {"encoder": encoder} if not isinstance(own, str) or own.startswith("vit_") else {}
            size = {"global_size": 16, "local_size": 16, "prototypes": 64} if method == "dino" else {"global_size": 16}
            return function(method, **settings | given | sized | {method: size})

        return call

    for place, name in ((tessera, "pretrain"), (tessera, "training_batches"), (tessera.methods, "build")):
        monkeypatch.setattr(place, name, shorter(getattr(place, name)))
    yield tmp_path
    for name in ("conv_small", "my_net"):
        VARIANTS.pop(name, None)
    SINKS.pop("losses", None)


def examples() -> list[Any]:
    """Return the programs in docstrings of the Python interface: paragraphs that are indented by four more spaces."""
    found = []
    for one in (tessera, *(getattr(tessera, name) for name in tessera.__all__)):
        text = inspect.getdoc(one) or ""
        for number, program in enumerate(re.findall(r"(?:^    .*\n?|^\n(?=    ))+", text, re.M)):
            with contextlib.suppress(SyntaxError):
                source = inspect.cleandoc(program)
                if any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(source))):
                    found.append(pytest.param(source, id=f"{one.__name__}-{number}"))
    return found


@pytest.mark.medium
@pytest.mark.parametrize("source", examples())
def test_an_example_of_a_docstring_runs(source: str, made: Path, small: Path) -> None:
    provide(["shards/train", "shards/val", "train-{000000..000099}.tar"], small, made)
    source = source.replace("{000000..000099}", "000000").replace("num_workers=8", "num_workers=0")
    shutil.copy(next((small / "shards/train").glob("*.tar")), small / "train-000000.tar")
    space = {"OrderedShards": tessera.OrderedShards, "wds": webdataset, "DataLoader": torch.utils.data.DataLoader}
    exec(source, space | {"tessera": tessera, "step": 0})


def usages() -> list[Any]:
    """Return the command lines in docstrings of modules that name no choices."""
    found = []
    for module, _ in COMMANDS.values():
        path = ROOT / f"{module.removeprefix('tessera.').replace('.', '/')}.py"
        path = path if path.exists() else ROOT / "tessera" / path.name
        text = (ast.get_docstring(ast.parse(path.read_text())) or "").replace("\\\n", " ")
        for line in re.findall(r"^    (?:tessera|accelerate launch|python) .*", text, re.M):
            if not re.search(r"[|\[]|\.\.\.|COMMAND", line):
                found.append(pytest.param(line.strip(), id=f"{path.stem}: {line.strip()[:40]}"))
    return found


@pytest.mark.parametrize("line", usages())
def test_a_command_of_a_docstring_has_existing_flags(line: str) -> None:
    parse(shlex.split(line, comments=True))

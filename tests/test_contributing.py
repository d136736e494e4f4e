"""Each row of the table of CONTRIBUTING.md is carried out, on one copy of the project.

The recipes change the copy as text. One process then runs what they have added, and writes what it found.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import tessera
from tests.installed import write_metadata
from tests.launched import ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text().split("## Where to add something")[1].split("\n\n")[1]
PACKAGES = ("configs", "data", "encoders", "evaluation", "extras", "launch", "pretrain", "runtime")
SHORT = {"data": "images", "steps": 2, "batch_size": 8, "workers": 0, "record_every": 1, "precision": "fp32"}
SHORT |= {"encoder": "vit_micro", "evaluation": {"view_images": 0, "pictures": 0}, "metrics": {"sinks": ["jsonl"]}}
SMALL = {"global_size": 16, "local_crops": 2, "prototypes": 64, "hidden_dim": 32, "bottleneck_dim": 16}
"""Settings of DINO."""


class Recipe(NamedTuple):
    """What a contributor writes, and what shows that it works."""

    files: Mapping[str, str] = {}
    """New files."""
    edits: Mapping[str, list[tuple[str, str]]] = {}
    """Changes of files that exist: old text, which the file has once, and new text."""
    check: str = ""
    """Python code that sets `found`. `train(...)` returns the records of a run."""


def part(path: str, start: str, end: str) -> str:
    """Text of a file from `start` up to `end`."""
    text = (ROOT / path).read_text()
    return text[text.index(start) : text.index(end, text.index(start) + 1)]


def renamed(path: str, **names: str) -> str:
    """Text of a file with other names."""
    text = (ROOT / path).read_text()
    for old, new in names.items():
        assert old in text
        text = text.replace(old, new)
    return text


RECIPES = {
    "encoder": Recipe(
        files={"encoders/toy.py": renamed("encoders/twins.py", Twins="Toy", twins_svt="toy")},
        edits={
            "encoders/registry.py": [
                ("from tessera.encoders import navit,", "from tessera.encoders import toy, navit,"),
                ("(Twins, twins.VARIANTS),", "(Twins, twins.VARIANTS), (toy.Toy, toy.VARIANTS),"),
            ]
        },
        check='found = train(encoder="toy_micro")',
    ),
    "weight format": Recipe(
        files={
            "extras/toy_weights/__init__.py": '"""Weights of toy_micro with the prefix `toy.`."""\n',
            "extras/toy_weights/toy_weights.py": textwrap.dedent(
                '''
                """Weight format of toy_micro."""

                NAME, ACCEPTS, DECIDES = "a toy", ("a toy",), {}


                def converts_for(encoder):
                    return type(encoder).__name__ == "Toy"


                def recognises(state):
                    return any(name.startswith("toy.") for name in state)


                def fit(encoder, state, source, report):
                    return {name.removeprefix("toy."): value for name, value in state.items()}


                def describe(state):
                    return {"variant": "toy_micro"}


                def to_timm(encoder):
                    raise NotImplementedError
                '''
            ),
        },
        edits={
            "pyproject.toml": [
                (
                    '[project.entry-points."tessera.formats"]\n',
                    '[project.entry-points."tessera.formats"]\ntoy = "tessera.extras.toy_weights.toy_weights"\n',
                )
            ]
        },
        check="""
            one, other = (tessera.encoders.build("toy_micro") for _ in range(2))
            tessera.encoders.load_weights(other, {f"toy.{name}": value for name, value in one.state_dict().items()})
            found = all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        """,
    ),
    "method": Recipe(
        files={"pretrain/methods/ijepa.py": (ROOT / "examples" / "ijepa" / "tessera_ijepa.py").read_text()},
        edits={
            "pretrain/methods/__init__.py": [
                (
                    "from tessera.pretrain.methods.lejepa",
                    "from tessera.pretrain.methods.ijepa import IJEPA\nfrom tessera.pretrain.methods.lejepa",
                ),
                ('"dino": DINO,', '"dino": DINO,\n        "ijepa": IJEPA,'),
            ]
        },
        check='found = train(method="ijepa", ijepa={"size": 16})',
    ),
    "loss term": Recipe(
        edits={
            "pretrain/methods/losses.py": [
                (
                    "def gram_loss(",
                    "def spread_loss(features: Tensor) -> Tensor:\n"
                    "    return -features.std(0).mean()\n\n\ndef gram_loss(",
                )
            ],
            "pretrain/methods/dino.py": [
                (
                    'the length of the\n    run."""\n',
                    'the length of the\n    run."""\n\n    spread_weight: float = Field(default=0, ge=0)\n'
                    '    """weight of the spread of the features over the images"""\n',
                ),
                ("import torch\nfrom torch", "import torch\nfrom pydantic import Field\nfrom torch"),
                (
                    "from tessera.pretrain.methods.method",
                    "from tessera.pretrain.methods.losses import spread_loss\nfrom tessera.pretrain.methods.method",
                ),
                (
                    "        return cross_entropy, metrics",
                    "        if not self.config.spread_weight:\n            return cross_entropy, metrics\n"
                    "        spread = self.config.spread_weight * spread_loss(pooled.float())\n"
                    '        metrics |= {"dino_loss": cross_entropy.detach(), "spread_loss": spread.detach()}\n'
                    "        return cross_entropy + spread, metrics",
                ),
            ],
        },
        check="""
            records = train(dino=small | {"spread_weight": 0.5})
            found = [[record["loss"], record["spread_loss"], record["dino_loss"]] for record in records]
        """,
    ),
    "evaluation": Recipe(
        files={
            "extras/vote/__init__.py": '"""k-NN accuracy under another name."""\n',
            "extras/vote/vote.py": renamed("evaluation/knn.py", **{'("knn", ': '("vote", '}),
        },
        edits={
            "pyproject.toml": [
                (
                    '[project.entry-points."tessera.evaluations"]\n',
                    '[project.entry-points."tessera.evaluations"]\nvote = "tessera.extras.vote.vote"\n',
                )
            ]
        },
        check="""
            flags = ["--checkpoint", "pixels", "--image_size", "16", "--k", "3", "--source.allow_overlap", "true"]
            command(["vote", *flags, "--train", "images", "--val", "images", "--output", "vote.json"])
            found = json.loads(Path("vote.json").read_text())["top1"]
        """,
    ),
    "engine": Recipe(
        files={
            "pretrain/engines/own.py": "from tessera.pretrain.engines.ddp import DDP\n\n\nclass Own(DDP):\n"
            '    name = "own"\n',
            "configs/accelerate/own.yaml": (ROOT / "configs" / "accelerate" / "ddp.yaml").read_text(),
        },
        edits={
            "pretrain/engines/__init__.py": [
                ("import DDP\n", "import DDP\nfrom tessera.pretrain.engines.own import Own\n"),
                ("    if fsdp:\n", '    if os.environ.get("TESSERA_OWN_ENGINE"):\n        return Own\n    if fsdp:\n'),
            ]
        },
        check="""
            os.environ["TESSERA_OWN_ENGINE"] = "1"
            try:
                train(output="own_engine")
            finally:
                del os.environ["TESSERA_OWN_ENGINE"]
            found = json.loads(next(Path("own_engine").rglob("trainer.json")).read_text())["engine"]
        """,
    ),
    "sink of metrics": Recipe(
        edits={
            "pretrain/monitoring/sinks.py": [
                (
                    "class WandB(Sink):",
                    "class Lines(CSV):\n    def write(self, step: int, record: Record) -> None:\n"
                    '        with self.path.with_name("lines.txt").open("a") as file:\n'
                    "            file.write(f\"{step} {record['loss']}\\n\")\n\n\nclass WandB(Sink):",
                ),
                ('"csv": CSV,', '"csv": CSV,\n        "lines": Lines,'),
            ]
        },
        check="""
            records = train(output="sink", metrics={"sinks": ["jsonl", "lines"]})
            lines = Path("sink/lines.txt").read_text().splitlines()
            found = lines == [f"{number + 1} {record['loss']}" for number, record in enumerate(records)]
        """,
    ),
    "augmentation": Recipe(
        edits={
            "data/colors.py": [
                (
                    "def color_operations(",
                    part(
                        "data/colors.py", "@dataclass(frozen=True)\nclass Grayscale", "@dataclass(frozen=True)\nclass B"
                    )
                    .replace("class Grayscale", "class Invert")
                    .replace("    shared = (11,)\n", "")
                    .replace("gray_image)", "lambda some: each(some, lambda x: 1 - x))")
                    + "def color_operations(",
                ),
                (
                    "        Solarize(tuple(solarize)),\n",
                    "        Solarize(tuple(solarize)),\n"
                    "        *([Invert(config.invert)] if config.invert else []),\n",
                ),
                (
                    '    """probability that a crop is converted to gray"""\n',
                    '    """probability that a crop is converted to gray"""\n    invert: Share = 0.0\n'
                    '    """probability that the values of a crop are inverted"""\n',
                ),
            ]
        },
        check='found = [train(), train(dino=small | {"invert": 1.0})]',
    ),
    "source of data": Recipe(
        files={
            "extras/lines/__init__.py": '"""Images in the lines of a JSON file."""\n',
            "extras/lines/lines.py": "import json\nfrom dataclasses import dataclass\nfrom pathlib import Path\n\n"
            "import numpy as np\n\nfrom tessera.data.shards import Access\n"
            "from tessera.data.shards.shard import Shard\n"
            "from tessera.data.shards.tar_index import NumberedIndex\n\n\n"
            + part("tests/data/shards/test_registry.py", "@dataclass(frozen=True)\nclass Lines", "@pytest.fixture"),
        },
        edits={
            "pyproject.toml": [
                (
                    '[project.entry-points."tessera.sources"]\n',
                    '[project.entry-points."tessera.sources"]\n".lines" = "tessera.extras.lines.lines:Lines"\n',
                )
            ]
        },
        check="""
            rows = []
            for number, path in enumerate(sorted(Path("images").rglob("*.png"))):
                rows.append(json.dumps([path.read_bytes().hex(), number % 2]))
            Path("images.lines").write_text("\\n".join(rows))
            found = train(data="images.lines")
        """,
    ),
    "setting": Recipe(
        check="""
            from tessera.pretrain.command_line import load
            from tessera.runtime.settings import SettingsError
            found = [load(["--dino.spread_weight", "2"]).method_config.spread_weight]
            try:
                load(["--dino.spread_weight", "-1"])
            except SettingsError as error:
                found.append(str(error))
        """,
    ),
}
"""Recipe of each row of the table. The setting is the weight of the loss term."""

PROGRAM = """
import json, os, sys, traceback
from pathlib import Path

import tessera
from tessera.__main__ import run

assert tessera.__file__.startswith(sys.argv[1]), tessera.__file__
(short, small), runs = json.loads(sys.argv[2]), 0


def train(**given):
    global runs
    runs += 1
    output = Path(given.setdefault("output", f"runs/{runs}"))
    if given.get("method", "dino") == "dino":
        given = {"dino": small} | given
    tessera.pretrain(**short | given)
    return [record for line in (output / "metrics.jsonl").read_text().splitlines()
            if "loss" in (record := json.loads(line))]


def command(words):
    try:
        run(words)
    except SystemExit as error:
        assert not error.code, error.code


results = {}
for name, code in json.loads(sys.argv[3]).items():
    scope = dict(globals())
    try:
        exec(code, scope)
        results[name] = scope["found"]
    except BaseException:
        results[name] = traceback.format_exc()
Path("results.json").write_text(json.dumps(results))
"""


def carry_out(recipe: Recipe, project: Path) -> None:
    """Make the changes of a recipe in a copy of the project."""
    for name, text in recipe.files.items():
        path = project / name
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for name, changes in recipe.edits.items():
        text = (project / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        (project / name).write_text(text)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the changes of all recipes, which Python finds before the project itself."""
    copy = tmp_path_factory.mktemp("copy") / "project"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs", "docs")
    shutil.copytree(ROOT, copy, ignore=left_out)
    for name in PACKAGES:
        (copy / "tessera" / name).symlink_to(f"../{name}")
    for recipe in RECIPES.values():
        carry_out(recipe, copy)
    points = tomllib.loads((copy / "pyproject.toml").read_text())["project"]["entry-points"]
    write_metadata(copy, "tessera-ssl", points)  # as `pip install -e .` does
    return copy


def write_images(folder: Path) -> None:
    """Eight images of each of two classes."""
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            pixels = np.random.default_rng(number).integers(0, 100, (16, 16, 3), dtype=np.uint8) + 100 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")


def environment(project: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def found(project: Path) -> dict[str, Any]:
    """What the check of each recipe has found."""
    checks = {name: textwrap.dedent(recipe.check) for name, recipe in RECIPES.items()}
    folder = project.with_name("work")
    write_images(folder / "images")
    command = [sys.executable, "-c", PROGRAM, str(project), json.dumps([SHORT, SMALL]), json.dumps(checks)]
    done = subprocess.run(command, cwd=folder, env=environment(project), capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


def losses(records: Any) -> list[float]:
    assert isinstance(records, list), records
    return [record["loss"] for record in records]


def test_every_row_of_the_table_has_a_recipe():
    rows = [line.split("|")[1].strip() for line in TABLE.splitlines()[2:]]
    assert sorted(rows) == sorted(RECIPES)


def test_the_files_of_the_table_exist():
    named = [name for name in re.findall(r"`([\w./]+/[\w./]*)`", TABLE) if "NAME" not in name]
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "method", "source of data"])
def test_a_run_uses_what_was_added(found, name):
    assert len(losses(found[name])) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("weight format", True), ("evaluation", 1.0), ("engine", "own"), ("sink of metrics", True)]
)
def test_what_was_added_works(found, name, expected):
    assert found[name] == expected


@pytest.mark.slow
def test_an_added_augmentation_changes_no_run(found, tmp_path):
    """With probability 0, the losses are those of the project itself."""
    output = tmp_path / "run"
    write_images(tmp_path / "images")
    tessera.pretrain(**SHORT | {"data": str(tmp_path / "images")}, dino=SMALL, output=output)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    without, inverted = found["augmentation"]
    assert losses(without) == losses([record for record in records if "loss" in record])
    assert losses(inverted)[0] != losses(without)[0]


@pytest.mark.slow
def test_an_added_loss_term_is_part_of_the_loss(found):
    (loss, term, dino_loss), _ = found["loss term"]
    without, _ = losses(found["augmentation"][0])
    assert term != 0
    assert dino_loss == without
    assert loss == pytest.approx(without + term, rel=1e-6)


@pytest.mark.slow
def test_an_added_setting_is_checked(found):
    value, message = found["setting"]
    assert value == 2
    assert re.search(r"dino\.spread_weight.*-1", message), message


@pytest.mark.slow
def test_no_test_of_another_changes(project):
    """Tests of colours, crops and batches pass with an added augmentation, and tests of all encoders find a new one."""
    colors = [
        "test_colors.py",
        "test_augment.py",
        "test_crops.py",
        "test_collate.py",
        "test_masking.py",
        "test_recipe.py",
    ]
    of_weights = "not_fit or another_family or other_numbers"  # a copy of Twins has the tensor names of Twins
    contract = ["tests/encoders/test_contract.py", "-k", f"toy_micro and not ({of_weights})"]
    for arguments in (["--fast", *(f"tests/data/{name}" for name in colors)], contract):
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            command, cwd=project, env=environment(project), capture_output=True, text=True, timeout=600
        )
        assert not done.returncode, done.stdout[-3000:]
        assert " passed" in done.stdout


@pytest.mark.slow
def test_added_settings_are_lines_of_one_file(project):
    """Writing tests/frozen_settings.txt adds the settings of the recipes. It changes only the line of the methods."""
    file = project / "tests" / "frozen_settings.txt"
    before = file.read_text().splitlines()
    command = [sys.executable, "tests/test_frozen_settings.py"]
    subprocess.run(command, cwd=project, env=environment(project), check=True, timeout=600)
    after = file.read_text().splitlines()
    assert [line.split(":")[0] for line in before if line not in after] == ["core pretrain method"]
    assert {"core pretrain dino.spread_weight: float = 0", "core pretrain dino.invert: float = 0.0"} <= set(after)

"""A method (examples/ijepa), an encoder and a sink of installed packages go through everything that ours go through."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tessera_ijepa import IJEPA

from tessera import encoders
from tessera.evaluation.knn import KNNSettings
from tessera.evaluation.knn import run as knn
from tessera.pretrain import method_state
from tessera.pretrain.checkpoints.resume import CheckpointError
from tessera.pretrain.command_line import load
from tessera.pretrain.config import settings_model
from tessera.pretrain.methods import METHODS
from tessera.pretrain.monitoring.sinks import SINKS
from tessera.pretrain.run import main
from tessera.runtime.settings import SettingsError
from tests.installed import install_ijepa, needs_extra, write_metadata
from tests.launched import ROOT, records
from tests.pretrain.engines.test_engines import LOOSE, Started, assert_same, run
from tests.pretrain.small import arguments, scored_shards
from tests.pretrain.test_pairs import Both
from tests.pretrain.toy import POINTS, ToyConv

PAIRS = ["ijepa of navit_micro", "ijepa of swin_micro", "dino of toy_conv_micro", "mae of toy_conv_micro"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of `sys.path` with which the packages are installed."""
    folder = tmp_path_factory.mktemp("site-packages")
    write_metadata(folder, "toy", POINTS)
    return [*install_ijepa(folder), str(ROOT)]


@contextmanager
def installed(paths: list[str]) -> Iterator[None]:
    """Install the packages in this process."""
    before = sys.path[:]
    sys.path[:0] = paths
    try:
        yield
    finally:
        sys.path[:] = before
        for registry, name in ((METHODS, "ijepa"), (encoders.VARIANTS, "toy_conv_micro"), (SINKS, "losses")):
            registry.pop(name, None)


@pytest.fixture
def uninstall(paths: list[str]) -> Iterator[Callable[[], None]]:
    """Install the packages for one test, and return a function that uninstalls them."""
    if "ijepa" in METHODS:
        pytest.skip("tessera-ijepa is installed in this environment")
    with ExitStack() as stack:
        stack.enter_context(installed(paths))
        yield stack.close


@pytest.fixture(scope="module")
def begin(start: Callable, paths: list[str]) -> Iterator[Callable]:
    """`start` with the packages installed, in this process and in the launched ones."""
    with installed(paths):
        yield lambda *given, **how: start(*given, PYTHONPATH=os.pathsep.join(paths), **how)


@needs_extra("report")
@needs_extra("exports")
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_engine")
def test_a_run_is_resumed_exported_and_evaluated(uninstall: Callable[[], None], tmp_path: Path, capsys: Any) -> None:
    assert METHODS["ijepa"] is IJEPA
    from tessera.extras.exports import command as export
    from tessera.extras.report import report

    output, file = tmp_path / "run", tmp_path / "encoder.safetensors"
    words = arguments("ijepa", "vit_micro", output, "--metrics.sinks", "jsonl,losses")
    assert main([*words, "--steps", "3"]) == 0
    assert main(["--resume", str(output), "--steps", "6"]) == 0
    assert [line["step"] for line in records(output)] == [0, 1, 2, 3, 4, 5, 6]
    assert records(output)[-1]["knn_top1"] > 0.1
    steps = [int(line.split()[0]) for line in (output / "losses.txt").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    assert "encoder of ijepa after 6 steps" in export.export(output, file)
    exported = encoders.load(file).state_dict()
    for name, tensor in encoders.load(output).state_dict().items():
        assert torch.equal(exported[name], tensor)
    uninstall()
    train, val = scored_shards()
    knn(KNNSettings(checkpoint=str(output), train=train, val=val, k=[20], workers=0))
    report.run(
        report.ReportSettings(
            runs=[str(output)], output=str(tmp_path / "page.html"), markdown=str(tmp_path / "table.md")
        )
    )
    assert "ijepa" in (tmp_path / "page.html").read_text()
    wanted = "unknown method 'ijepa'.*install that package in this environment"
    with pytest.raises(CheckpointError, match=wanted):
        export.export(output, file)
    with pytest.raises(SettingsError, match=wanted):
        load(["--resume", str(output)])


@pytest.mark.usefixtures("uninstall", "fresh_engine")
def test_the_command_line_knows_an_installed_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help", "ijepa"])
    assert "--ijepa.target_scale float,float" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load(["--help"])
    assert "|ijepa" in capsys.readouterr().out
    with pytest.raises(SettingsError, match=r"unknown flag --ijepa.target; did you mean '--ijepa.targets'"):
        load(["--method", "ijepa", "--ijepa.target", "3"])
    with pytest.raises(
        SettingsError, match=r"unknown method 'jepa'; did you mean 'ijepa'\? \(known: dino, .*, ijepa\)"
    ):
        load(["--method", "jepa"])
    assert main([*arguments("ijepa", "vit_micro", tmp_path / "run"), "--dry_run", "full"]) == 0
    assert "predictor_depth: 1" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_an_encoder_is_rebuilt_only_where_its_package_is_installed(
    uninstall: Callable[[], None], tmp_path: Path
) -> None:
    encoder = encoders.build("toy_conv_micro", depth=1)
    encoders.save(encoder, tmp_path / "encoder.safetensors")
    assert encoders.load(tmp_path / "encoder.safetensors").settings == encoder.settings
    uninstall()
    with pytest.raises(ValueError, match=r"Unknown encoder 'toy_conv_micro'.*install that package"):
        encoders.load(tmp_path / "encoder.safetensors")
    with pytest.raises(SettingsError, match=r"Unknown encoder 'toy_conv_micro'.*install that package"):
        load(["--encoder", "toy_conv_micro"])


@pytest.mark.parametrize("value", [ToyConv, {"family": torch.nn.Linear}, {"family": encoders.Encoder}])
def test_an_encoder_without_an_image_size_is_refused(value: Any) -> None:
    with pytest.raises(
        ValueError, match='must be a dictionary whose entry "family" is a subclass of Encoder, with the'
    ):
        encoders.VARIANTS.register("other", value)


@pytest.mark.usefixtures("uninstall")
def test_a_broken_or_unknown_sink_stops_the_run_before_it_starts() -> None:
    with pytest.raises(
        SettingsError, match=r"sinks: The sink 'broken' of the installed package toy cannot be imported"
    ):
        load(["--metrics.sinks", "jsonl,broken"])
    with pytest.raises(SettingsError, match=r"Choose any of jsonl, .*, broken, .*losses\. If another package provides"):
        load(["--metrics.sinks", "jsonl,loss"])


def test_a_method_cannot_have_the_name_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "optim", IJEPA)
    with pytest.raises(SettingsError, match="A method is named optim, but this is the name of a setting"):
        settings_model("vit_micro")


def test_a_file_that_names_a_module_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("method: antigravity\ndata: images\n")
    with pytest.raises(SettingsError, match="unknown method 'antigravity'"):
        load(["--config", str(tmp_path / "run.yaml")])
    described = {"method": "antigravity", "antigravity": {}, "steps": 1, "encoder": {"variant": "antigravity"}}
    with pytest.raises(ValueError, match="unknown method 'antigravity'"):
        method_state.build(described)
    (tmp_path / "encoder.json").write_text(json.dumps({"variant": "antigravity"}))
    (tmp_path / "encoder.safetensors").touch()
    with pytest.raises(ValueError, match=r"Unknown encoder 'antigravity'.*install that package"):
        encoders.load(tmp_path / "encoder.safetensors")
    assert "antigravity" not in sys.modules


@pytest.fixture(scope="module")
def pairs(begin: Callable, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(begin, PAIRS, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_pairing_resumes_and_is_the_same_on_two_processes(name: str, pairs: Both) -> None:
    pairs.check(name)


@pytest.mark.slow
def test_zero3_on_two_processes_equals_one(begin: Callable, tmp_path: Path) -> None:
    """tests/extras/test_own_parts.py has a method of a package under the other engines."""
    alone = Started(begin, {"ijepa": run("ijepa")}, tmp_path / "alone")
    sharded = Started(begin, {"ijepa": run("ijepa")}, tmp_path / "sharded", processes=2, engine="zero3")
    assert_same(sharded.folder("ijepa"), alone.folder("ijepa"), LOOSE)

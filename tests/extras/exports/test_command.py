"""Exports equal the trained weights, and a damaged checkpoint is not exported."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tessera import encoders
from tessera.data.decode import decode
from tessera.encoders.base import Preprocessing
from tessera.extras.exports import command as export
from tessera.extras.exports.model_card import model_card
from tessera.pretrain import method_state
from tessera.pretrain.checkpoints import manifest
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.methods import METHODS
from tests.pretrain.small import make, saver


@pytest.fixture(params=METHODS.names())
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, dict[str, torch.Tensor]]:
    """Return a run folder with two checkpoints, the method's name, and the tensors of the newer checkpoint."""
    accelerator, engine = make(0, request.param)
    engine.method.trained_encoder().preprocessing = Preprocessing((0.1, 0.2, 0.3), (0.5, 0.4, 0.3))
    output = tmp_path / "run"
    for step in (3, 6):
        saver(output, accelerator, engine, request.param).save(TrainState(step, 4), engine.method.trained_encoder())
        held = {name: tensor.clone() for name, tensor in engine.method.state_dict().items()}
        for tensor in engine.method.state_dict().values():
            tensor += 1
    return output, request.param, held


def part(held: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prefixes(held: dict[str, torch.Tensor]) -> dict[str, str]:
    """The encoders of a method: the part that an export calls them, and the start of the names of their tensors."""
    if any(name.startswith("encoder.") for name in held):
        return {"encoder": "encoder."}
    return {"encoder": "teacher.encoder.", "student": "student.encoder.", "teacher": "teacher.encoder."}


@pytest.mark.parametrize("run", ["dinov3", "mae"], indirect=True)
def test_an_encoder_is_one_for_everything_that_takes_encoders(run, tmp_path: Path) -> None:
    folder, name, held = run
    for chosen in ("encoder", "student", "teacher"):
        output = tmp_path / f"{chosen}.safetensors"
        if chosen not in prefixes(held):
            with pytest.raises(ValueError, match=f"{METHODS[name].__name__} has no {chosen}. Use --part encoder"):
                export.export(folder, output, chosen)
            assert not output.exists()
            continue
        said = export.export(folder, output, chosen)
        assert f"{chosen} of {name} after 6 steps" in said
        export.export(output, again := tmp_path / f"{chosen}-again.safetensors")
        assert encoders.read_step(again) == encoders.read_step(output) == 6
        loaded = encoders.load(output)
        assert equal(dict(loaded.state_dict()), part(held, prefixes(held)[chosen]))
        other = encoders.build(**loaded.settings)
        encoders.load_weights(other, output)  # as --init_from does
        assert equal(dict(other.state_dict()), dict(loaded.state_dict()))
        assert output.stat().st_mode == output.with_suffix(".json").stat().st_mode
    written = folder / "checkpoints" / "latest"
    for ending in ("safetensors", "json"):
        same = (tmp_path / f"encoder.{ending}").read_bytes() == (written / f"encoder.{ending}").read_bytes()
        assert same, ending
    older = tmp_path / "older.safetensors"
    export.export(folder / "checkpoints" / "step-00000003", older)
    before = {n: t - 1 for n, t in part(held, prefixes(held)["encoder"]).items()}
    torch.testing.assert_close(load_file(older), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", ["dinov3", "mae"], indirect=True)
def test_methods_with_and_without_a_teacher_export_to_other_libraries(run, tmp_path: Path) -> None:
    """The teacher of DINOv3 is frozen and has a mask token, which its features do not need."""
    folder, _, held = run
    for part in prefixes(held):
        export.export(folder, tmp_path / f"{part}.safetensors", part, to="timm")
    export.export(folder, tmp_path / "encoder.pt2", to="torch")


@pytest.mark.parametrize("run", ["dino"], indirect=True)
def test_what_cannot_be_is_said_in_a_line(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = run
    newest = folder / "checkpoints" / "step-00000006"
    output = tmp_path / "out.safetensors"

    def said(*arguments: object) -> str:
        with pytest.raises(SystemExit, match="2"):
            export.main([str(a) for a in arguments])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("tessera export: ")
        assert not output.exists()
        return line

    assert "must end in .safetensors" in said(folder, tmp_path / "out.pt")
    assert "is not a folder. Make it first" in said(folder, tmp_path / "no" / "out.safetensors")
    assert "contains no checkpoint: neither" in said(tmp_path, output)
    assert "--part student needs a run folder" in said(newest / "encoder.safetensors", output, "--part", "student")
    assert "must contain no other files. Choose another folder" in said(
        folder, folder / "checkpoints" / "latest" / "x.safetensors"
    )
    shard = newest / "__0_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    line = said(folder, output)
    assert "the checksum of __0_0.distcp differs from manifest.json" in line
    assert "step-00000003" in line
    shard.write_bytes(whole)
    trainer = json.loads((newest / "trainer.json").read_text())
    (newest / "trainer.json").write_text(json.dumps({k: v for k, v in trainer.items() if k != "optimizer_steps"}))
    assert "another version" in said(folder, output)

    def changed(section: str, name: str) -> str:
        """Return what the command says if a setting is changed, and the manifest with it."""
        other = copy.deepcopy(trainer)
        other["settings"][section][name] = 2**24 + 1 if section == "dino" else 48
        (newest / "trainer.json").write_text(json.dumps(other))
        listed = json.loads((newest / "manifest.json").read_text())
        listed["files"] |= manifest.describe([newest / "trainer.json"])
        (newest / "manifest.json").write_text(json.dumps(listed))
        return said(folder, output)

    assert "do not fit its settings" in changed("encoder", "dim")  # another shape than that of the tensors
    assert "trainer.json cannot be used: brightness is larger than 16777216" in changed("dino", "brightness")


@pytest.mark.parametrize("run", ["mae"], indirect=True)
def test_moments_are_not_read(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, held = run
    filled, original = set(), method_state.read

    def read(pieces, *arguments, **options) -> None:
        filled.update(pieces)
        original(pieces, *arguments, **options)

    monkeypatch.setattr(method_state, "read", read)
    export.main([str(folder), str(tmp_path / "encoder.safetensors")])
    assert filled == {f"method.{name}" for name in held if name.startswith("encoder.")}


def test_a_run_folder_gives_a_model_card_and_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    (run / "evaluation").mkdir(parents=True)
    encoders.save(encoders.build("vit_micro", depth=1), run / "encoder.safetensors", step=4)
    (run / "config.yaml").write_text(
        "method: dino\nsteps: 4\noptim: {lr: 0.25}\ndata: {shards: 'https://me:secret@host/train.tar'}\n"
    )
    (run / "metrics.jsonl").write_text('{"step": 4, "images": 32, "loss": 1.0}\n')
    (run / "evaluation" / "knn.json").write_text('{"protocol": "20-NN", "data": "birds", "step": 4, "top1": 0.625}')
    gains = [
        {"method": name, "score": "20-NN", "before": 0.5, "gain": -0.0325, "error": 0.02, "p": p}
        for name, p in (("dino", None), ("mae", 0.5))
    ]
    advice = {"method": "dino", "step": 4, "seeds": 3, "advice": "Keep the given encoder.", "gains": gains}
    (run / "adapt.json").write_text(json.dumps(advice))
    export.main([str(run), "--to", "timm"])
    folder = run / "export" / "timm"
    assert f"wrote {folder}/encoder.safetensors: timm.create_model(" in capsys.readouterr().out
    card = (folder / "encoder.md").read_text()
    for part in (
        "| 20-NN, birds | 4 | 62.50 % |",
        "dino, 4 steps, 32 images",
        "optim.lr: 0.25",
        "me:***@host/train.tar",
        "`tessera adapt`, 3 seeds: Keep the given encoder.",
        "| 20-NN | 50.00 % | -3.25 ± 2.00 | unknown |\n\n## Settings",
    ):
        assert part in card
    assert "secret" not in card
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 4), np.uint8))
    photo.save(tmp_path / "photo.png", exif=b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0")
    opening = card.split("white background:\n\n```python\n")[1].split("```")[0]
    found: dict[str, Any] = {}
    exec(opening.replace("photo.jpg", str(tmp_path / "photo.png")), found)
    expected = decode((tmp_path / "photo.png").read_bytes())
    assert np.array_equal(np.asarray(found["image"]), expected.permute(1, 2, 0))
    with pytest.raises(SystemExit):
        export.main([str(run), "--to", "transformers"])
    assert "or try --to timm or onnx." in capsys.readouterr().err
    assert [path.name for path in (run / "export").iterdir()] == ["timm"], "no empty folder stays"
    records = [{"step": step, "images": 8 * step, "loss": 1.0, "knn_top1": step / 4} for step in (2, 4)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    earlier = model_card(json.loads((folder / "encoder.certificate.json").read_text()) | {"step": 2}, run)
    assert "dino, 2 steps, 16 images" in earlier
    assert "| 2 | 50.00 % |" in earlier
    assert "62.50 %" not in earlier
    assert "tessera adapt" not in earlier, "the verdict is about the last step"
    assert "100.00 %" not in earlier
    certificate = json.loads((folder / "encoder.certificate.json").read_text())
    assert certificate["versions"]["timm"]
    assert certificate["preprocessing"]["mean"] == list(encoders.IMAGENET.mean)
    with pytest.raises(SystemExit, match="2"):
        export.main([str(tmp_path / "none.safetensors"), "--to", "onnx"])
    assert "is not a run folder. Give the file to write" in capsys.readouterr().err

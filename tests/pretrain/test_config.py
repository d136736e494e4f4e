import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import BaseModel

from tessera import encoders
from tessera.data.shards import ShardError, open_sources
from tessera.encoders.base import IMAGENET, Preprocessing
from tessera.pretrain.command_line import PRESETS, expand_resume, from_values, load
from tessera.pretrain.config import settings_model, to_yaml
from tessera.pretrain.methods import METHODS
from tessera.pretrain.methods.mae import MAE
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main
from tessera.runtime.settings import SettingsError, settings_of
from tessera.runtime.user_error import UserError
from tests.pretrain.small import presets
from tests.teachers import small_teacher

SHARDS = ["--data", "somewhere.tar"]
RESOLVED_OPTIM = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 1, "weight_decay": 0.1, "weight_decay_end": 0.1} | {
    "betas": (0.9, 0.999),
    "clip": 0.0,
}


@pytest.mark.parametrize("entry", [("optim", 0), ("init_from", 0), ("encoder", 3)])
def test_a_saved_file_with_a_wrong_type_is_refused(tmp_path: Path, entry: tuple[str, object]) -> None:
    file = tmp_path / "config.yaml"
    whole = yaml.safe_load(to_yaml(resolve(load(SHARDS), 1000)))
    file.write_text(yaml.safe_dump(whole | dict([entry])))
    with pytest.raises(SettingsError, match=entry[0]):
        load(["--config", str(file)])


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("encoder: {variant: vit_tiny, depth: 3}\nsteps: 7\ndino: {local_crops: 5, local_size: 64}\n")
    config = load([*SHARDS, "--dino.local_crops", "6", "--config", str(file), "--encoder.heads", "2"])
    assert (config.steps, config.method_config.local_crops, config.method_config.local_size) == (7, 6, 64)
    assert config.method_config.global_size == 224
    assert config.encoder_settings == {"variant": "vit_tiny", "depth": 3, "heads": 2}
    file.write_text("encoder: vit_base\n")
    assert load([*SHARDS, "--config", str(file)]).encoder_settings["variant"] == "vit_base"
    assert load([*SHARDS, "--config", str(file), "--encoder", "vit_large"]).encoder_settings == {"variant": "vit_large"}


def test_the_length_in_steps_or_in_epochs(tmp_path: Path) -> None:
    def steps(*arguments: str) -> int:
        return resolve(load([*arguments, "--batch_size", "64"]), 1000).steps

    assert steps(*SHARDS) == 1562  # 100 epochs
    assert steps(*SHARDS, "--epochs", "2.5") == 39
    assert steps("--epochs", "2") == 31  # replaces the 450 steps of the digits' preset
    assert steps() == 450
    file = tmp_path / "settings.yaml"
    file.write_text("epochs: 3\n")
    assert steps(*SHARDS, "--config", str(file)) == 46
    assert steps(*SHARDS, "--config", str(file), "--steps", "7") == 7
    with pytest.raises(SettingsError, match="Give only one of them"):
        resolve(load([*SHARDS, "--steps", "7", "--epochs", "2"]), 1000)
    config = resolve(load([*SHARDS, "--epochs", "2", "--batch_size", "64"]), 1000)
    file.write_text(to_yaml(config))
    assert steps("--config", str(file)) == 31


@pytest.mark.parametrize(("steps", "every"), [(4, 1), (100, 10), (500, 50), (50_000, 50)])
def test_a_short_run_has_at_least_ten_records(steps: int, every: int) -> None:
    assert resolve(load([*SHARDS, "--steps", str(steps)]), 1000).record_every == every
    assert resolve(load([*SHARDS, "--steps", str(steps), "--record_every", "7"]), 1000).record_every == 7


def test_resume_takes_the_folder_of_the_run() -> None:
    expected = ["--resume", "--output", "runs/a", "--steps", "3"]
    assert expand_resume(["--resume", "runs/a", "--steps", "3"]) == expected
    assert expand_resume(["--resume=runs/a", "--steps", "3"]) == expected
    for unchanged in ("--resume --output a", "--resume true", "--resume=false", "--output a --resume"):
        assert expand_resume(unchanged.split()) == unchanged.split()
    config = load([*SHARDS, "--resume", "runs/a"])
    assert (config.resume, config.output) == (True, "runs/a")
    assert load([*SHARDS, "--output", "runs/b/../a", "--resume", "runs/a"]).output == "runs/a"  # the same folder
    for words in ("--resume runs/a --output runs/b", "--output=runs/b --resume=runs/a"):
        with pytest.raises(SettingsError, match=r"leave --output out\. To start .* --init_from=runs/a and"):
            load([*SHARDS, *words.split()])
    with pytest.raises(SettingsError, match="--output=runs/b contradicts the run to continue, runs/a"):
        from_values({"data": {"shards": "d.tar"}, "resume": Path("runs/a"), "output": "runs/b"})


def test_settings_from_python_equal_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("data: some.tar\nencoder: vit_mini\noptim: {lr: 0.5}\n")
    command = ["--method", "mae", "--config", str(file), "--mae.size", "32", "--steps", "3", "--encoder.depth", "2"]
    values = {"method": "mae", "config": str(file), "mae": {"size": 32}, "steps": 3, "encoder": {"depth": 2}}
    assert to_yaml(from_values(values)) == to_yaml(load(command))
    assert to_yaml(from_values({"method": "mae"})) == to_yaml(load(["--method", "mae"]))
    assert from_values({"data": "some.tar", "encoder": "vit_tiny"}).encoder.variant == "vit_tiny"
    with pytest.raises(SettingsError, match=r"did you mean 'optim\.lr'"):
        from_values({"optim": {"l": 1}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dino.loca_crops", "6"], "did you mean '--dino.local_crops'"),
        (["--encoder", "vit_smal"], "Did you mean 'vit_small'"),
        (
            ["--precision", "16-mixed"],
            "precision: Input should be 'auto', 'fp32', 'tf32', 'bf16' or 'fp16' (got '16-mixed'); did you mean "
            "'fp16'?",
        ),
        (["--seed", "1", "out=runs/x"], "unexpected argument 'out=runs/x'; did you mean '--output'?"),
        (["--seed", "1", "steps=3"], "unexpected argument 'steps=3'; did you mean '--steps 3'?"),
        (["--config", "imagenet_dino"], "neither a file nor a preset of this name; did you mean 'imagenet"),
        (["-b", "64"], "unexpected argument '-b'; did you mean '--batch_size'?"),
        (["--gpus", "8"], "--gpus belongs to the forecast of --gpu. The launcher sets the number of GPUs of a run."),
        (["--method", "dinosaur"], "unknown method 'dinosaur'; did you mean 'dino'?"),
        (["--dino.momentum", "3"], "dino.momentum: Input should be less than or equal to 1"),
        (["--steps"], "--steps expects a value"),
        (["--mae.mask_ratio", "0.5"], "mae.mask_ratio is a setting of the method mae, but this run trains with dino"),
        (["--method", "mae", "--dino.flip", "0"], "or choose --method dino"),
    ],
)
def test_bad_flags_are_refused_with_what_would_work(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load([*SHARDS, *arguments])
    assert message in str(error.value)


def test_a_preset_has_a_name() -> None:
    named = load([*SHARDS, "--config", "imagenet_mae_vit_base"])
    assert (named.method, named.encoder.variant) == ("mae", "vit_base")
    assert named.optim == load([*SHARDS, "--config", str(PRESETS / "imagenet_mae_vit_base.yaml")]).optim


def test_bad_names_in_a_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("dino: {local_crop: 5}\nsteps: -1\n")
    with pytest.raises(SettingsError) as error:
        load([*SHARDS, "--config", str(file)])
    assert "unknown setting 'dino.local_crop'; did you mean 'dino.local_crops'?" in str(error.value)
    assert "steps: Input should be greater than or equal to 1 (got -1)" in str(error.value)


def test_settings_of_another_method_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("method: mae\nmae: {mask_ratio: 0.5}\n")
    chosen = [*SHARDS, "--config", str(file)]
    assert load(chosen).method_config.mask_ratio == 0.5
    with pytest.raises(SettingsError, match=r"settings\.yaml: mae\.mask_ratio .*, but this run trains with dino"):
        load([*chosen, "--method", "dino"])
    with pytest.raises(SettingsError, match=r"^dino\.flip is a setting of the method dino"):
        from_values({"method": "mae", "dino": {"flip": 0.0}})
    file.write_text(to_yaml(resolve(load([*SHARDS, "--method", "mae"]), 1000)))  # as a run saves it
    assert load([*chosen, "--method", "dino"]).method == "dino"


def test_saved_settings_repeat_the_run(tmp_path: Path) -> None:
    config = resolve(load([*SHARDS, "--encoder", "vit_tiny", "--seed", "3", "--dino.momentum", "0.99"]), 100_000)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = resolve(
        load(["--config", str(tmp_path / "config.yaml")]), 5
    )  # the number of images changes nothing any more
    skipped = {"config": True, "source": {"commands"}}  # a file may not allow commands
    assert again.model_dump(exclude=skipped) == config.model_dump(exclude=skipped)
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert values["encoder"]["drop_path"] == 0.1  # DINO's, where the user gives none
    assert values["steps"] == 100 * 100_000 // 512


def test_without_data_the_preset_of_the_embedded_data_lies_below(tmp_path: Path) -> None:
    config = load(["--steps", "9"])
    assert config.encoder_settings["variant"] == "vit_micro"
    assert (config.steps, config.method_config.global_size) == (9, 16)
    other = load(["--encoder", "vit_tiny"])
    assert other.encoder_settings == {"variant": "vit_tiny"}
    assert load(SHARDS).method_config.global_size == 224


OWN_PRESETS = [file for file in presets() if "timm:" not in file.read_text()]


@pytest.mark.parametrize("file", OWN_PRESETS, ids=lambda path: path.stem)
def test_presets_are_valid(file: Path) -> None:
    teacher = ["--distill.teacher", small_teacher()] if "distill" in file.stem else []
    config = resolve(load([*SHARDS, "--config", str(file), *teacher]), 1_281_167)
    assert config.method == file.stem.split("_")[1]
    if file.stem.startswith("imagenet_") and config.method != "dinov3":  # DINOv3's defaults are those of its ViT-7B
        # the preset says in full what follows from the size of ImageNet anyway
        variant, size = config.encoder_settings["variant"], str(config.batch_size)
        flags = ["--method", config.method, "--encoder", variant, "--batch_size", size, "--precision", "bf16"]
        derived = resolve(load([*SHARDS, *flags, "--steps", str(config.steps)]), 1_281_167)
        ignored = {"config", "steps", "checkpoint", "checkpoint_every"}
        assert config.model_dump(exclude=ignored) == derived.model_dump(exclude=ignored)


def test_the_preset_of_dinov3_has_the_published_settings_for_imagenet() -> None:
    """Those of Meta's vitl_im1k_lin834.yaml over its defaults, where they differ from the ViT-7B and from DINOv2."""
    config = resolve(load([*SHARDS, "--config", str(PRESETS / "imagenet_dinov3_vit_large.yaml")]), 1_281_167)
    encoder = encoders.build(**config.encoder_settings | {"depth": 1, "dim": 64, "heads": 1})
    assert type(encoder.blocks[0].attn.qkv) is torch.nn.Linear  # no masked bias of keys
    assert encoder.blocks[0].norm1.eps == encoder.norm.eps == 1e-6
    assert encoder.reg_token is None
    assert encoder.settings["rope_rescale"] is None
    method = config.method_config
    assert (method.momentum, method.momentum_end, method.centering) == (0.992, 1.0, "sinkhorn")
    without_preset = resolve(load([*SHARDS, "--method", "dinov3"]), 1_281_167).method_config
    assert without_preset.centering == "sinkhorn"
    assert config.optim.reach_lr_in_warmup


def test_every_setting_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load([*SHARDS, "--help", "all"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    model = settings_model("vit_small")
    assert [name for name in settings_of(model) if f"--{name}" not in text] == []
    assert undescribed(model) == []


def test_the_short_help_shows_the_settings_of_a_new_user(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load([*SHARDS, "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 48
    names = "method encoder data output steps epochs batch_size precision seed evaluation.val evaluate_every config"
    assert all(f"\n  --{name} " in text for name in [*names.split(), "resume", "overwrite", "dry_run"])
    assert [variant for variant in encoders.VARIANTS if variant not in text] == []
    assert "--optim.lr" not in text
    assert "--help all" in text
    for topic, shown, hidden in (("dino", "--dino.flip", "--mae.flip"), ("encoder", "twins_svt_large", "--steps")):
        with pytest.raises(SystemExit):
            load([*SHARDS, "--help", topic])
        text = capsys.readouterr().out
        assert shown in text
        assert hidden not in text
    with pytest.raises(SettingsError, match="no topic 'dinno'; did you mean 'dino'"):
        load([*SHARDS, "--help", "dinno"])


def undescribed(model: type[BaseModel]) -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += [f"{name}.{inner}" for inner in undescribed(field.annotation)]
        elif not field.description:
            found.append(name)
    return found


def test_a_file_without_data_does_not_train_the_embedded_digits() -> None:
    with pytest.raises(SettingsError, match=r"names no data\. Give --data SHARDS"):
        load(["--config", str(PRESETS / "imagenet_dino_vit_small.yaml")])


@pytest.mark.parametrize("data", ["a.tar", ["a.tar", "b.tar"], {"a.tar": 1.0, "b.tar": 2.0}])
def test_data_of_older_files_and_of_the_section_are_the_same(data: object, tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(yaml.safe_dump({"data": data}))
    new.write_text(yaml.safe_dump({"data": {"shards": data, "channels": 3}}))
    configs = [resolve(load(["--config", str(file)]), 1000) for file in (old, new)]
    assert configs[0].data == configs[1].data
    assert configs[0].data.shards == data
    assert configs[0].data.preprocessing == IMAGENET
    assert load(["--config", str(old), "--data", "c.tar"]).data.shards == "c.tar"


def test_an_older_file_of_the_embedded_digits(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("data: null\nsteps: 3\n")
    config = load(["--config", str(file)])
    assert (config.data.shards, config.encoder.variant) == (None, "vit_micro")


def test_normalisation_of_the_images() -> None:
    flags = ["--encoder", "vit_micro", "--data.channels", "1"]
    config = load([*SHARDS, *flags])
    assert config.data.needs_statistics
    with pytest.raises(SettingsError, match=r"data.mean is auto, but the shards were not measured"):
        resolve(config, 1000)
    resolved = resolve(config, 1000, Preprocessing((0.4,), (0.2,)))
    assert resolved.data.preprocessing == Preprocessing((0.4,), (0.2,))
    assert resolved.encoder_settings["channels"] == 1
    saved = yaml.safe_load(to_yaml(resolved))["data"]
    assert {name: value for name, value in saved.items() if value not in (None, False)} == {
        "shards": "somewhere.tar", "channels": 1, "mean": [0.4], "std": [0.2], "pixel_type": "uint8"
    }  # fmt: skip
    given = resolve(load([*SHARDS, *flags, "--data.mean", "0.5", "--data.std", "0.3"]), 1000)
    assert given.data.preprocessing == Preprocessing((0.5,), (0.3,))
    measured = resolve(load([*SHARDS, "--data.mean", "auto"]), 1000, Preprocessing((0.1, 0.2, 0.3), (1.0, 1.0, 1.0)))
    assert measured.data.preprocessing == Preprocessing((0.1, 0.2, 0.3), IMAGENET.std)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.mean", "0.5,0.5"], "data.mean has 2 values, but data.channels is 3"),
        (["--data.std", "0.5,0.5,0"], "data.std must be positive"),
        (["--data.range", "0,1,2"], r"data.range has 3 values, .* LOW,HIGH of each channel: 6 values"),
        (["--data.range", "4,4"], "Each LOW must be less than its HIGH"),
        (["--encoder.channels", "1"], "encoder.channels is 1, but data.channels is 3"),
    ],
)
def test_normalisation_that_does_not_fit_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(load([*SHARDS, *arguments]), 1000)


def test_a_range_is_measured_or_given_and_repeated_from_the_file(tmp_path: Path) -> None:
    two = [*SHARDS, "--encoder", "vit_micro", "--data.channels", "2"]
    found = Preprocessing((0.4, 0.5), (0.2, 0.1), "uint16", (3.0, 4.0), (900.0, 800.0), "auto")
    config = resolve(load([*two, "--data.nodata", "auto"]), 1000, found)
    assert config.data.preprocessing == found
    assert config.data.range == (3, 900, 4, 800)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert resolve(load(["--config", str(file)]), 1000).data == config.data
    given = resolve(load([*two, "--data.pixel_type", "int16", "--data.range", "-5,7"]), 1000, found)
    assert given.data.preprocessing == Preprocessing((0.4, 0.5), (0.2, 0.1), "int16", (-5.0, -5.0), (7.0, 7.0))
    rgb = [*SHARDS, "--data.range", "0,200", "--data.mean", "0.5,0.5,0.5", "--data.std", "1,1,1"]
    assert resolve(load(rgb), 1000).data.preprocessing.high == (200, 200, 200)
    with pytest.raises(SettingsError, match="The range of the images was not measured"):
        resolve(load([*SHARDS, "--data.pixel_type", "uint16"]), 1000)


def test_a_run_of_an_older_version_reads_uint8(tmp_path: Path) -> None:
    saved = yaml.safe_load(to_yaml(resolve(load(SHARDS), 1000)))
    for name in ("pixel_type", "range", "nodata"):
        del saved["data"][name]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert load(["--resume", str(tmp_path)]).data.pixel_type == "uint8"
    assert load(SHARDS).data.pixel_type == "auto"


def test_weights_with_a_range_give_it_to_the_data(tmp_path: Path) -> None:
    encoder, file = encoders.build("vit_micro", channels=2), tmp_path / "a.safetensors"
    usual = Preprocessing((0.4, 0.5), (0.2, 0.1))
    ranged = Preprocessing((0.4, 0.5), (0.2, 0.1), "uint16", (3.0, 4.0), (900.0, 800.0), -1.0)
    for encoder.preprocessing in (usual, ranged):
        encoders.save(encoder, file)
        config = load([*SHARDS, "--init_from", str(file)])
        assert config.data.pixel_type == ("auto" if encoder.preprocessing == usual else "uint16")
        assert resolve(config, 1000).data.preprocessing == encoder.preprocessing


def test_a_method_may_fill_every_setting_of_the_optimizer() -> None:
    defaults = RESOLVED_OPTIM | {"eps": 1e-6, "clip_by": "module", "lr_scaling": "sqrt"}
    filled = OptimConfig(lr=2.0, clip_by="global").filled(defaults)
    assert (filled.lr, filled.eps, filled.clip_by, filled.lr_scaling) == (2.0, 1e-6, "global", "sqrt")
    assert filled.layer_decay == 1.0


def test_a_method_from_outside_needs_no_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "other", MAE)
    config = resolve(load(["--method", "other", "--other.mask_ratio", "0.5"]), 1000)
    assert (config.data.shards, config.encoder.variant, config.method) == (None, "vit_small", "other")


HEAVY = (
    "accelerate deepspeed fsspec.implementations matplotlib pandas pretrain.job scipy sklearn sympy tensorboard "
    "torch._dynamo torch._inductor torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.tensor "
    "torch.nn.attention.varlen torchvision transformers"
)


def test_help_imports_no_heavy_module() -> None:
    """`--help` is quick because it imports torch and the settings alone."""
    code = "import sys\nfrom pretrain.run import main\n"
    code += "try: main(['--help', 'all'])\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--optim.lr float" in done.stdout
    assert set(HEAVY.split()) & set(done.stderr.split()) == set()


def test_colour_settings_that_need_rgb_are_left_out_and_a_run_repeats(tmp_path):
    gray = ["--data.channels", "1", "--data.mean", "0.5", "--data.std", "0.2"]
    config = resolve(load([*SHARDS, "--method", "dino", *gray]), 100_000)
    assert (config.dino.saturation, config.dino.hue, config.dino.grayscale) == (0, 0, 0)
    assert config.dino.brightness > 0
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = resolve(load([*SHARDS, "--config", str(tmp_path / "config.yaml")]), 100_000)
    assert again.dino == config.dino
    assert (config.dino.colors, config.origins["dino.colors"]) == ("bands", "derived: data.channels")
    older = yaml.safe_load(to_yaml(config))
    older["dino"] = {name: older["dino"][name] for name in older["dino"].keys() - {"colors", "noise", "band_drop"}}
    older["dino"]["solarize_global2"] = 0.2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    again = resolve(load([*SHARDS, "--config", str(tmp_path / "config.yaml")]), 100_000).dino
    assert [getattr(again, name) for name in ("colors", "solarize_global2", "noise", "band_drop")] == ["rgb", 0.2, 0, 0]
    with pytest.raises(SettingsError, match=r"dino: The number of image channels is 1.* RGB images: hue\."):
        resolve(load([*SHARDS, "--method", "dino", *gray, "--dino.hue", "0.1"]), 100_000)


def test_a_run_of_an_earlier_version_keeps_the_decoder_of_mae(tmp_path):
    config = resolve(load([*SHARDS, "--method", "mae"]), 4809)
    assert config.mae.light_decoder
    older = yaml.safe_load(to_yaml(config))
    del older["mae"]["light_decoder"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    assert not resolve(load([*SHARDS, "--config", str(tmp_path / "config.yaml")]), 4809).mae.light_decoder


def test_pictures_show_bands_that_exist():
    words = [*SHARDS, "--data.channels", "5", "--data.mean", "0.5,0.5,0.5,0.5,0.5", "--data.std", "1,1,1,1,1"]
    assert resolve(load([*words, "--evaluation.bands", "5,3,2"]), 100_000).evaluation.bands == (5, 3, 2)
    with pytest.raises(SettingsError, match=r"evaluation\.bands names band 6, but data\.channels is 5"):
        resolve(load([*words, "--evaluation.bands", "6,3,2"]), 100_000)


def test_a_run_that_starts_from_published_weights_has_the_variants_settings(tmp_path: Path) -> None:
    for name in ("published.pth", "published.safetensors"):
        (tmp_path / name).write_bytes(b"")
        config = load([*SHARDS, "--init_from", str(tmp_path / name), "--encoder", "vit_base"])
        assert config.encoder_settings == {"variant": "vit_base"}
        assert resolve(config, 200_000).data.preprocessing == IMAGENET
    with pytest.raises(UserError, match=r"No encoder found"):
        load([*SHARDS, "--init_from", str(tmp_path)])
    (tmp_path / "published.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"init_from: .*does not describe an encoder"):
        load([*SHARDS, "--init_from", str(tmp_path / "published.safetensors")])


def test_a_section_with_nothing_below_it_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    for section in ("encoder", "optim", "dino", "source", "evaluation", "metrics"):
        file.write_text(f"data: some.tar\n{section}:\n")
        assert load(["--config", str(file)]).encoder.variant == "vit_small"
    file.write_text("data:\n")  # the embedded digits
    assert load(["--config", str(file)]).data.shards is None


@pytest.mark.parametrize(
    "shards",
    [
        "'pipe:{}'",
        "['pipe:{}']",
        "{{'pipe:{}': 1.0}}",
        "'{{pipe:{},pipe:true}}'",
        "'file://pipe:{}'",
        "'{{p..p}}ipe:{}'",
    ],
)
def test_a_settings_file_runs_no_command(tmp_path: Path, shards: str) -> None:
    ran, file = tmp_path / "ran", tmp_path / "x.yaml"
    command = f"touch {ran}; cat /nowhere"
    file.write_text(f"data: {shards.format(command)}\nsource: {{retries: 0}}\n")
    flag = ["--config", str(file)]
    for more in ([], ["--dry_run"], ["--dry_run", "--source.commands"]):
        config = load([*flag, *more])
        assert config.source.commands is False
        with pytest.raises(ShardError, match=r"(?s)not run|no file matches"):
            open_sources(config.data.shards, source=config.access)
    assert not ran.exists()
    config = load([*flag, "--source.commands"])
    with pytest.raises(ShardError):  # the command ends with an error
        open_sources(config.data.shards, source=config.access)
    assert ran.exists() or "file://" in shards or ".." in shards
    assert load(["--data", "pipe:true"]).source.commands is None
    assert load([*flag, "--data", "other.tar"]).source.commands is None
    file.write_text("data: a.tar\nevaluation: {val: 'pipe:true'}\n")
    assert load([*flag, "--data", "other.tar"]).source.commands is False
    file.write_text("data: a.tar\nsource: {commands: true}\n")
    with pytest.raises(SettingsError, match=r"A settings file cannot set source\.commands"):
        load(flag)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / name)
    for words in (
        ["--output", path],
        ["--resume", path],
        ["--config", path],
        ["--data", path],
        ["--init_from", path],
        ["--data", "some.tar", "--evaluation.val", path],
    ):
        assert main([*words, *([] if "--resume" in words or "--output" in words else ["--dry_run"])]) == 2, words
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    ["--epochs inf", "--stream.window_gb inf", "--optim.lr inf", "--optim.betas nan,2", "--optim.betas 1,1",
     "--optim.betas=-0.1,0.9", "--encoder.drop_path nan", "--source.cache_gb inf", '--data {"a.tar":.inf}'],
)  # fmt: skip
def test_numbers_out_of_range_are_named(flag: str) -> None:
    with pytest.raises(SettingsError, match=r"finite number|less than 1|greater than or equal to 0"):
        load(["--method", "dino", *flag.split()])


def test_a_resumed_run_finds_its_relative_shards_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, run = tmp_path / "start", tmp_path / "a run"
    for folder in (start / "photos", start / "shards", run):
        folder.mkdir(parents=True)
    for name in ("shards/a-0.tar", "shards/a-1.tar"):
        (start / name).touch()
    shards = {"photos": 1.0, "shards/a-{0..1}.tar": 2.0, "https://x/y.tar": 1.0, "lost": 1.0}
    settings = {"method": "mae", "steps": 7, "data": {"shards": shards}, "evaluation": {"val": ["shards/*.tar"]}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "machine.jsonl").write_text(json.dumps({"folder": str(start)}) + "\n")
    monkeypatch.chdir(tmp_path)
    found = from_values({"resume": True, "output": "a run", "steps": None, "batch_size": None})
    there = f"{start}/"
    assert found.data.shards == {
        f"{there}photos": 1.0, f"{there}shards/a-{{0..1}}.tar": 2.0, "https://x/y.tar": 1.0, "lost": 1.0,
    }  # fmt: skip
    assert found.evaluation.val == [f"{there}shards/*.tar"]
    assert found.steps == 7  # None is not a choice
    (tmp_path / "own.yaml").write_text("optim: {lr: 0.25}\n")  # what a file does not give stays
    more = from_values({"resume": True, "output": "a run", "config": "own.yaml"})
    assert (more.steps, more.optim.lr, more.data.shards) == (7, 0.25, found.data.shards)
    assert (more.origins["steps"], more.origins["optim.lr"]) == ("the run a run", "file own.yaml")
    (tmp_path / "own.yaml").write_text("epochs: 2\n")
    again = from_values({"resume": True, "output": "a run", "config": "own.yaml"})
    assert (again.steps, again.epochs) == (None, 2)
    monkeypatch.chdir(start)  # there, the paths stay as they were given
    assert from_values({"resume": True, "output": str(run)}).data.shards == shards
    assert found.method == "mae"

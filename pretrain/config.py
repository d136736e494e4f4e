"""Settings of a pretraining run: defaults, then a file, then flags; and what follows from them and the data."""

import argparse
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import Field, create_model

import encoders
from data.loader import LoaderConfig, StreamConfig
from data.shards import SourceConfig
from pretrain.methods import METHODS
from pretrain.monitoring.collapse import HealthConfig
from pretrain.monitoring.sinks import MetricsConfig
from pretrain.optim.adamw import OptimConfig
from runtime.settings import Section, Settings, SettingsError, flags, merge, read_yaml, suggestion, validate

PRESETS = Path(__file__).parent.parent / "configs"


class CheckpointConfig(Section):
    """Which checkpoints stay."""

    keep: int = Field(default=2, ge=1)
    """newest checkpoints that stay"""
    keep_every: int | None = Field(default=None, ge=1)
    """checkpoints at multiples of this many steps stay too"""
    background: bool = False
    """write while the training goes on, from a copy in the host's memory"""


class EvaluationConfig(Section):
    """The k-NN inside pretraining."""

    train: str | list[str] | None = None
    """labelled SHARDS of the bank; without them `data`"""
    val: str | list[str] | None = None
    """labelled SHARDS that are scored; without them there is no evaluation"""
    k: int = Field(default=20, ge=1)
    """neighbours"""
    batch_size: int = Field(default=256, ge=1)
    """images a process encodes at once"""
    pictures: int = Field(default=8, ge=0)
    """held-out images shown as attention and PCA maps"""


class RunConfig(Settings):
    """Pretrain a vision encoder on shards of images. Settings: defaults, then --config FILE.yaml, then flags."""

    method: Literal[tuple(METHODS)] = "dino"  # pyright: ignore[reportInvalidTypeForm]
    """pretraining method"""
    config: str | None = None
    """YAML file of settings; flags win over it"""
    data: str | list[str] | dict[str, float] | None = None
    """SHARDS: a path, glob or brace range of .tar or .tar.gz, also as a URL, an index.json, or pipe:COMMAND; a list of
    them, or a mapping of them to weights; without it, the embedded digits"""
    output: str | None = None
    """run folder; without it, a fresh one under runs/"""
    steps: int | None = Field(default=None, ge=1)
    """optimizer steps; without it, 100 epochs"""
    batch_size: int = Field(default=512, ge=1)
    """images of one optimizer step over all processes"""
    accumulate: int = Field(default=1, ge=1)
    """forward passes that share one optimizer step"""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """everything random follows from it"""
    workers: int | None = Field(default=None, ge=0)
    """loader processes of each training process; without it, one a free core, at most 8"""
    resume: bool = False
    """continue the newest whole checkpoint of --output; without one, begin"""
    dry_run: bool = False
    """print the resolved settings, steps, memory and shards per worker, and stop"""
    init_from: str | None = None
    """run folder or file of weights, ours or published, that the encoder starts from"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """arithmetic of the forward pass; auto: bf16 where a GPU has it, else fp32"""
    compile: bool = False
    """torch.compile each block of the encoder"""
    record_every: int = Field(default=50, ge=1)
    """steps between two lines of metrics.jsonl"""
    checkpoint_every: int = Field(default=1000, ge=1)
    """steps between two checkpoints; the last step always has one"""
    evaluate_every: int | None = Field(default=None, ge=1)
    """steps between two k-NN evaluations; without it, before and after only"""
    optim: OptimConfig = OptimConfig()
    stream: StreamConfig = StreamConfig()
    source: SourceConfig = SourceConfig()
    loader: LoaderConfig = LoaderConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    health: HealthConfig = HealthConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def encoder_settings(self) -> dict[str, Any]:
        """The encoder's settings that the user or a preset gave, `variant` among them."""
        return cast(Any, self).encoder.model_dump(exclude_unset=True)

    @property
    def method_config(self) -> Any:
        """The section of the chosen method."""
        return getattr(self, self.method)


def settings_model(variant: str) -> type[RunConfig]:
    """`RunConfig` with a section for the variant's encoder, whose settings are the constructor's arguments, and one for
    each method.

    Raises:
        SettingsError: no such variant.
    """
    if variant not in encoders.VARIANTS:
        known = list(encoders.VARIANTS)
        raise SettingsError(f"unknown encoder '{variant}'{suggestion(variant, known)} (known: {', '.join(known)})")
    family = encoders.family(variant)
    described = dict(re.findall(r"^\s*(\w+): (.+?)\.?$", inspect.getdoc(family) or "", re.MULTILINE))
    chosen = encoders.VARIANTS[variant]
    fields: dict[str, Any] = {
        "variant": (str, Field(variant, description="name of the variant; short form: --encoder NAME"))
    }
    for name, parameter in inspect.signature(family).parameters.items():
        default = chosen.get(name, parameter.default)
        fields[name] = (parameter.annotation, Field(default, description=described.get(name)))
    encoder = create_model("Encoder", __base__=Section, __doc__=f"Settings of {variant}.", **fields)
    sections: dict[str, Any] = {name: (method.Config, method.Config()) for name, method in METHODS.items()}
    model = create_model(
        "RunConfig", __base__=RunConfig, __doc__=RunConfig.__doc__, encoder=(encoder, encoder()), **sections
    )
    return cast(type[RunConfig], model)


def load(argv: Sequence[str]) -> RunConfig:
    """Settings from a command line and the files it names.

    Without `--data` the preset of the embedded data lies below the file; `--resume` reads the run's own config.yaml
    unless a file is given.

    Raises:
        SettingsError: an unknown name or a value out of range.
    """
    # the encoder's section depends on the variant, so names of files and of the variant are looked up first
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--config", "--data", "--output", "--method"):
        peek.add_argument(name)
    peek.add_argument("--resume", action="store_true")
    first, _ = peek.parse_known_args(argv)
    short = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    short.add_argument("--encoder")
    encoder, rest = short.parse_known_args(argv)
    if encoder.encoder:
        rest += ["--encoder.variant", encoder.encoder]
    file = {}
    if first.config:
        file = read_yaml(first.config)
    elif first.resume and first.output and (Path(first.output) / "config.yaml").exists():
        file = read_yaml(Path(first.output) / "config.yaml")
    if isinstance(file.get("encoder"), str):
        file["encoder"] = {"variant": file["encoder"]}
    method = first.method or file.get("method", "dino")
    if method not in METHODS:
        raise SettingsError(
            f"unknown method '{method}'{suggestion(method, list(METHODS))} (known: {', '.join(METHODS)})"
        )
    if first.config and not first.data and "data" not in file:  # a run's own config.yaml says `data: null` itself
        raise SettingsError(f"{first.config} names no data: give --data SHARDS")
    preset = {}
    if not (first.data or file.get("data")):
        preset = read_yaml(PRESETS / f"digits_{method}.yaml")
    preset_variant = preset.get("encoder", {}).get("variant")
    variant = encoder.encoder or file.get("encoder", {}).get("variant") or preset_variant or "vit_small"
    saved = file.get("encoder", {}).get("variant")
    if first.resume and not first.config and saved and variant != saved:
        raise SettingsError(f"this run trains {saved}, not {variant}: leave --encoder away, or choose another --output")
    if variant != preset_variant:  # the preset's details belong to its own variant
        preset.pop("encoder", None)
    model = settings_model(variant)
    return validate(model, merge(preset, file, {"encoder": {"variant": variant}}, flags(model, rest, "run.py")))


def resolve(config: RunConfig, images: int) -> RunConfig:
    """Fill in what follows from the number of images: steps, the optimizer's and the method's settings, the encoder's.

    Raises:
        SettingsError: settings that do not fit each other.
    """
    steps = config.steps or max(100 * images // config.batch_size, 1)
    method = METHODS[config.method]
    method_config, optim = method.resolve(config.method_config, config.optim, images, config.batch_size, steps)
    warmup = optim.warmup_steps or 0
    if warmup >= steps:
        raise SettingsError(f"optim.warmup_steps is {warmup}, which must be less than the run's {steps} steps")
    chosen = encoders.family(config.encoder_settings["variant"])
    given = method.encoder_defaults(method_config, chosen) | config.encoder_settings
    section = type(cast(Any, config).encoder)
    values = {"steps": steps, "optim": optim, config.method: method_config, "encoder": section(**given)}
    return config.model_copy(update=values)


def to_yaml(config: RunConfig) -> str:
    """The settings as `config.yaml` holds them: `--config` with that file repeats the run."""
    values = config.model_dump(mode="json", exclude={"config", "resume", "dry_run", "output"})
    others = [name for name in METHODS if name != config.method]
    return yaml.safe_dump({k: v for k, v in values.items() if k not in others}, sort_keys=False)

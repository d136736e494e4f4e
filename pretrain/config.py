"""Settings of a pretraining run.

A settings file overrides the defaults, and command-line flags override the file. Settings that are still missing are
derived from other settings and from the data.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, Literal, Self, Union, cast, get_args

import yaml
from pydantic import Field, create_model, field_validator, model_validator

from tessera import encoders
from tessera.data.batch_sampler import batch_ranges
from tessera.data.loader import LoaderConfig, StreamConfig
from tessera.data.pages import Pages
from tessera.data.pictures import Bands
from tessera.data.shards import Access, SourceConfig
from tessera.data.shards.samples import SampleKeys
from tessera.data.user_code import Augment, load_function, load_stages
from tessera.encoders.base import IMAGENET, PixelType, Preprocessing
from tessera.encoders.registry import BACKBONES
from tessera.pretrain.methods import METHODS
from tessera.pretrain.monitoring.collapse import HealthConfig
from tessera.pretrain.monitoring.profile import profiled_steps
from tessera.pretrain.monitoring.sinks import MetricsConfig
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.settings import Derived, Section, Settings, SettingsError, derived

ONLY_FOR_THIS_START = {"config", "epochs", "resume", "overwrite", "dry_run", "gpu", "gpus", "output", "profile"}
"""Settings that config.yaml does not repeat."""
RECOMPUTE, AUTO = "checkpoint_activations", "auto"
"""Setting of encoders that recompute activations, and its default: the memory of the device decides."""


class DataConfig(Section, frozen=True):
    """Training images and their normalisation."""

    short_form = "shards"

    shards: str | list[str] | dict[str, float | dict[int, float]] | None = None
    """training SHARDS: a folder of images or of shards, a CSV of images, a path or URL of .tar or .tar.gz files (glob
    and brace range allowed), an index.json, or pipe:COMMAND; or a list of SHARDS, or a mapping from SHARDS to sampling
    weights, where a weight may be a mapping from a step to the weight from this step on; default: the embedded
    digits"""
    exclude: str | None = None
    """file with the names of images to leave out, SHARD/KEY as `tessera embed` writes them: a .csv or .parquet with a
    column key, or a .txt; PATH.parquet:FLAG,FLAG for the rows in which one of these columns is true"""
    image: str | None = None
    """name of the image in a sample: a file name extension in tars (left.jpg for KEY.left.jpg), a column, or a key of a
    data set's items; default: the usual names, such as jpg or image"""
    label: str | None = None
    """name of the label in a sample, or NAME:FIELD for a field of a JSON member (json:category.id); default: cls or
    label"""
    pages: Pages | None = None
    """images of files that hold several, such as stacks of TIFF pages: the first one of each file, each of them as a
    sample of its own, or the maximum of all, pixel by pixel; default: such files are refused"""
    stages: str | list[str] | None = None
    """stages of your own, as module:function, in webdataset's convention; they change each sample before its crops are
    cut, in training and evaluation; a settings file cannot set this"""
    augment: str | list[str] | None = None
    """augmentation of your own, as module:function: a torchvision v2 transform, or a function of a crop (C, S, S) of
    the images' type and optionally a torch.Generator; one for all views, or one per view; a settings file cannot set
    this"""
    augment_replaces: bool = False
    """data.augment makes the crops from whole images, in place of the method's crops, mirroring and colours"""
    channels: int = Field(default=3, ge=1)
    """number of channels of an image"""
    fewer_channels: bool = False
    """images may have fewer channels, which needs an encoder that takes them, such as each:vit_small; gray images have
    one channel"""
    mean: Literal["auto"] | tuple[float, ...] | None = None
    """mean of each channel, for pixel values from 0 to 1; auto: measured on the shards; default: the values of ImageNet
    for 3 channels, auto for any other number of channels"""
    std: Literal["auto"] | tuple[float, ...] | None = None
    """standard deviation of each channel, for pixel values from 0 to 1; auto and the default work as for data.mean"""
    pixel_type: Literal["auto", PixelType] = "auto"
    """type of the values of all images; auto: the type of a sample of the images"""
    range: Literal["auto"] | tuple[float, ...] | None = None
    """values that become 0 and 1: LOW,HIGH for all channels, or LOW,HIGH of each channel; values outside are clamped;
    auto: the quantiles 0.1 % and 99.9 % of each channel over a sample of the images; default: 0,255 for uint8, auto for
    any other type"""
    nodata: float | Literal["auto"] | None = None
    """value of pixels without data, which get the mean of their channel; auto: the value that each file names; NaN and
    infinite values never hold data"""

    @property
    def needs_statistics(self) -> bool:
        """True if `mean` or `std` has to be measured on the shards, whatever the type of the images is."""
        return any(given == "auto" or (given is None and self.channels != 3) for given in (self.mean, self.std))

    @property
    def given_range(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """`low` and `high` of each channel; None if `range` is not numbers.

        Raises:
            SettingsError: the number of values is wrong, or a low is not less than its high.
        """
        if not isinstance(self.range, tuple):
            return None
        values = self.range * self.channels if len(self.range) == 2 else self.range
        if len(values) != 2 * self.channels:
            raise SettingsError(
                f"data.range has {len(self.range)} values, but data.channels is {self.channels}. Give LOW,HIGH for all "
                f"channels, or LOW,HIGH of each channel: {2 * self.channels} values."
            )
        low, high = values[::2], values[1::2]
        if not all(a < b for a, b in zip(low, high, strict=True)):
            raise SettingsError(f"data.range is {list(self.range)}. Each LOW must be less than its HIGH.")
        return low, high

    def with_statistics(self, measured: Preprocessing | None = None) -> "DataConfig":
        """Return a copy in which `pixel_type` is a type, `mean` and `std` are numbers, and `range` is numbers or None.

        Args:
            measured: Type, range and statistics of the shards. Without them, the images are uint8. Required if
                `needs_statistics` is true, or if the range is to be measured.

        Raises:
            SettingsError: the number of values is wrong, `std` is not positive, or `measured` is needed but None.
        """
        kind = self.pixel_type if self.pixel_type != "auto" else (measured.pixel_type if measured else "uint8")
        values: dict[str, Any] = {"pixel_type": kind}
        given_range = self.given_range
        if given_range is None and (self.range == "auto" or kind != "uint8"):
            if measured is None or measured.low is None or measured.high is None:
                raise SettingsError("The range of the images was not measured. Set data.range to LOW,HIGH.")
            values["range"] = tuple(chain.from_iterable(zip(measured.low, measured.high, strict=True)))
        ranged = given_range is not None or "range" in values
        for name in ("mean", "std"):
            given = getattr(self, name)
            fallback = measured if given == "auto" or self.channels != 3 or ranged else IMAGENET
            if given in (None, "auto"):
                if fallback is None:
                    raise SettingsError(
                        f"data.{name} is auto, but the shards were not measured. Set data.{name} to numbers."
                    )
                given = getattr(fallback, name)
            if len(given) != self.channels:
                raise SettingsError(
                    f"data.{name} has {len(given)} values, but data.channels is {self.channels}. "
                    "Give one value per channel."
                )
            values[name] = given
        if min(values["std"]) <= 0:
            raise SettingsError(f"data.std must be positive, not {list(values['std'])}. Change the values.")
        return self.model_copy(update=values)

    @property
    def preprocessing(self) -> Preprocessing:
        """Type, range and normalisation of the images. All must be known; see `with_statistics`."""
        assert isinstance(self.mean, tuple)
        assert isinstance(self.std, tuple)
        assert self.pixel_type != "auto"
        low, high = self.given_range or (None, None)
        return Preprocessing(self.mean, self.std, self.pixel_type, low, high, self.nodata, self.fewer_channels)


class CheckpointConfig(Section):
    """Settings of checkpoints."""

    keep: int = Field(default=2, ge=1)
    """number of newest checkpoints to keep"""
    keep_every: int | None = Field(default=None, ge=1)
    """in addition, keep every checkpoint whose step is a multiple of this number"""
    background: bool = False
    """copy each checkpoint to host memory, and write the copy to disk while training continues"""


class EvaluationConfig(Section):
    """Settings of the evaluation and the pictures during training."""

    train: str | list[str] | None = None
    """labelled SHARDS of the k-NN bank, on which the linear probe is fitted too; default: the training shards"""
    val: str | list[str] | None = None
    """labelled SHARDS to classify with k-NN and a linear probe, or with the classifier of --method finetune; default:
    a score without labels (view_images)"""
    maps_train: str | list[str] | None = None
    """SHARDS with segmentation maps, whose patch tokens are the bank of a k-NN segmentation; default: none"""
    maps_val: str | list[str] | None = None
    """SHARDS with segmentation maps to segment"""
    maps_ignore: tuple[int, ...] = ()
    """map values whose pixels are ignored, besides 255"""
    view_images: int = Field(default=2048, ge=0)
    """number of training images for the score without labels, if there is no evaluation.val; 0: no score"""
    k: int = Field(default=20, ge=1)
    """number of nearest neighbours (k)"""
    linear_iterations: int = Field(default=100, ge=0)
    """largest number of L-BFGS iterations of the linear probe; 0: no linear probe"""
    batch_size: int = Field(default=256, ge=1)
    """largest number of images per forward pass of the evaluation, in each process; fewer if the encoder needs much
    memory for them"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """precision of the forward passes of the evaluation; auto: bf16 on a GPU if the run is in bf16, else fp32"""
    pictures: int = Field(default=8, ge=0)
    """number of images in each picture: crops, predictions, attention maps and PCA maps; 0: no pictures"""
    bands: Bands | None = None
    """numbers of the bands that pictures show, counted from 1: three as red, green and blue, or one as gray; default:
    the first three"""


class EncoderConfig(Section):
    """Encoder settings. A run uses a subclass whose fields are the arguments of the encoder's constructor."""

    short_form = "variant"
    started: ClassVar[dict[str, Any]] = {}
    """Settings of the encoder that `init_from` names. They take precedence over the settings of the variant, but not
    over the defaults of the method or the given settings."""

    variant: str = "vit_small"
    """name of the encoder variant, such as vit_small"""


class RunConfig(Settings, frozen=True):
    """Pretrain a vision encoder on shards of images. --config FILE.yaml overrides defaults, and flags override both.
    Many defaults depend on the data and the encoder. --dry_run prints the values that a run would use."""

    first_settings = (
        *("method", "encoder.variant", "data.shards", "labels", "output", "steps", "epochs", "batch_size"),
        *("precision", "seed", "evaluation.val", "evaluate_every", "config", "resume", "overwrite", "dry_run", "gpu"),
    )
    alternatives = ("steps", "epochs")

    method: str = "dino"
    """training method: a pretraining method, or finetune"""
    config: str | None = None
    """YAML file of settings, or name of a preset, such as imagenet_dino_vit_small; flags override its values"""
    data: DataConfig = DataConfig()
    labels: str | None = None
    """CSV with the labels of images in folders: columns path and label, paths relative to it"""
    output: str | None = None
    """run folder; default: a new folder under runs/"""
    steps: Derived[int] = derived(ge=1)
    """length of the run in optimizer steps; default: 100 epochs"""
    epochs: float | None = Field(default=None, gt=0)
    """length of the run in epochs, instead of `steps`"""
    batch_size: Derived[int] = derived(ge=1)
    """number of images per optimizer step, summed over all processes; default: 512, or less for fewer than 25,000
    images"""
    accumulate: int = Field(default=1, ge=1)
    """number of forward passes per optimizer step in each process (gradient accumulation)"""
    skip_batches: str | None = None
    """batches that no step uses, such as 1200-1210,1300; batch N is the one that step N uses if no batch is skipped"""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """seed of all random generators"""
    workers: int | None = Field(default=None, ge=0)
    """number of loader workers per training process; default: one per free core, at most 16"""
    resume: bool = False
    """resume from the newest complete checkpoint of --output; start from the beginning if there is none; --resume RUN
    is short for --resume --output RUN"""
    overwrite: bool = False
    """delete the run in --output, if there is one, before the new run starts"""
    dry_run: bool | Literal["full"] = False
    """print the changed settings (full: all), memory and speed of the run, without a step"""
    gpu: Literal["a100", "h100", "h200"] | None = None
    """with dry_run: GPU for which to forecast the speed; default: the devices of this machine"""
    gpus: int = Field(default=1, ge=1)
    """with gpu: number of GPUs of all nodes, over which batch_size is divided (`tessera slurm submit --gpus` counts the
    GPUs of one node)"""
    init_from: str | None = None
    """initial weights of the encoder: a run folder, a weight file of this project, `timm:NAME` for a pretrained model
    of timm, or a published weight file; a source other than a published weight file also sets the defaults of encoder,
    data.channels, data.mean and data.std, and if it has a range, those of data.pixel_type, data.range and data.nodata;
    a run of dinov2 or dinov3 also loads student, teacher and heads from a run folder of either method"""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """precision of the forward pass; tf32: fp32 with products in TF32; auto: the launcher's, if it sets one, else bf16
    where it is faster (on a GPU that supports it, and on a CPU with bf16 instructions for encoders of 128 channels or
    more), else fp32"""
    compile: bool = False
    """apply torch.compile to each block of the encoder and to the colour changes"""
    deterministic: bool = False
    """use only deterministic algorithms of PyTorch, so that a resumed run is bit-equal on GPUs, too; slower. An
    operation without such an algorithm ends the run with an error that names it"""
    profile: str | None = None
    """steps to profile, such as 20:25; the main process writes a trace, a table of the costliest operations and, on a
    GPU, a snapshot of the memory to OUTPUT/profile"""
    collective_timeout: float | None = Field(default=None, gt=0)
    """minutes for which a process waits for the others in a collective operation, before the run ends; default: 10 on
    GPUs (NCCL) and 30 on CPUs (gloo)"""
    record_every: Derived[int] = derived(ge=1)
    """number of steps between two records of metrics; default: 50, or a tenth of a run of less than 500 steps"""
    checkpoint_every: int = Field(default=1000, ge=1)
    """number of steps between two checkpoints; the last step always gets a checkpoint"""
    evaluate_every: int | None = Field(default=None, ge=1)
    """number of steps between two evaluations; default: evaluate only before the first and after the last step, and for
    --method finetune also after each epoch"""
    encoder: EncoderConfig = EncoderConfig()
    optim: OptimConfig = OptimConfig()
    stream: StreamConfig = StreamConfig()
    source: SourceConfig = SourceConfig()
    loader: LoaderConfig = LoaderConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    health: HealthConfig = HealthConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _check_gpu(self) -> Self:
        if self.gpu is not None and not self.dry_run:
            raise ValueError("--gpu chooses the GPU of a forecast. Add --dry_run, or remove --gpu.")
        if self.gpus > 1 and self.gpu is None:
            raise ValueError("--gpus belongs to the forecast of --gpu. The launcher sets the number of GPUs of a run.")
        return self

    @field_validator("skip_batches")
    @classmethod
    def _check_skip_batches(cls, value: str | None) -> str | None:
        batch_ranges(value)
        return value

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, value: str | None) -> str | None:
        profiled_steps(value)
        return value

    @property
    def encoder_settings(self) -> dict[str, Any]:
        """Encoder variant, and the encoder settings that the user, a preset or the method has set."""
        given = self.encoder.model_dump(exclude_unset=True)
        return {"variant": self.encoder.variant} | {n: v for n, v in given.items() if (n, v) != (RECOMPUTE, AUTO)}

    @property
    def access(self) -> Access:
        """Access to shards. Modules of the user's stages are imported.

        Raises:
            SettingsError: a stage cannot be used.
        """
        stages, only = load_stages(self.data.stages), METHODS[self.method].supervised
        return Access(
            self.source, SampleKeys(self.data.image, self.data.label, self.labels, only, self.data.pages), stages
        )

    @property
    def labelled_access(self) -> Access:
        """Access to the shards of the evaluation. Images that `labels` does not name are left out."""
        access = self.access
        return replace(access, keys=access.keys._replace(labelled_only=True))

    @property
    def own_augment(self) -> Augment | None:
        """The augmentation of the user. Its modules are imported.

        Raises:
            SettingsError: a function cannot be imported.
        """
        names = [self.data.augment] if isinstance(self.data.augment, str) else self.data.augment
        if not names:
            return None
        return Augment([load_function(name, "data.augment") for name in names], self.seed, self.data.augment_replaces)

    @property
    def method_config(self) -> Section:
        """Settings of the chosen method."""
        return getattr(self, self.method)


def settings_model(variant: str, started: Mapping[str, Any] | None = None) -> type[RunConfig]:
    """Return a subclass of `RunConfig` with a section for the encoder of `variant` and a section for each method.

    Args:
        variant: name of the encoder variant.
        started: settings of the encoder that `init_from` names. They become defaults.

    Raises:
        SettingsError: the variant is unknown.
    """
    try:
        family = encoders.family(variant)
    except encoders.EncoderError as error:
        raise SettingsError(f"encoder: {error}") from error
    described = dict(re.findall(r"^\s*(\w+): (.+?)\.?$", inspect.getdoc(family) or "", re.MULTILINE))
    started = dict(started or {})
    chosen = encoders.entry(variant) | started
    names = ", ".join(encoders.VARIANTS.names())
    help_text = f"encoder variant: {names}" + "".join(f", or {prefix}:NAME" for prefix in BACKBONES.names())
    fields: dict[str, Any] = {"variant": (str, Field(variant, description=help_text))}
    for name, parameter in inspect.signature(family).parameters.items():
        default, annotation, text = chosen.get(name, parameter.default), parameter.annotation, described.get(name)
        if name == RECOMPUTE and recomputes(variant, True):
            default, annotation = default or AUTO, Union[annotation, Literal["auto"]]  # noqa: UP007 - may be a string
            text = f"{text}; auto: as much as the memory needs"
        fields[name] = (annotation, Field(default, description=text))
    encoder = create_model("Encoder", __base__=EncoderConfig, __doc__=f"Settings of {variant}.", **fields)
    encoder.started = started
    sections: dict[str, Any] = {name: (method.Config, method.Config()) for name, method in METHODS.working().items()}
    if taken := sections.keys() & RunConfig.model_fields.keys():
        raise SettingsError(f"A method is named {min(taken)}, but this is the name of a setting. Rename the method.")
    method_help = RunConfig.model_fields["method"].description
    sections["method"] = (Literal[tuple(METHODS.names())], Field("dino", description=method_help))
    model = create_model(
        "RunConfig", __base__=RunConfig, __doc__=RunConfig.__doc__, encoder=(encoder, encoder()), **sections
    )
    return cast(type[RunConfig], model)


def recomputes(variant: str, value: Any) -> bool:
    """Return True if an encoder accepts this value of `checkpoint_activations`."""
    known = inspect.signature(encoders.family(variant)).parameters
    annotation = known[RECOMPUTE].annotation if RECOMPUTE in known else None
    kinds = [annotation, *get_args(annotation)]
    return bool in kinds if isinstance(value, bool) else any(value in get_args(kind) for kind in kinds)


def with_older_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved run. Settings that its version did not have get the values that it used."""
    values = dict(saved)
    older: dict[str, dict[str, Any]] = {"optim": {"encoder_lr_factor": 1.0}}
    older["data"] = {"pixel_type": "uint8", "fewer_channels": False}
    name = values.get("method")
    section = values.get(name) if isinstance(name, str) else None
    if isinstance(section, Mapping) and "grayscale" in section:  # a method with the settings of `data.colors`
        older[str(name)] = {"colors": "rgb", "noise": 0.0, "band_drop": 0.0}
    if isinstance(section, Mapping) and "decoder_depth" in section:  # MAE
        older[str(name)] = {"light_decoder": False}
    for name, defaults in older.items():
        if isinstance(values.get(name), Mapping):
            values[name] = defaults | dict(values[name])
    return values


def to_yaml(config: RunConfig) -> str:
    """Return the settings as YAML text for config.yaml. `--config` with this file repeats the run."""
    values = config.model_dump(mode="json", exclude=ONLY_FOR_THIS_START)
    # A settings file must not allow the commands of pipe: shards. Only the flag --source.commands can.
    del values["source"]["commands"]
    others = [name for name in METHODS.names() if name != config.method]
    return yaml.safe_dump({k: v for k, v in values.items() if k not in others}, sort_keys=False)

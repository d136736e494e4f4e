"""Distillation of a frozen encoder: a student learns to predict the teacher's features of the same images.

The teacher is any encoder of this project, with weights of a run or with published weights. Pooled features and token
features have separate projections and losses, as in AM-RADIO (2312.06709) with one teacher. Several students may learn
from the same teacher features in one run, as in DINOv3 (2508.10104).

Shape letters: B images per process; N tokens of all images on the student's grid; D width of the student, E of the
teacher; h and w rows and columns of tokens of an image.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.encoders.base import Encoder, Features, Preprocessing
from tessera.encoders.errors import EncoderError
from tessera.encoders.randomness import restarted_draws
from tessera.encoders.saving import fitting
from tessera.encoders.unused import freeze_unused
from tessera.pretrain.methods.method import Method, RunSize, full_precision
from tessera.pretrain.monitoring.collapse import column_variance, effective_rank
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.collectives import average
from tessera.runtime.settings import SettingsError

Match = Literal["cosine", "smooth_l1", "mse", "mixed"]


class DistillConfig(RandomCropConfig):
    """Settings of distillation from a frozen encoder."""

    teacher: str | None = None
    """encoder to learn from: a run folder, a checkpoint in it, a weight file of this project, a published weight file,
    or `timm:NAME` for a pretrained model of timm"""
    teacher_hash: str | None = None
    """SHA-256 of the teacher's weights and settings; the run stops if the teacher's hash differs; default: computed
    from the teacher"""
    teacher_size: int | None = Field(default=None, ge=1)
    """side in pixels to which a crop is resized for the teacher; default: `size`"""
    students: str | list[str] | dict[str, dict[str, Any]] | None = None
    """variants of additional student encoders, or a mapping from variants to encoder settings; default: none"""
    pooled_weight: float = Field(default=1.0, ge=0)
    """weight of the loss of the pooled features; 0: the pooled features are not matched"""
    token_weight: float = Field(default=1.0, ge=0)
    """weight of the loss of the tokens; 0: the tokens are not matched"""
    pooled_loss: Match = "cosine"
    """loss of the pooled features: cosine (1 - cosine similarity), smooth_l1, mse (mean squared error), or mixed
    (0.9 * cosine + 0.1 * smooth_l1); the default is that of AM-RADIO"""
    token_loss: Match = "mixed"
    """loss of the tokens, with the same choices; the default is that of AM-RADIO"""
    projection: Literal["linear", "mlp"] = "mlp"
    """projection from the student's width to the teacher's: linear, or mlp (two linear layers with layer norm and GELU
    between them, as in AM-RADIO)"""
    hidden_dim: int | None = Field(default=None, ge=1)
    """width of the hidden layer of the projection mlp; default: the teacher's width"""


def resolve(config: DistillConfig, optim: OptimConfig, size: RunSize) -> tuple[DistillConfig, OptimConfig]:
    """Return the settings of distillation and of the optimizer, with all missing values filled in.

    The settings of distillation include the hash of the teacher and the encoder settings of the additional students.

    For data sets of ImageNet's size, the learning rate is that of AM-RADIO: 1e-3 for 1024 images. The other values are
    choices of this project.

    Raises:
        SettingsError: no teacher is given, the teacher cannot be read, its hash is not `teacher_hash`, or a student is
            unknown or given twice.
    """
    optim_defaults = {
        "lr": 2.5e-4 if size.large else size.small_lr(4e-3),
        "min_lr": 1e-6,
        "warmup_steps": min(10 * size.epoch, size.steps // 10),
        "weight_decay": 0.05,
        "weight_decay_end": 0.05,
        "betas": (0.9, 0.999),
        "clip": 3.0,
    }
    if not config.pooled_weight and not config.token_weight:
        raise SettingsError("distill.pooled_weight and distill.token_weight are both 0. Set one of them to 1.")
    try:
        found = teacher_hash(config.teacher)
    except (OSError, ValueError) as error:
        raise SettingsError(f"distill.teacher: {error}") from error
    if config.teacher_hash not in (None, found):
        raise SettingsError(
            f"distill.teacher {config.teacher} is not the teacher with which the run started. Its hash is {found}, but "
            f"distill.teacher_hash is {config.teacher_hash}. Give the teacher of the run, or start a new run."
        )
    config = config.model_copy(update={"students": resolved_students(config, size) or None})
    return config.filled({"teacher_hash": found}), optim.filled(optim_defaults)


def resolved_students(config: DistillConfig, size: RunSize) -> dict[str, dict[str, Any]]:
    """Return the encoder settings of the additional students, by variant. Their defaults are those of `encoder`.

    Raises:
        SettingsError: a student is given twice or is unknown.
    """
    given = student_settings(config)
    try:
        return {variant: student_defaults(config, variant, size) | given[variant] for variant in given}
    except EncoderError as error:
        raise SettingsError(f"distill.students: {error}") from error


def student_settings(config: DistillConfig) -> dict[str, dict[str, Any]]:
    """Return the encoder settings that the user gave in `students`, by variant.

    Raises:
        SettingsError: a student is given twice.
    """
    if isinstance(config.students, dict):
        return config.students
    given = [config.students] if isinstance(config.students, str) else config.students or []
    variants = [variant.strip() for words in given for variant in words.split(",")]
    if twice := [variant for variant in variants if variants.count(variant) > 1]:
        raise SettingsError(f"distill.students: {twice[0]} is given twice. Remove one of the two.")
    return {variant: {} for variant in variants}


def student_defaults(config: DistillConfig, variant: str, size: RunSize) -> dict[str, Any]:
    """Return the default encoder settings of a student."""
    small = {} if size.large else {"init": "xavier", "position_init": "sincos"}
    return encoders.supported(variant, {"image_size": config.size, "drop_path": 0.0} | small)


def teacher_file(path: str | None) -> Path:
    """Return the weight file of a teacher. `path` is a weight file, or the folder of a run or of a checkpoint.

    Raises:
        ValueError: there is no encoder at `path`, or `path` is None.
    """
    if path is None:
        raise ValueError(
            "The teacher is not set. Set distill.teacher to a run folder, an encoder.safetensors, a published weight "
            "file or timm:NAME."
        )
    given = Path(path).expanduser()
    for file in (given, *encoders.places(given)):
        if file.is_file():
            return file
    raise ValueError(f"No encoder found at {given}. Give a run folder, an encoder.safetensors or a weight file.")


def teacher_hash(path: str | None) -> str:
    """Return the SHA-256 of a weight file and of the .json file beside it, if there is one.

    For `timm:NAME`, return the SHA-256 of the tensors.

    Raises:
        ValueError: there is no encoder at `path`, or `path` is None.
    """
    digest = hashlib.sha256()
    if path is not None and encoders.backbone(path):
        for name, tensor in sorted(encoders.load(path).state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()
    file = teacher_file(path)
    for part in (file, file.with_suffix(".json")):
        if part.is_file():
            with part.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


class Teacher:
    """A frozen encoder that is loaded beside the method.

    The teacher is not a module of the method. Engines therefore do not shard it, checkpoints do not store it, and each
    process holds all of its weights.
    """

    def __init__(self, encoder: Encoder, size: int) -> None:
        """Freeze `encoder`. `size` is the side in pixels of its input images."""
        self.encoder, self.size = encoder.eval().requires_grad_(False), size

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teacher":
        return self  # copies of the method share the teacher, because its weights never change

    @torch.no_grad()
    def features(self, images: Tensor, preprocessing: Preprocessing) -> Features:
        """Return the teacher's features of images (B, C, H, W) that are normalised by `preprocessing`.

        Raises:
            EncoderError: the teacher does not support images of `size` pixels.
        """
        if images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(images, size=(self.size, self.size), mode="bicubic", antialias=True)
        images = renormalized(images, preprocessing, self.encoder.preprocessing)
        try:
            return self._encode(images)
        except EncoderError as error:
            hint = f"The side of these images is distill.teacher_size, {self.size} pixels."
            raise EncoderError(f"The teacher does not support its input images: {error} {hint}") from error

    def _encode(self, images: Tensor) -> Features:
        if images.is_meta:  # the dry forward pass before a run needs only shapes
            tensors = {**dict(self.encoder.named_parameters()), **dict(self.encoder.named_buffers())}
            empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
            return torch.func.functional_call(self.encoder, empty, (images,))
        if next(self.encoder.parameters()).device != images.device:
            self.encoder.to(images.device)
        return self.encoder(images)


def load_teacher(path: str | None, size: int) -> Teacher:
    """Return the encoder at `path` as a teacher for images of `size` pixels.

    Raises:
        ValueError: there is no encoder at `path`, its format is not recognised, or an image is smaller than a token.
    """
    with torch.device("cpu"):  # the teacher needs its weights, even if an export builds the method on the meta device
        if path is not None and encoders.backbone(path):
            encoder = encoders.load(path)
        else:
            encoder, _ = fitting(teacher_file(path), None, {})
    if min(encoder.grid(size, size)) < 1:
        raise ValueError(
            f"Images of {size} pixels are smaller than a token of the teacher, whose side is {encoder.stride} pixels. "
            "Raise distill.teacher_size."
        )
    return Teacher(encoder, size)


def renormalized(images: Tensor, given: Preprocessing, wanted: Preprocessing) -> Tensor:
    """Convert images (B, C, H, W) from the normalisation `given` to the normalisation `wanted`.

    A teacher without a range gets the values from 0 to 1 that the range of the student gives.

    Raises:
        EncoderError: the teacher has a range, which is not that of the images.
    """
    if given == wanted:
        return images
    own, others = ((one.pixel_type, one.low, one.high) for one in (wanted, given))
    if wanted.low is not None and own != others:
        raise EncoderError(
            f"The teacher takes {wanted.pixel_type} images from {wanted.low} to {wanted.high}, but those of the run "
            f"are {given.pixel_type} from {given.range[0]} to {given.range[1]}. Set data.pixel_type and data.range to "
            "those of the teacher."
        )
    images = images.clone()
    statistics = zip(given.mean, given.std, wanted.mean, wanted.std, strict=True)
    for channel, (mean, std, other_mean, other_std) in enumerate(statistics):
        images[:, channel].mul_(std / other_std).add_((mean - other_mean) / other_std)
    return images


def resized_tokens(features: Features, grid: tuple[int, int]) -> Tensor:
    """Return the tokens of B images of one size, resized to a grid of (h, w) tokens: (B * h * w, E) float32.

    The interpolation is bilinear, with antialiasing when the grid becomes coarser.
    """
    rows, columns = features.grids[0].tolist()
    tokens = features.tokens.float()
    if (rows, columns) == grid:
        return tokens
    maps = tokens.unflatten(0, (-1, rows, columns)).permute(0, 3, 1, 2)  # (B, E, rows, columns)
    return F.interpolate(maps, size=grid, mode="bilinear", antialias=True).permute(0, 2, 3, 1).flatten(0, 2)


def match_loss(predicted: Tensor, target: Tensor, kind: Match) -> Tensor:
    """Return the distance between predictions and targets, averaged over rows, as a scalar.

        cosine = mean over n of  1 - predicted[n] . target[n] / (|predicted[n]| * |target[n]|)
        smooth_l1 = mean over n, e of  d^2 / 2 if d < 1 else d - 1 / 2,  with d = |predicted[n, e] - target[n, e]|
        mse = mean over n, e of  (predicted[n, e] - target[n, e]) ** 2
        mixed = 0.9 * cosine + 0.1 * smooth_l1

    Args:
        predicted: (N, E) float32.
        target: (N, E) float32.
    """
    if kind == "smooth_l1":
        return F.smooth_l1_loss(predicted, target)
    if kind == "mse":
        return F.mse_loss(predicted, target)
    cosine = 1 - F.cosine_similarity(predicted, target).mean()
    return cosine if kind == "cosine" else 0.9 * cosine + 0.1 * F.smooth_l1_loss(predicted, target)


def make_projection(dim: int, width: int, config: DistillConfig) -> nn.Module:
    """Return a projection from the student's width to the teacher's width: (N, D) -> (N, E)."""
    if config.projection == "linear":
        return nn.Linear(dim, width)
    hidden = config.hidden_dim or width
    return nn.Sequential(nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, width))


def matches(config: DistillConfig) -> dict[str, tuple[float, Match]]:
    """Return weight and loss of each kind of features to match: `pooled`, `token`, or both."""
    kinds = {"pooled": (config.pooled_weight, config.pooled_loss), "token": (config.token_weight, config.token_loss)}
    return {kind: (weight, loss) for kind, (weight, loss) in kinds.items() if weight}


def make_projections(encoder: Encoder, width: int, config: DistillConfig) -> nn.ModuleDict:
    """Freeze the unused parameters of a student, and return its projections by kind of features.

    Args:
        encoder: the student.
        width: width of the teacher.
        config: settings of distillation.
    """
    kinds = matches(config)
    freeze_unused(encoder, [config.size], pooled="pooled" in kinds, tokens="token" in kinds)
    return nn.ModuleDict({kind: make_projection(encoder.dim, width, config) for kind in kinds})


def make_student(
    variant: str, settings: dict[str, Any], main: Encoder, width: int, config: DistillConfig
) -> nn.ModuleDict:
    """Build an additional student, and return its `encoder` and its `projections`.

    The initial weights depend on the seed of torch's generator, but not on the other students. The state of the
    generator does not change.

    Args:
        variant: encoder variant of the student.
        settings: encoder settings of the student.
        main: encoder of the first student, which takes the same images.
        width: width of the teacher.
        config: settings of distillation.

    Raises:
        EncoderError: the encoder does not support the settings or the images, or `main` has the same variant.
    """
    if main.settings["variant"] == variant:
        raise EncoderError(f"distill.students: {variant} is already the encoder of the run. Remove one of the two.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed())
        try:
            encoder = encoders.build(variant, **({"channels": main.channels} | settings))
        except (EncoderError, TypeError) as error:
            raise EncoderError(f"distill.students: {variant} cannot be built: {error}") from error
        encoder.preprocessing = main.preprocessing
        try:
            encoder.check(torch.empty(1, main.channels, config.size, config.size))
            return nn.ModuleDict({"encoder": encoder, "projections": make_projections(encoder, width, config)})
        except EncoderError as error:
            raise EncoderError(
                f"distill.students: {variant} does not support images of {config.size} pixels (distill.size): {error}"
            ) from error


def covered(encoder: Encoder, size: int) -> float:
    """Return the share of the side of an image of `size` pixels that the tokens cover; above 1 if it is padded."""
    return 1.0 if encoder.settings.get("fixed_size") else encoder.grid(size, size)[0] * encoder.stride / size


class Distill(Method):
    """The distillation method: student encoders with one projection per kind of features, and a frozen teacher."""

    Config = DistillConfig
    resolve = staticmethod(resolve)
    needs_all_channels = True  # the teacher does
    small_settings: ClassVar[dict[str, Any]] = {"size": 16}

    def __init__(self, encoder: Encoder, config: DistillConfig, steps: int) -> None:
        """Load the teacher, and build the projections and the additional students. `config` holds resolved settings.

        Raises:
            ValueError: the teacher cannot be loaded, its number of input channels differs from the encoder's, or an
                additional student cannot be built.
        """
        super().__init__()
        del steps
        self.config = config
        self.image_size = config.size
        self._teacher = load_teacher(config.teacher, config.teacher_size or config.size)
        teacher = self._teacher.encoder
        if teacher.channels != encoder.channels:
            raise ValueError(
                f"The teacher takes images with {teacher.channels} channels, but the student's images have "
                f"{encoder.channels} channels. Choose another distill.teacher."
            )
        self.encoder, self.projections = encoder, make_projections(encoder, teacher.dim, config)
        others = student_settings(config).items()
        self.others = nn.ModuleDict(
            {variant: make_student(variant, own, encoder, teacher.dim, config) for variant, own in others}
        )
        side = covered(teacher, self._teacher.size)
        for student in (encoder, *(other["encoder"] for other in self.others.values())):
            if config.token_weight and (own := covered(student, config.size)) != side:
                raise ValueError(
                    f"The tokens of the teacher cover {side:.0%} of the side of an image, and those of "
                    f"{student.settings['variant']} {own:.0%}. Set distill.teacher_size to a multiple of "
                    f"{teacher.stride} and distill.size to one of {student.stride}, or distill.token_weight to 0."
                )
        self._pooled: dict[str, Tensor] = {}  # pooled features (B, D) of the last forward pass, for health()

    @staticmethod
    def encoder_defaults(config: DistillConfig, variant: str, size: RunSize) -> dict[str, Any]:
        return student_defaults(config, variant, size)

    def transform(self) -> RandomCrop:
        return RandomCrop(self.config)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of a batch with one view: B images, (B, C, H, W)."""
        del step
        (view,) = batch.views
        images = view.images
        if not isinstance(images, Tensor):
            raise TypeError("Distillation needs batches of images of one size.")
        wanted = self._teacher.features(images, batch.preprocessing)
        losses, metrics = [], {}
        for start, (encoder, projections) in self._students().items():
            with restarted_draws():
                features = encoder(images)
            self._pooled[start] = features.pooled.detach().float()
            loss, found = self._loss(projections, features, wanted)
            losses.append(loss)
            metrics |= {start + name: value for name, value in found.items()}
        return torch.stack(losses).sum(), metrics

    def _students(self) -> dict[str, tuple[Encoder, nn.ModuleDict]]:
        """Return the encoder and the projections of each student. The keys are prefixes of metric names: empty for the
        first student, and `VARIANT/` for the others."""
        others = {f"{name}/": (one["encoder"], one["projections"]) for name, one in self.others.items()}
        return {"": (self.encoder, self.projections)} | others

    def _loss(self, projections: nn.ModuleDict, own: Features, wanted: Features) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one student as a float32 scalar, and its metrics."""
        total, metrics = own.pooled.new_zeros((), dtype=torch.float32), {}
        for kind, (weight, match) in matches(self.config).items():
            features = own.pooled if kind == "pooled" else own.tokens
            predicted = projections[kind](features).float()  # (N, E)
            target = wanted.pooled.float() if kind == "pooled" else resized_tokens(wanted, tuple(own.grids[0].tolist()))
            with full_precision(predicted):
                loss = match_loss(predicted, target, match)
            # The spread is relative to the mean magnitude, because the cosine loss does not fix this magnitude.
            spread, teacher_spread = (
                column_variance(x, correction=0).sqrt().mean() / average(x.detach().abs().mean()).clamp(min=1e-12)
                for x in (predicted, target)
            )
            total = total + weight * loss
            metrics[f"{kind}_loss"] = loss.detach()
            metrics[f"{kind}_spread"] = (spread + 1e-6) / (teacher_spread + 1e-6)
            metrics[f"{kind}_teacher_spread"] = teacher_spread
        return total, metrics

    def trained_encoder(self) -> Encoder:
        return self.encoder

    def other_encoders(self) -> dict[str, Encoder]:
        return {name: student["encoder"] for name, student in self.others.items()}

    def trained_parts(self) -> list[nn.Module]:
        return [part for student in self._students().values() for part in student]

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        terms = [(start + kind, kind) for start, (_, kinds) in self._students().items() for kind in kinds]
        return {
            name: f"{name}_spread {record[f'{name}_spread']:.3f} is near 0, and {name}_loss is "
            f"{record[f'{name}_loss']:.3f}: the student predicts nearly the same for every input, and the teacher does "
            f"not. Try a lower optim.lr, distill.projection linear, or a higher distill.{kind}_weight."
            for name, kind in terms
            if record[f"{name}_spread"] < 0.02
        }

    def advice(self, record: Mapping[str, float]) -> list[str]:
        found = [
            f"The teacher's features hardly differ between inputs: {name} is {value:.3f}. Try another distill.teacher "
            "or distill.teacher_size."
            for name, value in record.items()
            if name in ("pooled_teacher_spread", "token_teacher_spread") and value < 0.05
        ]
        return [*found, *super().advice(record)]

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        return {f"{start}feature_rank": effective_rank(pooled) for start, pooled in self._pooled.items()}

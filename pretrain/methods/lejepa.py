"""LeJEPA (2511.08544): an encoder learns embeddings that are equal for all views of an image and normally distributed.

There is one encoder, which gets gradients from the embeddings of all views. There is no teacher, no moving average, no
stop-gradient and no predictor. SIGReg, a test of normality along random directions, keeps the embeddings from
collapsing.

Shape letters: B images per process and N images of all processes; V crops per image (global and local); D width of the
embeddings; M random directions; T points at which SIGReg compares characteristic functions.
"""

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.crops import Areas, MultiCrop, MultiCropConfig, by_size, sides
from tessera.encoders.base import Encoder, encode
from tessera.encoders.segments import copy_to_device
from tessera.encoders.unused import freeze_unused
from tessera.encoders.weight_files import load_weights
from tessera.pretrain.methods.heads import BatchNorm
from tessera.pretrain.methods.method import Method, RunSize, full_precision
from tessera.pretrain.monitoring.collapse import column_variance, effective_rank
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.collectives import all_reduce_sum, average, images_of_all_ranks
from tessera.runtime.settings import Derived, derived

POINTS = 17
"""Number of points at which SIGReg compares characteristic functions (T)."""
LAST_POINT = 3.0
"""Largest of the points at which SIGReg compares characteristic functions. The smallest is 0, by symmetry."""
REFERENCE_IMAGES = 256
"""Number of images per forward pass to which `sigreg_weight` refers."""


class LeJEPAConfig(MultiCropConfig, frozen=True):
    """Settings of LeJEPA. Missing values are derived from the number of images."""

    global_scale: Areas = (0.3, 1.0)
    """smallest and largest area of a global crop before the resize, as a share of the image's area"""
    local_crops: int = Field(default_factory=by_size(4, 6), ge=0)
    """number of local crops per image; default: 6, or 4 if global_size is less than 128"""
    local_scale: Areas = Field(default_factory=by_size((0.15, 0.5), (0.05, 0.3)))
    """smallest and largest area of a local crop before the resize, as a share of the image's area; default: 0.05,0.3,
    or 0.15,0.5 if global_size is less than 128"""
    sigreg_weight: Derived[float] = derived(gt=0, lt=1)
    """weight of SIGReg (lambda) for 256 images per forward pass of all processes; the weight of the invariance is
    1 - lambda; for N images, the ratio of the two weights is multiplied by 256 / N; default: 0.05, or 0.02 for fewer
    than 100,000 images"""
    directions: Derived[int] = derived(ge=1)
    """number of random directions (M) along which SIGReg tests the embeddings; new directions are drawn at every step;
    default: 1024, or 256 for fewer than 100,000 images"""
    hidden_dim: Derived[int] = derived(ge=1)
    """width of the projector's hidden layers; default: 2048, or 512 for fewer than 100,000 images"""
    output_dim: Derived[int] = derived(ge=1)
    """width of the embeddings (D); default: 512, or 16 for fewer than 100,000 images"""
    projector_layers: int = Field(default=3, ge=1)
    """number of linear layers of the projector"""
    batch_norm: bool = True
    """use batch norm after the projector's hidden layers, with statistics over one forward pass of all processes"""


def resolve(config: LeJEPAConfig, optim: OptimConfig, size: RunSize) -> tuple[LeJEPAConfig, OptimConfig]:
    """Return the settings of LeJEPA and of the optimizer, with derived values for settings that are not given.

    For data sets of ImageNet's size, the result is the published recipe: learning rate 5e-4, which falls to a
    thousandth of its peak, and weight decay 0.05. The warm-up is that of DINO, because its length is not published. For
    a smaller data set, lambda, `directions` and `output_dim` are those of the published recipe for Imagenette, the
    projector is narrower, and the learning rate is that of DINO (docs/methods.md).
    """
    optim_defaults = {
        "lr": 5e-4 if size.large else size.small_lr(4e-3),
        "min_lr": 0.0,
        "warmup_steps": min(10 * size.epoch, size.steps // 10),
        "weight_decay": 0.05,
        "weight_decay_end": 0.05,
        "betas": (0.9, 0.999),
        "clip": 0.0,
    }
    defaults = {
        "sigreg_weight": 0.05 if size.large else 0.02,
        "directions": 1024 if size.large else 256,
        "hidden_dim": 2048 if size.large else 512,
        "output_dim": 512 if size.large else 16,
    }
    filled = optim.filled(optim_defaults)
    if optim.min_lr is None:
        filled = filled.model_copy(update={"min_lr": float(f"{filled.scaled_lr(size.batch_size) / 1000:.3g}")})
    return config.filled(defaults), filled


class Projector(nn.Sequential):
    """MLP with batch norm and ReLU after each layer except the last: (N, encoder width) -> (N, D)."""

    def __init__(self, dim: int, config: LeJEPAConfig) -> None:
        widths = [dim] + [config.hidden_dim] * (config.projector_layers - 1)
        layers: list[nn.Module] = []
        for width_in, width_out in itertools.pairwise(widths):
            # batch norm subtracts the mean, so a bias before it would have no effect
            layers.append(nn.Linear(width_in, width_out, bias=not config.batch_norm))
            layers += [BatchNorm(width_out)] * config.batch_norm + [nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], config.output_dim))


def draw_directions(dim: int, count: int, step: int, device: torch.device) -> Tensor:
    """Return random unit vectors as the columns of a matrix (D, M) float32.

    The vectors depend only on `dim`, `count` and `step`, so all processes get the same vectors.
    """
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(dim, count, generator=generator, device="cpu")
    return copy_to_device(drawn / drawn.norm(dim=0), device)


def sigreg(embeddings: Tensor, directions: Tensor) -> Tensor:
    """Return SIGReg, the Epps-Pulley statistic of normality along random directions, as a scalar.

        phi(t) = exp(-t^2 / 2), the characteristic function of the standard normal distribution
        x[v, n, m] = sum over d of  embeddings[v, n, d] * directions[d, m]
        statistic[v, m] = N * integral over t from -3 to 3 of  |mean over n of exp(i t x[v, n, m]) - phi(t)|^2 * phi(t)
        sigreg = mean over v, m of  statistic[v, m]

    The integral is computed on [0, 3] with the trapezoid rule and doubled. The means over n include the images of all
    processes. The statistic is 0.402 * N if all embeddings are 0, and about 1.05 for any N if the embeddings are normal
    with mean 0 and variance 1.

    Args:
        embeddings: (V, B, D) float32.
        directions: (D, M) float32, equal on all processes.
    """
    images = images_of_all_ranks(embeddings.shape[1])  # N
    t = torch.linspace(0, LAST_POINT, POINTS, device=embeddings.device)  # (T,)
    phi = (-t.square() / 2).exp()
    weights = torch.full_like(phi, 2 * LAST_POINT / (POINTS - 1))
    weights[:: POINTS - 1] /= 2
    angles = (embeddings @ directions).unsqueeze(-1) * t  # (V, B, M, T)
    sums = all_reduce_sum(torch.stack([angles.cos().sum(1), angles.sin().sum(1)]))  # (2, V, M, T)
    cosine, sine = sums / images
    distance = (cosine - phi).square() + sine.square()  # (V, M, T)
    return images * (distance @ (weights * phi)).mean()


def invariance_loss(embeddings: Tensor) -> Tensor:
    """Return the mean squared difference between each embedding and the mean embedding of its image, as a scalar.

        loss = mean over v, n, d of  (embeddings[v, n, d] - mean over w of embeddings[w, n, d]) ** 2

    Args:
        embeddings: (V, B, D) float32.
    """
    return (embeddings - embeddings.mean(0)).square().mean()


def scaled_weight(weight: float, images: int) -> float:
    """Return the weight of SIGReg for `images` images per forward pass of all processes.

    For embeddings that are not normal, SIGReg grows with the number of images. The ratio of its weight to that of the
    invariance is therefore divided by the number of images, so that the balance of the two terms does not depend on the
    batch size. For 256 images, the result is `weight`.
    """
    ratio = weight / (1 - weight) * REFERENCE_IMAGES / images
    return ratio / (1 + ratio)


class LeJEPA(Method):
    """The LeJEPA method: an encoder, and a projector that maps the encoder's pooled features to embeddings."""

    Config = LeJEPAConfig
    resolve = staticmethod(resolve)
    continues = ("lejepa",)
    fixed_sizes = True
    small_settings: ClassVar[dict[str, Any]] = {
        "global_size": 16,
        "local_size": 12,
        "local_crops": 2,
        "hidden_dim": 32,
        "output_dim": 8,
        "directions": 32,
    }
    rank_hint = "Try a higher lejepa.sigreg_weight, a lower optim.lr, or a longer optim.warmup_steps."

    def __init__(self, encoder: Encoder, config: LeJEPAConfig, steps: int) -> None:
        """Build the projector for an encoder. `config` holds resolved settings."""
        super().__init__()
        del steps
        self.config = config
        self.image_size = config.global_size
        freeze_unused(encoder, sides(config), packed=True)
        self.encoder = encoder
        self.projector = Projector(encoder.dim, config)
        self._pooled: Tensor | None = None  # pooled features of the global crops in the last forward pass, for health()

    @staticmethod
    def encoder_defaults(config: LeJEPAConfig, variant: str, size: RunSize) -> dict[str, Any]:
        published: dict[str, Any] = {"drop_path": 0.1}
        small = {"drop_path": 0.0, "init": "xavier", "position_init": "sincos"}
        return encoders.supported(variant, {"image_size": config.global_size} | (published if size.large else small))

    def transform(self) -> MultiCrop:
        return MultiCrop(self.config)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of B images with global crops (G * B, C, H, W) and local crops (L * B, C, h, w)."""
        pooled, _ = encode(
            self.encoder, [view.images for view in batch.views], pooled_only=True
        )  # (V * B, encoder width)
        self._pooled = pooled[: len(batch.views[0].images)].detach().float()
        crops = sum(view.crops for view in batch.views)
        embeddings = self.projector(pooled).float().unflatten(0, (crops, -1))  # (V, B, D)
        weight = scaled_weight(self.config.sigreg_weight, images_of_all_ranks(embeddings.shape[1]))
        with full_precision(embeddings):
            directions = draw_directions(embeddings.shape[-1], self.config.directions, step, embeddings.device)
            normality, invariance = sigreg(embeddings, directions), invariance_loss(embeddings)
            loss = weight * normality + (1 - weight) * invariance
        rows = embeddings.detach().flatten(0, 1)  # (V * B, D)
        # If views of an image are unrelated, the invariance is (1 - 1 / V) times the variance of the embeddings.
        variance = column_variance(rows, correction=0).mean()
        unrelated = (1 - 1 / crops) * variance
        difference = average(invariance.detach()) / unrelated.clamp(min=1e-12)
        metrics = {"sigreg": normality.detach(), "invariance": invariance.detach(), "embedding_std": variance.sqrt()}
        return loss, metrics | {"view_difference": difference}

    def start_from(self, other: Method) -> None:
        load_weights(self.encoder, other.trained_encoder().state_dict(), "ours")
        self.projector.load_state_dict(other.get_submodule("projector").state_dict())

    def trained_encoder(self) -> Encoder:
        return self.encoder

    def trained_parts(self) -> list[nn.Module]:
        return [self.encoder, self.projector]

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        signs = {}
        if record["embedding_std"] < 0.1:
            signs["constant"] = (
                f"embedding_std {record['embedding_std']:.3f} is near 0, but should be near 1: the embeddings are the "
                f"same for every image, and sigreg is {record['sigreg']:.1f}. Try a higher lejepa.sigreg_weight, or a "
                "lower optim.lr."
            )
        elif record["view_difference"] > 0.95:
            signs["unrelated views"] = (
                f"view_difference {record['view_difference']:.3f} is near 1: views of one image differ as much as "
                f"views of different images, and invariance is {record['invariance']:.3f}. Try a lower "
                "lejepa.sigreg_weight, a smaller lejepa.output_dim, or larger crops."
            )
        return signs

    def advice(self, record: Mapping[str, float]) -> list[str]:
        found = []
        if record["sigreg"] > 10:
            found.append(
                f"The embeddings are not normal: sigreg is {record['sigreg']:.1f}, but about 1 for normal embeddings. "
                "Try a higher lejepa.sigreg_weight."
            )
        if record["view_difference"] > 0.8:
            found.append(
                f"Views of one image differ much: view_difference is {record['view_difference']:.2f}. Try a lower "
                "lejepa.sigreg_weight, or larger crops."
            )
        return [*found, *super().advice(record)]

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        if self._pooled is None:
            return {}
        return {"feature_rank": effective_rank(self._pooled)}

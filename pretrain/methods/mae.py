"""MAE (2111.06377): the encoder sees part of an image, and a small decoder predicts the pixels of the hidden part.

Encoders that cannot drop hidden tokens replace them by a mask token, and a linear layer predicts the pixels, as in
SimMIM (2111.09886).

Shapes: B images; T tokens of a batch, V of them visible; N tokens of an image; D width of the encoder, E of the
decoder; P = stride * stride * C pixel values of a token.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.crops import NativeCrop, RandomCrop, RandomCropConfig
from tessera.data.masking import MaskedCrop, MaskKind
from tessera.encoders.base import Encoder, Features
from tessera.encoders.images import Images, Mask, PackedImages, patchify
from tessera.encoders.navit import NaViT
from tessera.encoders.segments import copy_to_device
from tessera.encoders.unused import freeze_unused
from tessera.encoders.vit import ViT
from tessera.pretrain.methods.method import Method, RunSize, full_precision
from tessera.pretrain.methods.narrow import NarrowTransformer
from tessera.pretrain.monitoring.collapse import column_sums, column_variance, effective_rank, variance_of
from tessera.pretrain.optim.adamw import OptimConfig
from tessera.runtime.settings import Derived, derived

NO_CONTRAST = 0.01
"""All patches count as equal if `target_contrast` is at most this value, which allows for rounding errors."""

ENCODERS: dict[type[Encoder], dict[str, Any]] = {
    ViT: {"positions": "sincos", "init": "xavier", "interpolation": "mae"},
    NaViT: {"pool": "mean"},  # mean pooling, because MAE's loss does not train attention pooling
}
"""the paper's encoder settings, for encoders that have them"""
SMALL: dict[type[Encoder], dict[str, Any]] = {ViT: {"pool": "mean"}}
"""encoder settings for small data sets, where the mean of the patch tokens is a better feature than the class token"""


class MAEConfig(RandomCropConfig):
    """Settings of MAE. Decoder settings that are not given are derived from the encoder."""

    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """fraction of tokens to hide; at least one token of each image is hidden and at least one is visible"""
    mask: MaskKind = "random"
    """tokens to hide: random (single tokens) or block (rectangular blocks of tokens)"""
    drop: bool | None = None
    """true: drop hidden tokens before the encoder; false: replace hidden tokens by a mask token; default: true if the
    encoder can drop tokens"""
    normalize_targets: bool = True
    """normalise the pixels of each target patch by their mean and standard deviation"""
    light_decoder: Derived[bool] = derived()
    """if the encoder has fewer than 12 blocks, derive a decoder of one block and half the encoder's width; default:
    true for fewer than 100,000 images"""
    decoder_dim: int | None = Field(default=None, ge=4, multiple_of=4)
    """width of the decoder; default: the encoder's width, or half of it with a light decoder, rounded down to a
    multiple of 32, at most 512"""
    decoder_depth: int | None = Field(default=None, ge=0)
    """number of decoder blocks; 0: the decoder is one linear layer; default: 0 if `drop` is false, else 8, or for
    encoders with fewer than 12 blocks 2, or 1 with a light decoder"""
    decoder_heads: int | None = Field(default=None, ge=1)
    """number of attention heads of the decoder; default: one head per 32 channels of the decoder's width"""
    native: bool = False
    """keep the aspect ratio of each image; needs an encoder that supports packed images (ViT, RoPE-ViT, NaViT);
    `ratio` is then ignored"""
    smallest_size: int | None = Field(default=None, ge=1)
    """size of the smallest native image, given as the side in pixels of a square with the same area; default: `size`"""
    token_budget: int | None = Field(default=None, ge=1)
    """length of a packed sequence in tokens; default: the tokens of 2 images of `size`, or of 5 images if image sizes
    vary"""


def resolve(config: MAEConfig, optim: OptimConfig, size: RunSize) -> tuple[MAEConfig, OptimConfig]:
    """Return the settings of MAE and of the optimizer. Missing settings get the values of the published recipe.

    The published warm-up is 40 of 800 epochs. Shorter runs have a shorter warm-up. Small data sets have a higher
    learning rate and a light decoder (docs/results.md).
    """
    defaults = {
        "lr": 1.5e-4 if size.large else size.small_lr(4e-3),
        "min_lr": 0.0,
        "warmup_steps": min(40 * size.epoch, size.steps // 20),
        "weight_decay": 0.05,
        "weight_decay_end": 0.05,
        "reach_lr_in_warmup": False,
        "betas": (0.9, 0.95),
        "clip": 0.0,
    }
    own: dict[str, Any] = {"light_decoder": not size.large}
    if config.native:
        own["smallest_size"] = config.size
    return config.filled(own), optim.filled(defaults)


def make_decoder(encoder: Encoder, config: MAEConfig, *, drop: bool) -> NarrowTransformer:
    """Return the decoder, which predicts the pixels of all tokens: (V or T, D) -> (T, P).

    For the published encoders, the defaults are those of the published decoder: width 512 and 16 heads.

    Raises:
        ValueError: the width is not a multiple of the number of heads, or the depth is 0 and `drop` is true.
    """
    light = config.light_decoder and len(encoder.blocks) < 12
    usual = (8 if len(encoder.blocks) >= 12 else 1 if light else 2) if drop else 0
    depth = usual if config.decoder_depth is None else config.decoder_depth
    share = encoder.dim // 2 if light else encoder.dim
    width = config.decoder_dim or min(max(share // 32 * 32, 32), 512)
    heads = config.decoder_heads or max(width // 32, 1)
    if depth and width % heads:
        raise ValueError(f"mae.decoder_dim {width} is not a multiple of mae.decoder_heads {heads}. Change one of them.")
    if not depth and drop:
        raise ValueError(
            "mae.decoder_depth 0 needs features of all tokens, but mae.drop is true. "
            "Set mae.drop to false, or choose a larger depth."
        )
    pixels = encoder.stride**2 * encoder.channels
    low = getattr(encoder, "bf16_residuals", False)  # a choice of the user for all tokens between blocks
    return NarrowTransformer(encoder.dim, width, depth, heads, pixels, mask_token=drop, bf16_residuals=low)


def mae_loss(predicted: Tensor, target: Tensor, mask: Mask, grids: Tensor) -> Tensor:
    """Return the mean squared error of the hidden tokens.

        loss = mean over images b, over hidden tokens t of b, over pixels p, of  (predicted[t, p] - target[t, p]) ** 2

    Every image has the same weight, so the loss does not depend on the split of images over processes. If all images
    hide the same number of tokens, as in the paper, this is the mean over all hidden tokens.

    Args:
        predicted: predicted pixels, (T, P) float32.
        target: true pixels, (T, P) float32.
        grids: rows and columns of tokens of each image, (B, 2).
    """
    per_token = (predicted - target).square().mean(1)  # (T,)
    counts = grids.prod(1)
    each = 1 / ((counts - mask.lengths) * len(counts))  # (B,) weight of each hidden token of an image
    weights = copy_to_device(torch.repeat_interleave(each.to(per_token.dtype), counts), per_token.device)  # (T,)
    return (per_token * weights * mask.hidden).sum()


def normalized(target: Tensor) -> Tensor:
    """Normalise each patch by its mean and its unbiased standard deviation: (T, P) -> (T, P)."""
    return (target - target.mean(1, keepdim=True)) * (target.var(1, keepdim=True) + 1e-6).rsqrt()


class MAE(Method):
    """The MAE method: an encoder, and a decoder that predicts the pixels of hidden tokens."""

    Config = MAEConfig
    resolve = staticmethod(resolve)
    small_settings: ClassVar[dict[str, Any]] = {
        "size": 16,
        "light_decoder": False,
        "decoder_dim": 16,
        "decoder_heads": 2,
    }
    has_panels = True
    needs_all_channels = True

    def __init__(self, encoder: Encoder, config: MAEConfig, steps: int) -> None:
        """Build the decoder for an encoder. `config` holds resolved settings.

        Raises:
            ValueError: the encoder does not support the settings.
        """
        super().__init__()
        del steps
        self.config = config
        self.image_size = config.size
        self.drop = encoder.can_drop if config.drop is None else config.drop
        _check(encoder, config, self.drop)
        # blocks of hidden tokens differ in size from image to image
        self.fixed_sizes = not config.native and (config.mask == "random" or not self.drop)
        self.encoder = encoder
        self.decoder = make_decoder(encoder, config, drop=self.drop)
        # if true, the decoder also takes the pooled features as input
        self.class_token = getattr(encoder, "pool", None) == "class" and len(self.decoder.blocks) > 0
        # `pooled=False` freezes a norm or a pooling layer that only computes the pooled features, even if the decoder
        # takes these features as input
        freeze_unused(encoder, [config.size], pooled=False, tokens=True, masked=True, drop=self.drop)
        # for health(): pooled features (B, D) and sums of the targets of the last forward pass
        self._pooled: Tensor | None = None
        self._target_sums: Tensor | None = None

    @staticmethod
    def encoder_defaults(config: MAEConfig, variant: str, size: RunSize) -> dict[str, Any]:
        family = encoders.family(variant)
        drop = family.can_drop if config.drop is None else config.drop
        # a native image is at most four times as long as wide, so its long side is at most twice `size`
        longest = config.size * 2 if config.native else config.size
        wanted = {"image_size": longest, "mask_token": not drop} | ENCODERS.get(family, {})
        return encoders.supported(variant, wanted if size.large else wanted | SMALL.get(family, {}))

    def transform(self) -> MaskedCrop:
        c, stride = self.config, self.encoder.stride
        # The default is a multiple of the number of tokens in an image of `size`, because that leaves the least padding
        # (benchmarks/results/packing.md).
        budget = c.token_budget or (c.size // stride) ** 2 * (2 if c.smallest_size == c.size else 5)
        crop = NativeCrop(c, stride, c.smallest_size or c.size, budget) if c.native else RandomCrop(c)
        return MaskedCrop(crop, stride, c.mask, c.mask_ratio)

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of a batch with one view: B images, (B, C, H, W) or packed, and one mask."""
        images, mask = _masked_view(batch)
        features, predicted = self._predict(images, mask)
        targets = self._targets(images)
        with full_precision(predicted):
            loss = mae_loss(predicted, targets, mask, features.grids)
        self._target_sums = column_sums(targets)
        self._pooled = features.pooled.detach().float()
        # A spread near 0 shows that the decoder learns nothing from the encoder.
        return loss, {"prediction_spread": column_variance(predicted).sqrt().mean()}

    def _predict(self, images: Images, mask: Mask) -> tuple[Features, Tensor]:
        """Return the features of the encoder, and the predicted pixels of all tokens: (T, P) float32."""
        features = self.encoder(images, mask, drop=self.drop)
        predicted = self.decoder(
            features.tokens,
            features.grids,
            mask if self.drop else None,
            pooled=features.pooled if self.class_token else None,
            sequences=images.sequences if isinstance(images, PackedImages) else None,
        )
        return features, predicted.float()

    def _targets(self, images: Images) -> Tensor:
        """Return the pixels that the decoder has to predict: (T, P) float32."""
        pixels = images.patches if isinstance(images, PackedImages) else patchify(images, self.encoder.stride)
        return normalized(pixels.float()) if self.config.normalize_targets else pixels.float()

    def trained_encoder(self) -> Encoder:
        return self.encoder

    def trained_parts(self) -> list[nn.Module]:
        return [self.encoder, self.decoder]

    def units(self) -> list[list[nn.Module]]:
        return [*super().units(), list(self.decoder.blocks)]

    def advice(self, record: Mapping[str, float]) -> list[str]:
        found = super().advice(record)
        if record["prediction_spread"] < 0.1:
            spread = f"prediction_spread {record['prediction_spread']:.3f}"
            found.insert(0, f"The predictions hardly differ between patches ({spread}). Try a higher optim.lr.")
        return found

    def collapse_signs(self, record: Mapping[str, float]) -> dict[str, str]:
        if record["target_contrast"] > NO_CONTRAST:
            return {}
        return {
            "no contrast": "all patches to predict are equal. Look at pictures/crops.png: all images may be "
            "black or of one colour."
        }

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        if self._pooled is None or self._target_sums is None:
            return {}
        contrast = variance_of(self._target_sums).sqrt().max()
        return {"feature_rank": effective_rank(self._pooled), "target_contrast": contrast.item()}

    @torch.no_grad()
    def panels(self, batch: Batch, images: int) -> dict[str, list[list[Tensor]]]:
        """Return three pictures per image: the image, its visible part, and the image with predicted hidden patches."""
        view, mask = _masked_view(batch)
        stride = self.encoder.stride
        pixels = view.patches if isinstance(view, PackedImages) else patchify(view, stride)  # (T, P)
        training = self.training
        self.eval()
        _, predicted = self._predict(view, mask)
        self.train(training)
        if self.config.normalize_targets:  # undo the normalisation of the targets
            predicted = predicted * (pixels.var(1, keepdim=True) + 1e-6).sqrt() + pixels.mean(1, keepdim=True)
        hidden = mask.hidden[:, None]
        grids = self.encoder.grids(view)
        shown = [pixels, pixels.masked_fill(hidden, 0.0), torch.where(hidden, predicted, pixels)]
        columns = [PackedImages(patches, grids, stride).unpack()[:images] for patches in shown]
        return {"reconstruction": [list(row) for row in zip(*columns, strict=True)]}


def _masked_view(batch: Batch) -> tuple[Images, Mask]:
    """Return the images and the mask of a batch that has one view."""
    (view,) = batch.views
    (mask,) = view.masks
    return view.images, mask


def _check(encoder: Encoder, config: MAEConfig, drop: bool) -> None:
    """Raise `ValueError` if the encoder does not support the settings."""
    name = type(encoder).__name__
    if drop and not encoder.can_drop:
        raise ValueError(f"{name} cannot drop hidden tokens. Remove mae.drop, or set it to false.")
    if config.native and not encoder.takes_packed:
        raise ValueError(
            f"{name} takes only images of one size. Set mae.native to false, or choose a vit, rope_vit or navit."
        )
    if not config.native and (config.smallest_size or config.token_budget):
        raise ValueError("mae.smallest_size and mae.token_budget need native images. Set mae.native to true.")
    if not config.native and config.size % encoder.stride:
        sizes = sorted({max(config.size // encoder.stride, 1), -(-config.size // encoder.stride)})
        raise ValueError(
            f"mae.size {config.size} is not a multiple of {encoder.stride}, the stride of {name}. "
            f"Set mae.size to {' or '.join(str(n * encoder.stride) for n in sizes)}."
        )

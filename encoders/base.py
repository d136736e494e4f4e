"""The interface of all encoders: the base class `Encoder`, its output `Features` and the `Preprocessing` of images."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import isfinite
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tessera.encoders.checks import check_block_count
from tessera.encoders.drop_path import DropPath, Scales
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask, PackedImages, can_pack, pack
from tessera.encoders.layers import Recompute
from tessera.encoders.randomness import drop_path_scales, next_keys

PixelType = Literal["uint8", "uint16", "int16", "float32"]
"""Type of pixel values."""
PIXEL_TYPES: tuple[PixelType, ...] = get_args(PixelType)


@dataclass(frozen=True)
class Preprocessing:
    """Preparation of images for an encoder: the type of their pixels, and the normalisation per channel.

    A value `v` of an image becomes `x = (v - low) / (high - low)`, limited to the range 0 to 1, and then
    `(x - mean) / std`.
    """

    mean: tuple[float, ...]
    """Mean of each channel, of values `x` from 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel, of values `x` from 0 to 1. All values must be positive."""
    pixel_type: PixelType = "uint8"
    """Type of the values `v` of decoded images."""
    low: tuple[float, ...] | None = None
    """Value of each channel that becomes 0; None for 0, which only uint8 allows."""
    high: tuple[float, ...] | None = None
    """Value of each channel that becomes 1; None for 255, which only uint8 allows."""
    nodata: float | Literal["auto"] | None = None
    """Value of pixels without data; `auto` for the value that each file names, None for no such value. NaN and infinite
    values never hold data."""
    fewer_channels: bool = False
    """True if images may have fewer channels. The other channels are NaN after normalisation."""

    def __post_init__(self) -> None:
        self._check_range()
        if len(self.mean) != len(self.std) or not self.mean:
            raise EncoderError(
                f"mean has {len(self.mean)} values and std has {len(self.std)} values. Give one value per channel."
            )
        if not all(0 < value < float("inf") for value in self.std):
            raise EncoderError(f"All values of std must be positive and finite, not {list(self.std)}.")

    def _check_range(self) -> None:
        if self.pixel_type not in PIXEL_TYPES:
            raise EncoderError(f"The pixel type is {self.pixel_type!r}. Use one of {', '.join(PIXEL_TYPES)}.")
        if self.low is None or self.high is None:
            if self.low is not None or self.high is not None or self.pixel_type != "uint8":
                raise EncoderError(f"Images of the type {self.pixel_type} need a range. Give low and high.")
        elif not len(self.low) == len(self.high) == len(self.mean):
            raise EncoderError(
                f"low has {len(self.low)} values and high has {len(self.high)} values, but there are "
                f"{len(self.mean)} channels. Give one value per channel."
            )
        elif not all(isfinite(a) and isfinite(b) and a < b for a, b in zip(self.low, self.high, strict=True)):
            raise EncoderError(
                f"The range is {list(self.low)} to {list(self.high)}. Each low must be less than its high, and both "
                "must be finite."
            )
        if isinstance(self.nodata, int | float) and not isfinite(self.nodata):
            raise EncoderError(f"nodata is {self.nodata}. Give a finite value: NaN and infinity never hold data.")

    @property
    def channels(self) -> int:
        """Number of image channels, equal to the number of values in `mean` and in `std`."""
        return len(self.mean)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the pixels of decoded images."""
        return getattr(torch, self.pixel_type)

    @property
    def range(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Values of each channel that become 0 and 1."""
        return self.low or (0.0,) * self.channels, self.high or (255.0,) * self.channels

    @property
    def fill(self) -> tuple[float, ...]:
        """Mean of each channel as a value of an image. In integer types, it is rounded.

        Pixels without data get these values, so they are about 0 after normalisation.
        """
        values = (low + mean * (high - low) for mean, low, high in zip(self.mean, *self.range, strict=True))
        return tuple(values) if self.pixel_type == "float32" else tuple(float(round(value)) for value in values)


IMAGENET = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Channel means and standard deviations of ImageNet, in RGB order."""


class Features(NamedTuple):
    """Output of an encoder for B images. Class, register and distillation tokens are not part of `tokens`.

    `Features` is a tuple, because ZeRO-3 and FSDP look for the output tensors of a module inside tuples.
    """

    pooled: Tensor
    """Pooled features, one vector per image: (B, D)."""
    tokens: Tensor
    """Features of the T tokens of all images, image after image and row by row: (T, D). If hidden tokens were dropped,
    only the features of the V visible tokens are included: (V, D)."""
    grids: Tensor
    """Number of token rows and number of token columns of each image: (B, 2) int64 on the CPU."""


class Encoder(nn.Module):
    """Base class of encoders. An encoder maps images to `Features`.

    An encoder raises `EncoderError` for input that it cannot process.
    """

    dim: int
    """Width D of `pooled` and `tokens`."""
    stride: int
    """Side, in pixels, of the square image area that one token covers."""
    channels: int
    """Number of channels of the input images."""
    blocks: nn.ModuleList
    """Transformer blocks, or stages that contain blocks. Each block is compiled separately."""
    mask_token: nn.Parameter | None
    """Learned token that replaces hidden tokens. None or absent if the encoder cannot replace hidden tokens."""
    settings: dict[str, Any]
    """Name of the variant and constructor arguments of the encoder. Only `encoders.build` sets this attribute."""
    preprocessing: Preprocessing = IMAGENET
    """Normalisation of input images. It must equal the normalisation that was used to train the encoder."""
    can_drop: bool = False
    """True if `forward` supports `drop=True`, which excludes hidden tokens from the computation."""
    takes_packed: bool = False
    """True if the encoder accepts `PackedImages` as input."""
    can_skip_tokens: bool = False
    """True if `forward` supports `pooled_only=True`, and saves time by it."""
    takes_fewer_channels: bool = False
    """True if the encoder accepts images in which some channels are missing. All pixels of these channels are NaN."""
    no_weight_decay: tuple[str, ...] = ()
    """Substrings of parameter names. A matrix whose name contains one of these substrings has no weight decay, as in
    the paper of the encoder. Vectors never have weight decay."""

    checkpoint_activations: Recompute = False
    """Parts of the encoder that the backward pass recomputes. `run_block` recomputes whole blocks if the value is
    True."""

    @classmethod
    def unused_settings(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return the constructor arguments that have no effect with these `settings`, as a dictionary.

        A key is the name of such an argument. The value is the name of the setting that makes the argument ineffective.
        `encoders.build` raises an error if such an argument differs from its default.
        """
        del settings
        return {}

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        """Encode normalised images, (B, C, H, W) or packed.

        If `mask` is given, the output does not depend on the pixels of hidden tokens. With `drop=False`, a learned
        token replaces each hidden token. With `drop=True`, the encoder processes only the visible tokens:
        `Features.tokens` (V, D) are in the order of `mask.visible`, and each image must have a visible token.

        Raises:
            EncoderError: the images or the mask do not fit the encoder.
        """
        return self._features(self._last_outputs(1, images, mask, drop)[0], self.grids(images))

    def visible(self, images: Images, mask: Mask) -> Features:
        """Return the features of the visible tokens: `Features.tokens` (V, D) are in the order of `mask.visible`.

        The encoder drops hidden tokens if `can_drop` is True. Otherwise, a mask token replaces hidden tokens, so the
        encoder must be built with `mask_token=True`. In this case, `pooled` still depends on the hidden tokens. Images
        may have different numbers of visible tokens.

        Raises:
            EncoderError: the images or the mask do not fit the encoder, or the encoder needs a mask token and has none.
        """
        features = self(images, mask, drop=self.can_drop)
        if self.can_drop:
            return features
        return features._replace(tokens=features.tokens.index_select(0, mask.visible))

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        """Return the features after each of the last `blocks` blocks, in order.

        The final norm is applied to the output of each of these blocks.

        Raises:
            EncoderError: the images do not fit the encoder, or the encoder has fewer than `blocks` blocks.
        """
        check_block_count(blocks, self._final_blocks())
        grids = self.grids(images)
        return [self._features(output, grids) for output in self._last_outputs(blocks, images)]

    def _outputs(self, images: Images, mask: Mask | None = None, drop: bool = False) -> Iterator[Any]:
        """Yield the output of each block. `_features` accepts each of these outputs."""
        raise NotImplementedError(f"{type(self).__name__} implements neither `forward` nor `_outputs`.")

    def _features(self, output: Any, grids: Tensor) -> Features:
        """Return the features for the output of a block. `grids` (B, 2) are the grids of the images."""
        raise NotImplementedError

    def _final_blocks(self) -> int:
        """Return the largest number of blocks that `intermediate` accepts: all blocks, or those of the last stage."""
        return len(self.blocks)

    def _last_outputs(self, count: int, images: Images, mask: Mask | None = None, drop: bool = False) -> list[Any]:
        """Return the outputs of the last `count` blocks."""
        return list(deque(self._outputs(images, mask, drop), maxlen=count))

    def run_block(self, block: nn.Module, *arguments: Any) -> Any:
        """Return the output of a block. If `checkpoint_activations` is True, the backward pass recomputes the block."""
        if self.training and self.checkpoint_activations not in (False, "selective"):
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)

    def saved_state(self) -> dict[str, Tensor]:
        """Return the weights for a file, with the tensor names of an encoder that `encoders.build` makes.

        Code that adds parameters to an encoder, such as low-rank updates, replaces this function of the encoder.
        """
        return self.state_dict()

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of token rows and of token columns for an image of `height` x `width` pixels."""
        return height // self.stride, width // self.stride

    def grids(self, images: Images) -> Tensor:
        """Return the number of token rows and of token columns of each image: (B, 2) int64 on the CPU."""
        if isinstance(images, PackedImages):
            return images.grids
        return torch.tensor([self.grid(*images.shape[-2:])]).expand(images.shape[0], 2)

    def check(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> None:
        """Check the arguments of `forward`.

        Raises:
            EncoderError: the encoder does not accept packed images; the images are not floats, have the wrong number of
                channels, or are smaller than one patch; the mask does not fit the grids of tokens; or the encoder
                cannot replace or drop hidden tokens.
        """
        if not isinstance(images, PackedImages):
            self._check_tensor(images)
        elif not self.takes_packed:
            raise self._no_packed_images()
        self._check_mask(images, mask, drop)

    def checked(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Tensor:
        """Check the arguments of `forward` and return `images`. In contrast to `check`, always reject packed images."""
        if isinstance(images, PackedImages):
            raise self._no_packed_images()
        self.check(images, mask, drop=drop)
        return images

    def _no_packed_images(self) -> EncoderError:
        size = f"(B, {self.channels}, H, W)"
        return EncoderError(f"{type(self).__name__} takes images of one size, {size}, not packed images.")

    def _check_tensor(self, images: Tensor) -> None:
        if not images.is_floating_point():
            raise EncoderError(f"Images must be normalised floats, not {images.dtype}.")
        if images.ndim != 4 or images.shape[1] != self.channels:
            cure = "For another number of channels, build the encoder with channels=N."
            if images.ndim == 3:
                cure = "Add a batch axis: images[None]."
            elif images.shape[-1] == self.channels:
                cure = "Move the channels to the second axis: images.movedim(-1, 1)."
            raise EncoderError(
                f"{type(self).__name__} takes images of shape (B, {self.channels}, H, W), not {tuple(images.shape)}. "
                f"{cure}"
            )
        if min(self.grid(*images.shape[-2:])) < 1:
            raise EncoderError(
                f"Images of {images.shape[-2]} x {images.shape[-1]} pixels are smaller than one patch of "
                f"{self.stride} x {self.stride} pixels."
            )

    def _check_mask(self, images: Images, mask: Mask | None, drop: bool) -> None:
        if drop and mask is None:
            raise EncoderError("drop=True needs a mask. Pass a mask, or set drop=False.")
        if drop and not self.can_drop:
            raise EncoderError(
                f"{type(self).__name__} cannot drop hidden tokens, because its windows need the full grid. "
                "Set drop=False, so that a mask token replaces the hidden tokens."
            )
        if mask is not None:
            mask.check(self.grids(images))
            if drop and int(mask.lengths.min()) < 1:
                raise EncoderError(
                    "With drop=True each image must keep at least one token. "
                    f"The mask hides all tokens of image {int(mask.lengths.argmin())}."
                )
            if not drop and getattr(self, "mask_token", None) is None:
                hint = "Build the encoder with mask_token=True"
                hint += ", or pass drop=True." if self.can_drop else "."
                raise EncoderError(f"The encoder needs a mask token to replace hidden tokens. {hint}")

    def draw_drop_path(self, images: int, device: torch.device) -> Scales:
        """Draw the drop path factors of one forward pass. Return an iterator with one item per block.

        An item holds the factors of one block: (2, images). All items are None if drop path is inactive. Outside of the
        context `encoders.randomness.random_keys`, all items are also None, and each block draws its factors from
        torch's generator.
        """
        parts = [part if isinstance(part, nn.ModuleList) else [part] for part in self.blocks]
        drops = [block.drop_path for part in parts for block in part]
        rates = [drop.rate for drop in drops if isinstance(drop, DropPath)]
        keys = next_keys(images) if self.training and any(rates) else None
        return repeat(None) if keys is None else iter(drop_path_scales(keys, rates, device).unbind())

    def replace_hidden(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Replace the tokens of `x` (..., D) by the mask token where `hidden` (..., 1) is True."""
        assert self.mask_token is not None  # as `check` has found
        return torch.where(hidden, self.mask_token, x)


def encode(
    encoder: nn.Module, views: Sequence[Images], mask: Mask | None = None, *, pooled_only: bool = False
) -> tuple[Tensor, Tensor]:
    """Encode S views of B images each. Return pooled features (S * B, D) and token features (T, D).

    The first rows of the token features belong to the first view. `mask` hides tokens of the first view only. If the
    encoder takes packed images, and the patch size divides the sides of all images, all views are encoded in one call.
    If `pooled_only` is True, the token features must not be used, and an encoder may leave them out.
    """
    run = _pooling(encoder) if pooled_only else encoder
    if isinstance(encoder, Encoder) and encoder.takes_packed and can_pack(views, encoder.stride):
        packed = pack(views, encoder.stride)
        features = run(packed, None if mask is None else mask.extended(packed.grids))
        return features.pooled, features.tokens
    first = run(views[0]) if mask is None else run(views[0], mask)
    return torch.cat([first.pooled, *(run(view).pooled for view in views[1:])]), first.tokens


def pooled_features(encoder: nn.Module, images: Images) -> Tensor:
    """Return the pooled features of images (B, D). The encoder does not compute token features if it can skip them."""
    return _pooling(encoder)(images).pooled


def _pooling(encoder: nn.Module) -> Callable[..., Features]:
    return partial(encoder, pooled_only=True) if getattr(encoder, "can_skip_tokens", False) else encoder

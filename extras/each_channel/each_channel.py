"""Encoders that see one channel at a time: the backbones `each:NAME`, such as `each:vit_small`.

An encoder NAME of one channel encodes each channel of an image like a gray image. The features of the channels are
joined by their mean or by concatenation: the "bag of channels" baseline of CHAMMI-75. The mean does not depend on the
number of channels, so images with fewer channels can be encoded in the same batch.

Letters in shapes: B images; C channels, H x W pixels; M channels of all images (B * C if none is missing); D width of
the encoder of one channel; V tokens of all images, or only the visible tokens.
"""

import inspect
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tessera import encoders
from tessera.encoders.base import Encoder, Features, Preprocessing
from tessera.encoders.checks import check_counts
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.images import Images, Mask
from tessera.encoders.loading import State
from tessera.encoders.randomness import repeated_keys
from tessera.encoders.segments import copy_to_device

PREFIX = "each:"
NAMES = "each:NAME for an encoder that sees one channel at a time"
Join = Literal["mean", "concat"]


class EachChannel(Encoder):
    """An encoder of C channels that encodes each channel by an encoder of one channel, and joins the features.

    A channel whose first pixel is NaN is missing. It is not encoded, and the mean is that of the other channels. A mask
    hides the same tokens of all channels. Packed images are not supported.
    """

    def __init__(self, encoder: Encoder, *, channels: int, join: Join):
        """Wrap an encoder.

        Args:
            encoder: encoder of one channel.
            channels: largest number of channels of an image.
            join: mean of the features of the channels, or all of them, one after another ("concat").
        """
        super().__init__()
        check_counts(channels=channels)
        self.encoder, self.channels, self.join = encoder, channels, join
        self.dim, self.stride = encoder.dim * (channels if join == "concat" else 1), encoder.stride
        self.can_drop, self.no_weight_decay = encoder.can_drop, encoder.no_weight_decay
        self.takes_fewer_channels = join == "mean"

    @property
    def blocks(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Blocks of the encoder of one channel."""
        return self.encoder.blocks

    @property
    def mask_token(self) -> nn.Parameter | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Mask token of the encoder of one channel."""
        return getattr(self.encoder, "mask_token", None)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of token rows and columns, which is that of the encoder of one channel."""
        return self.encoder.grid(height, width)

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        images = self.checked(images, mask, drop=drop)
        present = self._present(images)
        owners = _owners(images, present)
        repeated = None if mask is None else _repeated(mask, owners, len(images))
        with repeated_keys(owners, images.shape[0]):
            features = self.encoder(_channels(images, present), repeated, drop=drop)
        return self._joined(features, present, self.grids(images), mask.lengths if mask is not None and drop else None)

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        images = self.checked(images)
        present = self._present(images)
        found = self.encoder.intermediate(_channels(images, present), blocks)
        return [self._joined(features, present, self.grids(images)) for features in found]

    def _final_blocks(self) -> int:
        return self.encoder._final_blocks()

    def _present(self, images: Tensor) -> Tensor | None:
        """Return which channels are not missing, (B, C) bool on the CPU, or None if no channel is missing.

        Missing channels are looked for only if the data set may have them (`preprocessing.fewer_channels`), because the
        CPU then waits for the device. Images of the meta device and of exported programs have all channels.

        Raises:
            EncoderError: a channel is missing, but the features are concatenated; or all channels of an image are.
        """
        if not self.preprocessing.fewer_channels or images.device.type == "meta" or torch.compiler.is_compiling():
            return None
        present = ~images[:, :, 0, 0].isnan().cpu()
        if present.all():
            return None
        if self.join == "concat":
            raise EncoderError(
                f'Images have fewer than {self.channels} channels, but join="concat" needs all. Use join="mean".'
            )
        if not present.any(1).all():
            raise EncoderError("All channels of an image are missing. Leave the image out.")
        return present

    def _joined(
        self, found: Features, present: Tensor | None, grids: Tensor, visible: Tensor | None = None
    ) -> Features:
        """Join the features of M channels to those of B images.

        Args:
            present: channels that are not missing, (B, C) bool; None for all.
            visible: number of visible tokens of each image if the others were dropped: (B,).
        """
        if present is None and visible is None:
            channels = found.tokens.view(found.pooled.shape[0], -1, found.tokens.shape[1])  # (M, N, D)
            tokens = channels.unflatten(0, (-1, self.channels)).transpose(0, 1).flatten(1, 2)  # (C, V, D)
            pooled = found.pooled.unflatten(0, (-1, self.channels)).transpose(0, 1)  # (C, B, D)
            return Features(self._join(pooled, self.channels), self._join(tokens, self.channels), grids)
        if present is None:
            present = torch.ones(len(grids), self.channels, dtype=torch.bool)
        owners, numbers = present.nonzero().unbind(1)
        joined = []
        for x, lengths in (
            (found.pooled, torch.ones(len(grids), dtype=torch.int64)),
            (found.tokens, grids.prod(1) if visible is None else visible),
        ):
            # Each vector has a place of its own in the table, so the sum over the table is the same on every device.
            own, starts, total = lengths[owners], lengths.cumsum(0) - lengths, int(lengths.sum())
            ranks = torch.arange(int(own.sum())) - torch.repeat_interleave(own.cumsum(0) - own, own)
            places = torch.repeat_interleave(numbers * total + starts[owners], own) + ranks
            rows = x.new_zeros(self.channels * total, x.shape[-1])
            table = rows.index_copy(0, copy_to_device(places, x.device), x).view(self.channels, total, -1)
            counts = torch.repeat_interleave(present.sum(1), lengths)[:, None]  # (V, 1)
            joined.append(self._join(table, copy_to_device(counts, x.device).to(x.dtype)))
        return Features(*joined, grids)

    def _join(self, table: Tensor, counts: Tensor | int) -> Tensor:
        """Join the vectors of C channels, of which `counts` are not missing: (C, V, D) -> (V, D) or (V, C * D)."""
        if self.join == "concat":
            return table.transpose(0, 1).flatten(1)
        return table.sum(0) / counts


def _owners(images: Tensor, present: Tensor | None) -> Tensor:
    """Return the index of the image of each channel that is not missing: (M,) int64 on the CPU."""
    if present is None:
        return torch.arange(images.shape[0]).repeat_interleave(images.shape[1])
    return present.nonzero()[:, 0]


def _channels(images: Tensor, present: Tensor | None) -> Tensor:
    """Return the channels that are not missing as images of one channel: (B, C, H, W) -> (M, 1, H, W)."""
    x = images.flatten(0, 1).unsqueeze(1)
    return x if present is None else x.index_select(0, copy_to_device(present.flatten().nonzero()[:, 0], x.device))


def _repeated(mask: Mask, owners: Tensor, images: int) -> Mask:
    """Return a mask of M channels, each of which hides the tokens that `mask` hides in its image `owners` (M,)."""
    hidden = mask.hidden.view(images, -1).index_select(0, copy_to_device(owners, mask.hidden.device))  # (M, N)
    return Mask.from_hidden(hidden.flatten(), torch.tensor([[1, hidden.shape[1]]]).expand(len(hidden), 2))


@cache
def family(variant: str) -> type[EachChannel]:
    """Return the encoder class of `each:NAME`. Its settings are those of NAME, and `join`.

    Raises:
        EncoderError: NAME is unknown, or is itself an encoder of each channel.
    """
    name = variant.removeprefix(PREFIX)
    if name.startswith(PREFIX):
        raise EncoderError(f"{variant} has the prefix {PREFIX} twice. Use {name}.")
    inner = encoders.family(name)
    own = {known: value for known, value in encoders.entry(name).items() if known != "family"}
    parameters = [
        parameter.replace(default=own.get(parameter.name, parameter.default))
        for parameter in inspect.signature(inner).parameters.values()
    ]

    class Each(EachChannel):
        __doc__ = f"{_settings_of(inner)}\n        join: join the features of the channels by mean or concatenation.\n"

        def __init__(self, *, channels: int = 3, join: Join = "mean", **settings: Any):
            super().__init__(encoders.build(name, channels=1, **settings), channels=channels, join=join)

        @classmethod
        def unused_settings(cls, settings: Any) -> dict[str, str]:
            return inner.unused_settings(settings)

    Each.can_drop = inner.can_drop
    Each.__name__ = Each.__qualname__ = variant
    join = inspect.Parameter("join", inspect.Parameter.KEYWORD_ONLY, default="mean", annotation=Join)
    cast(Any, Each).__signature__ = inspect.Signature([*parameters, join])
    return Each


def _settings_of(inner: type[Encoder]) -> str:
    """Return the docstring of an encoder class, whose Args are the help of its settings."""
    return (inner.__doc__ or "").rstrip()


def fetch(name: str | Path, encoder: Encoder | None = None) -> tuple[State, Preprocessing]:
    """Raise `WeightsError`: there are no published weights of this prefix."""
    del encoder
    raise WeightsError(f"{name} has no published weights. Give the run folder or the weight file of an own encoder.")


def settings(name: str | Path, state: State) -> dict[str, Any]:
    """Raise `WeightsError`, as `fetch` does."""
    del state
    fetch(name)
    return {}


def other_name(name: str) -> tuple[str, str | None] | None:
    """Return None: no other project names such encoders."""
    del name

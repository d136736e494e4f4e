"""Pictures of the features of a run, as (H, W, 3) uint8 arrays. Images are shown as in `data.pictures`.

Shape letters: N images, C channels, D width of a token, h x w grid of tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.pictures import colours, grid, limits, resized
from tessera.encoders.base import Encoder
from tessera.evaluation.token_colours import principal_components, token_colours


@torch.no_grad()
def attention(
    encoder: Encoder, images: Tensor, side: int = 112, bands: Sequence[int] | None = None
) -> np.ndarray | None:
    """Show each image next to maps of the class token's attention in the last block, one map per head.

    Return None if the encoder has no class token or does not provide attention weights.

    Args:
        encoder: encoder in eval mode.
        images: (N, C, H, W), normalised with `encoder.preprocessing`.
        bands: numbers of the bands that are shown, counted from 1; None for the first three.
    """
    last_attention = getattr(encoder, "last_attention", None)
    if last_attention is None or getattr(encoder, "cls_token", None) is None:
        return None
    rows, columns = encoder.grids(images)[0].tolist()
    # one image at a time, because the weights between all tokens of many images may take gigabytes
    own = [last_attention(image)[:, :, 0, -rows * columns :].float() for image in images.split(1)]
    weights = torch.cat(own)  # (N, heads, h * w)
    weights = (weights / weights.amax(-1, keepdim=True)).unflatten(2, (rows, columns))
    maps = F.interpolate(weights, size=(side, side), mode="nearest").unsqueeze(2).expand(-1, -1, 3, -1, -1)
    return grid(torch.cat([_tiles(encoder, images, side, bands).unsqueeze(1), maps], dim=1))


@torch.no_grad()
def pca(encoder: Encoder, images: Tensor, side: int = 112, bands: Sequence[int] | None = None) -> np.ndarray:
    """Show each image above a map of its tokens, with their first three principal components as red, green and blue.

    The components are computed from the tokens of all images together.

    Args:
        encoder: encoder in eval mode.
        images: (N, C, H, W), normalised with `encoder.preprocessing`.
        bands: numbers of the bands that are shown, counted from 1; None for the first three.
    """
    tokens = token_colours(principal_components(encoder, images))  # (N, h, w, 3)
    maps = torch.from_numpy(tokens).float().to(images.device).permute(0, 3, 1, 2)  # (N, 3, h, w)
    maps = F.interpolate(maps, size=(side, side), mode="nearest")
    return grid(torch.stack([_tiles(encoder, images, side, bands), maps], dim=0))


def _tiles(encoder: Encoder, images: Tensor, side: int, bands: Sequence[int] | None) -> Tensor:
    """Return normalised images as RGB of one size: (N, C, H, W) -> (N, 3, side, side)."""
    found = limits(images, encoder.preprocessing, bands)
    return resized(colours(images, encoder.preprocessing, bands, found), side)

"""Pictures of what a run sees and learns, as (H, W, 3) uint8 arrays.

N images, C = 3 channels, D width of a token, h x w grid of tokens.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.batch import Batch
from encoders.base import IMAGENET, Encoder
from encoders.images import PackedImages


def crops(batch: Batch, images: int = 8, side: int = 112) -> np.ndarray:
    """The crops of the first images as the network sees them: one row an image, global crops first."""
    rows = []
    shown = min(images, len(batch))
    for view in batch.views:
        if isinstance(view.images, PackedImages):  # one crop each, of many sizes
            return panels([[image] for image in view.images.unpack()[:shown]], side)
        per_crop = view.images.unflatten(0, (view.crops, -1))[:, :shown].float()  # (count, shown, C, H, W)
        for crop in per_crop:
            rows.append(_enlarge(_unnormalise(crop), side))
    return _grid(torch.stack(rows, dim=1))


def panels(rows: list[list[Tensor]], side: int = 112) -> np.ndarray:
    """Rows of normalised pictures (3, H, W) of any size, each fitted into a square."""
    return _grid(torch.stack([torch.stack([_enlarge(_unnormalise(p)[None], side)[0] for p in row]) for row in rows]))


@torch.no_grad()
def attention(encoder: Encoder, images: Tensor, side: int = 112) -> np.ndarray | None:
    """Each image beside the class token's attention in the last block, one picture a head; None for encoders without.

    Args:
        images: (N, 3, H, W) normalised.
    """
    last_attention = getattr(encoder, "last_attention", None)
    if last_attention is None or getattr(encoder, "cls_token", None) is None:
        return None
    features = encoder(images)
    rows, columns = features.grids[0].tolist()
    weights = last_attention(images)[:, :, 0, -rows * columns :].float()  # (N, heads, h * w)
    weights = (weights / weights.amax(-1, keepdim=True)).unflatten(2, (rows, columns))
    maps = F.interpolate(weights, size=(side, side), mode="nearest").unsqueeze(2).expand(-1, -1, 3, -1, -1)
    return _grid(torch.cat([_enlarge(_unnormalise(images), side).unsqueeze(1), maps], dim=1))


@torch.no_grad()
def pca(encoder: Encoder, images: Tensor, side: int = 112) -> np.ndarray:
    """Each image above the first three principal components of its tokens as red, green and blue.

    The components are those of all images together, with signs fixed so that a picture can be made again.

    Args:
        images: (N, 3, H, W) normalised.
    """
    features = encoder(images)
    rows, columns = features.grids[0].tolist()
    tokens = features.tokens.double()  # (N * h * w, D)
    centred = tokens - tokens.mean(0)
    _, _, components = torch.linalg.svd(centred, full_matrices=False)
    components = components[:3]
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    projected = centred @ (components * largest.sign()).T  # (N * h * w, 3)
    low, high = projected.quantile(0.02, dim=0), projected.quantile(0.98, dim=0)
    colours = ((projected - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).float()
    maps = colours.unflatten(0, (len(images), rows, columns)).permute(0, 3, 1, 2)  # (N, 3, h, w)
    maps = F.interpolate(maps, size=(side, side), mode="nearest")
    return _grid(torch.stack([_enlarge(_unnormalise(images), side), maps], dim=0))


def _unnormalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (IMAGENET.mean, IMAGENET.std))
    return (images.float() * std + mean).clamp(0, 1)


def _enlarge(images: Tensor, side: int) -> Tensor:
    """(N, 3, H, W) -> (N, 3, side, side), longer side fitted, the rest white."""
    scale = side / max(images.shape[-2:])
    height, width = (max(round(s * scale), 1) for s in images.shape[-2:])
    resized = F.interpolate(images, size=(height, width), mode="nearest")
    return F.pad(resized, (0, side - width, 0, side - height), value=1.0)


def _grid(cells: Tensor, gap: int = 2) -> np.ndarray:
    """Cells (rows, columns, 3, H, W) in [0, 1] -> one picture (H', W', 3) uint8 with white gaps."""
    padded = F.pad(cells, (0, gap, 0, gap), value=1.0)
    picture = torch.cat([torch.cat(list(row), dim=2) for row in padded], dim=1)  # (3, H', W')
    return (picture.permute(1, 2, 0) * 255).round().byte().cpu().numpy()

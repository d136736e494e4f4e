"""Pictures of the input and the features of a run, as (H, W, 3) uint8 arrays.

Images are shown with their original colours, so the normalisation is undone. One channel is shown as gray, and two
channels are shown as red and green. Images with more channels show the first three as red, green and blue.

Shape letters: N images, C channels, D width of a token, h x w grid of tokens.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.batch import Batch
from encoders.base import Encoder, Preprocessing
from encoders.images import PackedImages


def crops(batch: Batch, images: int = 8, side: int = 112) -> np.ndarray:
    """Show the crops of the first `images` images of a batch as the encoder receives them.

    Each row holds the crops of one image, global crops first.
    """
    columns = []
    shown = min(images, len(batch))
    for view in batch.views:
        if isinstance(view.images, PackedImages):  # packed images have one crop per image, and the crops differ in size
            return panels([[image] for image in view.images.unpack()[:shown]], batch.preprocessing, side)
        per_crop = view.images.unflatten(0, (view.crops, -1))[:, :shown].float()  # (n, shown, C, H, W)
        columns += [_resized(_colours(crop, batch.preprocessing), side) for crop in per_crop]
    return _grid(torch.stack(columns, dim=1))


def panels(rows: list[list[Tensor]], preprocessing: Preprocessing, side: int = 112) -> np.ndarray:
    """Show rows of normalised pictures (C, H, W) of any size. Each picture is scaled to fit a square."""
    cells = [[_resized(_colours(picture[None], preprocessing), side)[0] for picture in row] for row in rows]
    return _grid(torch.stack([torch.stack(row) for row in cells]))


@torch.no_grad()
def attention(encoder: Encoder, images: Tensor, side: int = 112) -> np.ndarray | None:
    """Show each image next to maps of the class token's attention in the last block, one map per head.

    Return None if the encoder has no class token or does not provide attention weights.

    Args:
        encoder: encoder in eval mode.
        images: (N, C, H, W), normalised with `encoder.preprocessing`.
    """
    last_attention = getattr(encoder, "last_attention", None)
    if last_attention is None or getattr(encoder, "cls_token", None) is None:
        return None
    features = encoder(images)
    rows, columns = features.grids[0].tolist()
    weights = last_attention(images)[:, :, 0, -rows * columns :].float()  # (N, heads, h * w)
    weights = (weights / weights.amax(-1, keepdim=True)).unflatten(2, (rows, columns))
    maps = F.interpolate(weights, size=(side, side), mode="nearest").unsqueeze(2).expand(-1, -1, 3, -1, -1)
    return _grid(torch.cat([_resized(_colours(images, encoder.preprocessing), side).unsqueeze(1), maps], dim=1))


@torch.no_grad()
def pca(encoder: Encoder, images: Tensor, side: int = 112) -> np.ndarray:
    """Show each image above the first three principal components of its tokens as red, green and blue.

    The components are computed from the tokens of all images together. The sign of each component is fixed, so that a
    picture can be reproduced.

    Args:
        encoder: encoder in eval mode.
        images: (N, C, H, W), normalised with `encoder.preprocessing`.
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
    return _grid(torch.stack([_resized(_colours(images, encoder.preprocessing), side), maps], dim=0))


def _colours(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Undo the normalisation of images and return them as RGB: (N, C, H, W) -> (N, 3, H, W) in [0, 1]."""
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = (images.float() * std + mean).clamp(0, 1)
    if pixels.shape[1] == 1:
        return pixels.expand(-1, 3, -1, -1)
    if pixels.shape[1] == 2:
        return torch.cat([pixels, torch.zeros_like(pixels[:, :1])], dim=1)
    return pixels[:, :3]


def _resized(images: Tensor, side: int) -> Tensor:
    """Scale images so that the longer side is `side` pixels, and pad them with white to squares: (N, 3, H, W) ->
    (N, 3, side, side)."""
    scale = side / max(images.shape[-2:])
    height, width = (max(round(s * scale), 1) for s in images.shape[-2:])
    resized = F.interpolate(images, size=(height, width), mode="nearest")
    return F.pad(resized, (0, side - width, 0, side - height), value=1.0)


def _grid(cells: Tensor, gap: int = 2) -> np.ndarray:
    """Join cells (rows, columns, 3, H, W) in [0, 1] into one picture (H', W', 3) uint8 with white gaps."""
    padded = F.pad(cells, (0, gap, 0, gap), value=1.0)
    picture = torch.cat([torch.cat(list(row), dim=2) for row in padded], dim=1)  # (3, H', W')
    return (picture.permute(1, 2, 0) * 255).round().byte().cpu().numpy()

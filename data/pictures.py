"""Pictures of the input of a run, as (H, W, 3) uint8 arrays.

Images are shown with their original colours, so the normalisation is undone. One channel is shown as gray, and two
channels are shown as red and green. Images with more channels show the first three as red, green and blue.

Shape letters: N images, C channels.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.batch import Batch
from tessera.encoders.base import Preprocessing
from tessera.encoders.images import PackedImages


def crops(batch: Batch, images: int = 8, side: int = 112) -> np.ndarray:
    """Return a picture of the crops of the first `images` images of a batch, as the encoder receives them.

    Each row holds the crops of one image, global crops first.
    """
    columns = []
    shown = min(images, len(batch))
    for view in batch.views:
        if isinstance(view.images, PackedImages):  # packed images have one crop per image, and the crops differ in size
            return panels([[image] for image in view.images.unpack()[:shown]], batch.preprocessing, side)
        per_crop = view.images.unflatten(0, (view.crops, -1))[:, :shown].float()  # (n, shown, C, H, W)
        columns += [resized(colours(crop, batch.preprocessing), side) for crop in per_crop]
    return grid(torch.stack(columns, dim=1))


def panels(rows: list[list[Tensor]], preprocessing: Preprocessing, side: int = 112) -> np.ndarray:
    """Join rows of normalised images (C, H, W) of any size into one picture.

    Each image is scaled to fit a square of `side` pixels.
    """
    cells = [[resized(colours(picture[None], preprocessing), side)[0] for picture in row] for row in rows]
    return grid(torch.stack([torch.stack(row) for row in cells]))


def colours(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Undo the normalisation of images and return them as RGB: (N, C, H, W) -> (N, 3, H, W) in [0, 1]."""
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = (images.float() * std + mean).clamp(0, 1)
    if pixels.shape[1] == 1:
        return pixels.expand(-1, 3, -1, -1)
    if pixels.shape[1] == 2:
        return torch.cat([pixels, torch.zeros_like(pixels[:, :1])], dim=1)
    return pixels[:, :3]


def resized(images: Tensor, side: int) -> Tensor:
    """Scale images to a longer side of `side` pixels, and pad them with white: (N, 3, H, W) -> (N, 3, side, side)."""
    scale = side / max(images.shape[-2:])
    height, width = (max(round(s * scale), 1) for s in images.shape[-2:])
    scaled = F.interpolate(images, size=(height, width), mode="nearest")
    return F.pad(scaled, (0, side - width, 0, side - height), value=1.0)


def grid(cells: Tensor, gap: int = 2) -> np.ndarray:
    """Join cells (rows, columns, 3, H, W) in [0, 1] into one picture (H', W', 3) uint8 with white gaps."""
    padded = F.pad(cells, (0, gap, 0, gap), value=1.0)
    picture = torch.cat([torch.cat(list(row), dim=2) for row in padded], dim=1)  # (3, H', W')
    return (picture.permute(1, 2, 0) * 255).round().byte().cpu().numpy()

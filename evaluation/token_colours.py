"""Show the tokens of encoders as colours: the first three principal components, aligned over several encoders.

Shape letters: Q images of S x S pixels, C channels, D features per token, T tokens of all images, h x w grid of tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.evaluation.tokens import patch_tokens

COMMON = 16
"""Side length, in cells, of the grid on which the tokens of two encoders are compared."""


@torch.inference_mode()
def principal_components(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the first three principal components of the tokens of all images, each with unit variance.

    (Q, C, S, S) -> (Q, 3, h, w) float64. If all tokens are equal, the components are 0. The signs of principal
    components are arbitrary. This function fixes them, so pictures are reproducible.
    """
    on_grid = patch_tokens(encoder, images, "fp32").permute(0, 2, 3, 1)  # (Q, h, w, D)
    _, rows, columns, _ = on_grid.shape
    tokens = on_grid.flatten(0, 2).double().cpu()  # (T, D)
    left, values, axes = torch.linalg.svd(tokens - tokens.mean(0), full_matrices=False)
    signs = axes[:3].gather(1, axes[:3].abs().argmax(1, keepdim=True)).sign().squeeze(1)
    used = values[:3] > 1e-9 * max(values[0].item(), 1e-30)
    kept = left[:, :3] * signs * used * len(tokens) ** 0.5
    kept = F.pad(kept, (0, 3 - kept.shape[1]))  # (T, 3)
    return kept.unflatten(0, (len(images), rows, columns)).permute(0, 3, 1, 2)


def common_colours(projected: Sequence[Tensor]) -> list[np.ndarray]:
    """Colour the tokens of several encoders in one colour space: each (Q, 3, h, w) -> (Q, h, w, 3) in [0, 1].

    The axes of a principal component analysis are arbitrary for each encoder. The components of every encoder are
    therefore rotated or reflected so that they are nearest to those of the first encoder at the same places of the
    same images (orthogonal Procrustes problem, Schoenemann 1966). A rotation keeps all distances between tokens.
    """
    flat = [_common_grid(one) for one in projected]  # (Q * COMMON**2, 3) each
    turned = [projected[0].permute(0, 2, 3, 1)]
    for one, points in zip(projected[1:], flat[1:], strict=True):
        left, _, right = torch.linalg.svd(points.T @ flat[0])
        turned.append(torch.einsum("qchw,cd->qhwd", one, left @ right))  # (Q, h, w, 3)
    reference = turned[0].flatten(0, 2)
    low, high = reference.quantile(0.02, dim=0), reference.quantile(0.98, dim=0)
    return [((one - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).numpy() for one in turned]


def _common_grid(projected: Tensor) -> Tensor:
    """Resample the tokens of an encoder to the common grid: (Q, 3, h, w) -> (Q * COMMON**2, 3)."""
    resampled = F.interpolate(projected, size=(COMMON, COMMON), mode="bilinear", align_corners=False)
    return resampled.permute(0, 2, 3, 1).flatten(0, 2)

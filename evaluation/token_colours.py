"""Show the tokens of an encoder as colours: their first three principal components.

Shape letters: Q images of S x S pixels, C channels, D features per token, T tokens of all images, h x w grid of tokens.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.evaluation.tokens import patch_tokens


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


def token_colours(projected: Tensor) -> np.ndarray:
    """Colour tokens by the principal components that `principal_components` returns: (Q, 3, h, w) -> (Q, h, w, 3).

    The values are from 0 to 1.
    """
    values = projected.permute(0, 2, 3, 1)
    low, high = (values.flatten(0, 2).quantile(share, dim=0) for share in (0.02, 0.98))
    return ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).numpy()

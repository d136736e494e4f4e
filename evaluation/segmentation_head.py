"""Linear segmentation head of DINOv2 (2304.07193) and its loss. The result does not depend on the number of processes,
up to rounding.

Shape letters: b images of this process, D features per token, h x w tokens and S x S pixels of an image, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.data.maps import IGNORED
from tessera.runtime.collectives import all_reduce_sum

RISE, EPSILON = 0.1, 1e-5  # momentum of the running mean and variance, and epsilon, of torch's batch norm


class Head(nn.Module):
    """Batch norm and 1 x 1 convolution: tokens (b, D, h, w) -> logits (b, K, h, w).

    In training mode, the mean and the variance are those of the tokens of all processes. The tokens must not need a
    gradient.
    """

    def __init__(self, dim: int, classes: int, seed: int) -> None:
        """
        Args:
            dim: width D of the tokens.
            classes: number of classes K.
            seed: seed of the initial weights, which have the standard deviation 0.01.
        """
        super().__init__()
        self.norm = nn.BatchNorm2d(dim, EPSILON)
        self.classifier = nn.Conv2d(dim, classes, 1)
        weight = 0.01 * torch.randn(classes, dim, 1, 1, generator=torch.Generator().manual_seed(seed))
        self.classifier.load_state_dict({"weight": weight, "bias": torch.zeros(classes)})

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token: (b, D, h, w) -> (b, K, h, w)."""
        norm = self.norm
        mean, variance = norm.running_mean, norm.running_var
        if self.training:
            mean, variance = self._update(tokens)
        return self.classifier(F.batch_norm(tokens, mean, variance, norm.weight, norm.bias, eps=EPSILON))

    @torch.no_grad()
    def _update(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and variance (D,) of the tokens of all processes, and update the running values."""
        x = tokens.double()
        count = all_reduce_sum(torch.tensor(x.numel() / x.shape[1], dtype=torch.float64, device=x.device))
        mean = all_reduce_sum(x.sum((0, 2, 3))) / count  # (D,)
        variance = all_reduce_sum((x - mean[:, None, None]).square().sum((0, 2, 3))) / count  # (D,)
        unbiased = variance * count / (count - 1).clamp(min=1)
        for running, new in ((self.norm.running_mean, mean), (self.norm.running_var, unbiased)):
            assert running is not None
            running.lerp_(new.to(running.dtype), RISE)
        return mean.to(tokens.dtype), variance.to(tokens.dtype)


def resized(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize logits bilinearly: (b, K, h, w) -> (b, K, *size).

    The result is that of `F.interpolate(logits, size, mode="bilinear")`. Matrix products replace that function, because
    its gradient on a GPU depends on the order of additions.
    """
    rows, columns = (
        F.interpolate(torch.eye(side, device=logits.device)[None], length, mode="linear")[0]  # (side, length)
        for side, length in zip(logits.shape[2:], size, strict=True)
    )
    return rows.T @ logits @ columns


def backward(logits: Tensor, targets: Tensor) -> None:
    """Compute the gradients of the mean cross-entropy over all pixels of all processes that are not ignored.

    The logits are resized for one image at a time, which bounds the memory.

    Args:
        logits: logits (b, K, h, w) of this process's images.
        targets: class of each pixel (b, S, S) int64, or 255 for ignored pixels.
    """
    pixels = all_reduce_sum((targets != IGNORED).sum()).clamp(min=1)
    leaf = logits.detach().requires_grad_()
    for image, target in zip(leaf.split(1), targets.split(1), strict=True):
        (cross_entropy(resized(image, (target.shape[1], target.shape[2])), target) / pixels).backward()
    logits.backward(leaf.grad)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropy over the pixels that are not ignored: (b, K, S, S), (b, S, S) -> ()."""
    seen = targets != IGNORED
    own = logits.gather(1, torch.where(seen, targets, 0)[:, None]).squeeze(1)  # (b, S, S)
    return (logits.logsumexp(1) - own).masked_fill(~seen, 0).sum()

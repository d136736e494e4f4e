"""The losses of this project as an adapter of `tessera conformance`.

`evaluation.references` describes the functions and the shapes of their arguments. They call the code that a training
step runs.
"""

import torch
from torch import Tensor, nn

from tessera.encoders.images import Mask
from tessera.pretrain.methods import lejepa, losses, mae
from tessera.pretrain.methods.cross_entropy import crop_loss, token_loss
from tessera.pretrain.methods.heads import FactoredLogits
from tessera.pretrain.methods.teacher_student import PendingCenter
from tessera.pretrain.optim import ema

koleo_loss, sinkhorn, gram_loss, sigreg = losses.koleo_loss, losses.sinkhorn, losses.gram_loss, lejepa.sigreg


def dino_loss(
    student: Tensor, teacher: Tensor, center: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    target = losses.teacher_distribution(teacher, center, teacher_temperature, "mean")
    return crop_loss(_factored(student), target, student_temperature)


def ibot_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    weights = losses.token_weights(_mask(mask)[0]).to(student.device)
    temperatures = {"student_temperature": student_temperature, "teacher_temperature": teacher_temperature}
    factors = _factored(student[mask]), _factored(teacher[mask])
    return token_loss(*factors, weights, center, **temperatures, centering="mean")[0]


def mae_loss(predicted: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
    return mae.mae_loss(predicted.flatten(0, 1), mae.normalized(patches.flatten(0, 1)), *_mask(mask))


def center_updates(logits: Tensor, momentum: float) -> Tensor:
    center, pending, centers = torch.zeros_like(logits[0, 0]), PendingCenter(), []
    for step, rows in enumerate(logits):
        pending.add(step, rows)
        pending.move(center, momentum)
        centers.append(center.clone())
    return torch.stack(centers)


def teacher_updates(weights: Tensor, momentum: float) -> Tensor:
    student, teacher = (nn.ParameterList([weights[0].clone()]) for _ in range(2))
    teachers = []
    for moved in weights[1:]:
        student[0] = moved
        ema.update(teacher, student, momentum)
        teachers.append(teacher[0].detach().clone())
    return torch.stack(teachers)


def _factored(logits: Tensor) -> FactoredLogits:
    return FactoredLogits(logits, torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device))


def _mask(hidden: Tensor) -> tuple[Mask, Tensor]:
    """Return a mask of images with one row of tokens, and the grids of the images."""
    grids = torch.tensor([[1, hidden.shape[1]]]).expand(len(hidden), 2)
    return Mask.from_hidden(hidden.flatten(), grids), grids

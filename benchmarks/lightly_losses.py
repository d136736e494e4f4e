"""The losses of lightly as an adapter of `tessera conformance`.

    pip install lightly
    cd benchmarks && tessera conformance lightly_losses

lightly has no Gram loss, and no MAE loss: the adapter uses its patch normalisation and torch's mean squared error.
"""

import torch
import torch.nn.functional as F
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss  # pyright: ignore[reportMissingImports]
from lightly.loss.lejepa_loss import SIGReg  # pyright: ignore[reportMissingImports]
from lightly.loss.swav_loss import sinkhorn as swav_sinkhorn  # pyright: ignore[reportMissingImports]
from lightly.models import utils  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

koleo_loss = KoLeoLoss()


def dino_loss(
    student: Tensor, teacher: Tensor, center: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    loss = DINOLoss(len(center), student_temp=student_temperature).to(center.device)
    loss.center.copy_(center)
    return loss(list(teacher), list(student), teacher_temperature)


def ibot_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    loss = IBOTPatchLoss(len(center), teacher_temperature, student_temperature).to(center.device)
    loss.center.center.copy_(center)
    return loss(teacher[mask], student[mask], mask.unsqueeze(1))


def sinkhorn(logits: Tensor, temperature: float) -> Tensor:
    return swav_sinkhorn(logits, iterations=3, epsilon=temperature)


def sigreg(embeddings: Tensor, directions: Tensor) -> Tensor:
    loss = SIGReg(num_vectors=directions.shape[1]).to(directions.device)
    loss._generate_unit_vectors = lambda *_: directions  # pyright: ignore[reportAttributeAccessIssue]
    return loss(embeddings)


def mae_loss(predicted: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(predicted[mask], utils.normalize_mean_var(patches)[mask])


def center_updates(logits: Tensor, momentum: float) -> Tensor:
    loss, centers = DINOLoss(logits.shape[-1], center_momentum=momentum).to(logits.device), []
    for rows in logits:
        loss.update_center(rows.unsqueeze(0))
        centers.append(loss.center.flatten().clone())
    return torch.stack(centers)


def teacher_updates(weights: Tensor, momentum: float) -> Tensor:
    teacher, teachers = nn.ParameterList([weights[0].clone()]).requires_grad_(False), []
    for moved in weights[1:]:
        utils.update_momentum(nn.ParameterList([moved]), teacher, momentum)
        teachers.append(teacher[0].clone())
    return torch.stack(teachers)

"""The losses of stable-pretraining as an adapter of `tessera conformance`.

    pip install stable-pretraining
    cd benchmarks && tessera conformance stable_pretraining_losses

stable-pretraining has no Gram loss. `koleo_loss` and `sigreg` are what its methods `DINOv3` and `LeJEPA` compute.
"""

import torch
from stable_pretraining.backbone.utils import TeacherStudentWrapper  # pyright: ignore[reportMissingImports]
from stable_pretraining.losses.dino import DINOv1Loss, iBOTPatchLoss  # pyright: ignore[reportMissingImports]
from stable_pretraining.losses.reconstruction import mae  # pyright: ignore[reportMissingImports]
from stable_pretraining.losses.utils import sinkhorn_knopp  # pyright: ignore[reportMissingImports]
from stable_pretraining.methods.dinov3 import _koleo_loss as koleo_loss  # noqa: F401 # pyright: ignore[reportMissingImports]
from stable_pretraining.methods.lejepa import EppsPulley, LeJEPA  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn


def dino_loss(
    student: Tensor, teacher: Tensor, center: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    loss = DINOv1Loss(student_temperature)
    loss.center = center
    return loss(student, loss.softmax_center_teacher(teacher, teacher_temperature))


def ibot_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    target = torch.softmax((teacher[mask] - center) / teacher_temperature, dim=-1)
    return iBOTPatchLoss(student_temperature)(student[mask], target)


def sinkhorn(logits: Tensor, temperature: float) -> Tensor:
    return sinkhorn_knopp(logits, temperature, num_samples=len(logits))


def sigreg(embeddings: Tensor, directions: Tensor) -> Tensor:
    test = EppsPulley().to(directions.device)

    def statistic(rows: Tensor) -> Tensor:
        return test(rows @ directions).mean()

    return LeJEPA._compute_loss(embeddings, 2, statistic, 1.0)[2]  # pyright: ignore[reportArgumentType]


def mae_loss(predicted: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
    return mae(patches, predicted, mask.float(), norm_pix_loss=True)


def center_updates(logits: Tensor, momentum: float) -> Tensor:
    loss, centers = DINOv1Loss(center_momentum=momentum), []
    for rows in logits:
        loss.update_center(rows.unsqueeze(0))
        loss.apply_center_update()
        assert loss.center is not None
        centers.append(loss.center.flatten().clone())
    return torch.stack(centers)


def teacher_updates(weights: Tensor, momentum: float) -> Tensor:
    student, teachers = nn.ParameterList([weights[0].clone()]), []
    both = TeacherStudentWrapper(student, base_ema_coefficient=momentum)
    for moved in weights[1:]:
        student[0] = moved
        both.update_teacher()
        teachers.extend(parameter.clone() for parameter in both.teacher.parameters())
    return torch.stack(teachers)

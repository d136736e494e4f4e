"""The authors' code of the papers as an adapter of `tessera conformance`.

git clone https://github.com/facebookresearch/dino   # and dinov2, dinov3, mae, and rbalestr-lab/lejepa
export PYTHONPATH=$PWD/dino:$PWD/dinov2:$PWD/dinov3:$PWD/mae:$PWD/lejepa
cd benchmarks && tessera conformance official_losses
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from dinov2.loss import DINOLoss as DINOv2Loss  # pyright: ignore[reportMissingImports]
from dinov2.loss import KoLeoLoss, iBOTPatchLoss  # pyright: ignore[reportMissingImports]
from dinov3.loss import GramLoss  # pyright: ignore[reportMissingImports]
from lejepa.univariate import EppsPulley  # pyright: ignore[reportMissingImports]
from main_dino import DINOLoss  # pyright: ignore[reportMissingImports]
from models_mae import MaskedAutoencoderViT  # pyright: ignore[reportMissingImports]
from torch import Tensor

if not dist.is_initialized():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

koleo_loss = KoLeoLoss()
gram_loss = GramLoss(apply_norm=True, remove_neg=False)


def dino_loss(
    student: Tensor, teacher: Tensor, center: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    loss = DINOLoss(len(center), len(student), teacher_temperature, teacher_temperature, 0, 1, student_temperature)
    loss.center = center
    return loss(student.flatten(0, 1), teacher.flatten(0, 1), 0)


def ibot_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    center: Tensor,
    student_temperature: float,
    teacher_temperature: float,
) -> Tensor:
    loss = iBOTPatchLoss(len(center), student_temperature)
    loss.center = center
    target = loss.softmax_center_teacher(teacher[mask], teacher_temperature)
    return loss.forward_masked(student[mask], target, mask)


def sinkhorn(logits: Tensor, temperature: float) -> Tensor:
    return DINOv2Loss(logits.shape[1]).sinkhorn_knopp_teacher(logits, temperature)


def sigreg(embeddings: Tensor, directions: Tensor) -> Tensor:
    return EppsPulley()(embeddings @ directions).mean()


def mae_loss(predicted: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
    model = SimpleNamespace(patchify=lambda images: images, norm_pix_loss=True)
    return MaskedAutoencoderViT.forward_loss(model, patches, predicted, mask)


def center_updates(logits: Tensor, momentum: float) -> Tensor:
    loss, centers = DINOLoss(logits.shape[-1], 2, 0.04, 0.04, 0, 1, center_momentum=momentum), []
    for rows in logits:
        loss.update_center(rows)
        centers.append(loss.center.flatten())
    return torch.stack(centers)

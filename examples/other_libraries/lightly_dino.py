"""DINO of lightly as an adapter of `tessera compare`.

    python -m venv lightly && lightly/bin/pip install lightly==1.6.0 tessera-ssl
    tessera compare ... --others '{"lightly_dino": "lightly/bin/python examples/other_libraries/lightly_dino.py"}'

Augmentation, head, loss, schedules and the update of the teacher are those of lightly. The settings are those of its
benchmark on ImageNet (benchmarks/imagenet/vitb16), with the head and the momentum of its benchmark on Imagenette, which
has smaller images. As in its benchmark on CIFAR-10, small crops are not blurred.
"""

import copy

import torch
from lightly.loss import DINOLoss  # pyright: ignore[reportMissingImports]
from lightly.models import utils  # pyright: ignore[reportMissingImports]
from lightly.models.modules import DINOProjectionHead  # pyright: ignore[reportMissingImports]
from lightly.transforms import DINOTransform  # pyright: ignore[reportMissingImports]
from lightly.utils.scheduler import (  # pyright: ignore[reportMissingImports]
    cosine_schedule,
    cosine_warmup_schedule,
)
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.extras.compare.other import Task

PROTOTYPES, PARTS = 2048, 100_000  # schedules have this many parts


class Adapter:
    batch_size = 128

    def __init__(self, student: Encoder, task: Task) -> None:
        self.student, self.encoder, self.autocast = student, copy.deepcopy(student).requires_grad_(False), task.autocast
        heads = [DINOProjectionHead(student.dim, 2048, 256, PROTOTYPES, batch_norm=True) for _ in range(2)]
        self.head, self.teacher_head = (head.to(task.device) for head in heads)
        self.teacher_head.load_state_dict(self.head.state_dict())
        self.teacher_head.requires_grad_(False)
        self.loss = DINOLoss(output_dim=PROTOTYPES).to(task.device)
        blur = (1.0, 0.1, 0.5) if task.size >= 128 else (0, 0, 0)
        self.views = DINOTransform(task.size, local_crop_size=task.size // 2, gaussian_blur=blur)
        decayed, others = utils.get_weight_decay_parameters([student, self.head])
        self.optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])

    def step(self, views: list[Tensor], done: float) -> None:
        part, peak = int(done * PARTS), 5e-4 * self.batch_size / 256
        for group in self.optimizer.param_groups:
            group["lr"] = cosine_warmup_schedule(part, PARTS, peak, peak / 1000, PARTS // 10, 0.0)
        self.optimizer.param_groups[0]["weight_decay"] = cosine_schedule(part, PARTS, 0.04, 0.4)
        with self.autocast():
            with torch.no_grad():
                targets = [self.teacher_head(self.encoder(view).pooled) for view in views[:2]]
            outputs = [self.head(self.student(torch.cat(crops)).pooled) for crops in (views[:2], views[2:])]
            loss = self.loss(targets, list(torch.cat(outputs).chunk(len(views))), teacher_temp=0.04)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        utils.update_momentum(self.student, self.encoder, 0.99)
        utils.update_momentum(self.head, self.teacher_head, 0.99)

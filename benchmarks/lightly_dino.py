"""Pretrain an encoder with the DINO of the library lightly, as a baseline for benchmarks/learning.py.

    pip install lightly
    python benchmarks/lightly_dino.py --train TRAIN_SHARDS --output FOLDER --minutes 60 [--encoder vit_tiny --size 64]

The loss, the head, the augmentation and the update of the teacher are lightly's. The encoder is built by this project.
The head and the augmentation have the settings of lightly's benchmark on Imagenette: a head with batch norm, layers of
width 2,048, 2,048 and 256, and 2,048 prototypes; colour strength 0.5; and blur with probability 0.5 in the first global
crop only. The optimizer has the settings of lightly's ViT benchmark: AdamW with learning rate 5e-4 * batch / 256,
weight decay from 0.04 to 0.4, and teacher momentum from 0.996 to 1. The teacher's encoder is written to
FOLDER/encoder.safetensors, which is an input of evaluation/knn.py and evaluation/linear_probe.py.
"""

import copy
import tarfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tessera import encoders
from tessera.data.shards import expand
from tessera.encoders.base import Encoder
from tessera.pretrain.optim.schedules import cosine
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Settings, parse

PROTOTYPES = 2048


class LightlyBenchmark(Settings):
    """Pretrain with lightly's DINO for a limited time."""

    train: str
    """SHARDS to train on"""
    output: Path
    """folder to which encoder.safetensors is written"""
    minutes: float = Field(default=60.0, gt=0)
    """maximum training time in minutes, including the time to read the images into memory"""
    encoder: str = "vit_tiny"
    """encoder variant"""
    size: int = 64
    """side of a global crop in pixels; the side of a local crop is half as long"""
    batch_size: int = 64
    """number of images per step"""
    steps: int = 4000
    """length of the schedules in steps; training ends after these steps or after --minutes, whichever comes first"""
    seed: int = 0
    """seed of torch's random generator"""


class Images(Dataset[list[Tensor]]):
    """Images of shards. The encoded files are kept in memory, and each access decodes and transforms one image."""

    def __init__(self, shards: str, transform: Any) -> None:
        self.encoded: list[bytes] = []
        self.transform = transform
        for path in expand(shards):
            with tarfile.open(path) as shard:
                members = [member for member in shard if member.name.endswith((".jpg", ".png"))]
                self.encoded += [file.read() for file in map(shard.extractfile, members) if file]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.transform(Image.open(BytesIO(self.encoded[index])).convert("RGB"))


def train(settings: LightlyBenchmark) -> Encoder:
    """Train, and return the teacher's encoder."""
    from lightly.loss import DINOLoss  # pyright: ignore[reportMissingImports]
    from lightly.models.modules import DINOProjectionHead  # pyright: ignore[reportMissingImports]
    from lightly.models.utils import update_momentum  # pyright: ignore[reportMissingImports]
    from lightly.transforms.dino_transform import DINOTransform  # pyright: ignore[reportMissingImports]

    s, started = settings, time.perf_counter()
    torch.manual_seed(s.seed)
    transform = DINOTransform(global_crop_size=s.size, local_crop_size=s.size // 2, gaussian_blur=(0.5, 0, 0))
    loader = DataLoader(Images(s.train, transform), s.batch_size, shuffle=True, drop_last=True, num_workers=1)
    student = encoders.build(s.encoder)
    head, teacher_head = (
        DINOProjectionHead(student.dim, 2048, 256, PROTOTYPES, batch_norm=True, freeze_last_layer=1) for _ in range(2)
    )
    teacher_head.load_state_dict(head.state_dict())  # weight norm does not support deepcopy
    teacher_head.requires_grad_(False)
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    criterion = DINOLoss(output_dim=PROTOTYPES, warmup_teacher_temp_epochs=5)
    optimizer = torch.optim.AdamW([*student.parameters(), *head.parameters()])
    step, epoch = 0, 0
    while step < s.steps and time.perf_counter() - started < 60 * s.minutes:
        for views in loader:
            (group,) = optimizer.param_groups
            group["lr"] = cosine(step, s.steps, 5e-4 * s.batch_size / 256, 1e-6, s.steps // 10)
            group["weight_decay"] = cosine(step, s.steps, 0.04, 0.4)
            with torch.no_grad():
                targets = [teacher_head(teacher(view).pooled) for view in views[:2]]
            loss = criterion(targets, [head(student(view).pooled) for view in views], epoch=epoch)
            optimizer.zero_grad()
            loss.backward()
            head.cancel_last_layer_gradients(epoch)
            torch.nn.utils.clip_grad_norm_([*student.parameters(), *head.parameters()], 3.0)
            optimizer.step()
            momentum = cosine(step, s.steps, 0.996, 1.0)
            update_momentum(student, teacher, momentum)
            update_momentum(head, teacher_head, momentum)
            step += 1
            if step % 50 == 0:
                print(f"step {step}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)
            if step == s.steps or time.perf_counter() - started > 60 * s.minutes:
                break
        epoch += 1
    print(f"{step} steps, {epoch} epochs, {time.perf_counter() - started:.0f} s")
    return teacher


if __name__ == "__main__":
    with exit_on_user_error():
        settings = parse(LightlyBenchmark)
        settings.output.mkdir(parents=True, exist_ok=True)
        encoders.save(train(settings), settings.output / "encoder.safetensors")

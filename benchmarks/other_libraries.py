"""Pretrain an encoder of this project with a method of another library for a given CPU time, as a baseline.

    pip install lightly==1.6.0 stable-pretraining==0.1.8
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/other_libraries.py --library lightly --method dino \\
        --train TRAIN_SHARDS --output FOLDER [--cpu_minutes 12] [--precision bf16]
    git clone https://github.com/facebookresearch/dino
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/other_libraries.py --library official --method dino --code dino \\
        --train TRAIN_SHARDS --output FOLDER

Losses, heads, augmentations and the update of the teacher are those of the library. The encoder is built by this
project, with the initial weights of its own runs on small data. It is written to FOLDER/encoder.safetensors, which is
an input of evaluation/knn.py and evaluation/linear_probe.py. All work takes place in one process, and the schedules are
functions of the used share of the CPU time, so that other jobs on the machine change the duration but not the result.

The settings are those of the library's own benchmarks: for lightly, benchmarks/imagenet/vitb16, with the head and the
teacher momentum of DINO from its benchmark on Imagenette; for stable-pretraining, benchmarks/imagenet10, which is
Imagenette, in 20 epochs. The official code of DINO has its own defaults for 100 epochs. Three settings differ. Crops
have 64 and 32 pixels. They are not blurred, because both libraries do not blur the small images of CIFAR-10. DINO of
stable-pretraining and the official DINO have 2,048 prototypes, as many as lightly has for Imagenette: their 65,536
halve the speed on a CPU.
"""

import copy
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tessera import encoders
from tessera.data.shards import expand
from tessera.encoders.base import Encoder
from tessera.pretrain.optim.schedules import cosine
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Settings, parse


class LibraryBenchmark(Settings):
    """Pretrain with another library for a limited CPU time."""

    library: Literal["lightly", "stable_pretraining", "official"] = "lightly"
    """library: lightly, stable_pretraining or official"""
    code: Path = Path("dino")
    """clone of github.com/facebookresearch/dino, for `library official`"""
    method: Literal["dino", "lejepa"] = "dino"
    """method: dino or lejepa"""
    train: str
    """SHARDS to train on"""
    output: Path
    """folder to which encoder.safetensors is written"""
    cpu_minutes: float = Field(default=12.0, gt=0)
    """CPU time of the training in minutes, including the time to read, decode and transform the images"""
    encoder: str = "vit_mini"
    """encoder variant"""
    size: int = 64
    """side of a global crop in pixels; the side of a local crop is half as long"""
    batch_size: int = 128
    """number of images per step; default: the number in the benchmarks of both libraries"""
    prototypes: int = 2048
    """number of prototypes of DINO"""
    precision: Literal["fp32", "bf16"] = "bf16"
    """precision of the forward pass: fp32 or bf16"""
    seed: int = 0
    """seed of torch's random generator"""


@dataclass(frozen=True)
class Recipe:
    """A method of another library, with its settings."""

    views: Callable[[Image.Image], list[Tensor]]
    """Augmentation: returns two global crops and then the local crops, each (3, side, side)."""
    loss: Callable[[list[Tensor], float], Tensor]
    """Loss of a batch of views (B, 3, side, side), at a point of the run from 0 to 1."""
    parameters: list[nn.Parameter]
    """Parameters with weight decay."""
    encoder: Encoder
    """Encoder to evaluate: the teacher's, if there is one."""
    rate: float
    """Peak of the learning rate. It falls to `last_rate`."""
    last_rate: float
    warmup: float
    """Length of the warm-up, as a share of the run."""
    weight_decay: tuple[float, float] = (0.05, 0.05)
    """First and last value."""
    betas: tuple[float, float] = (0.9, 0.999)
    undecayed: list[nn.Parameter] = field(default_factory=list)
    """Parameters without weight decay."""
    clip: Callable[[float], None] = lambda done: None
    """Change the gradients before a step."""
    update: Callable[[float], None] = lambda done: None
    """Update the teacher after a step."""


class Pooled(nn.Module):
    """An encoder of this project whose output is the pooled feature (B, D)."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder(images).pooled


class Images(Dataset[list[Tensor]]):
    """Images of shards. The encoded files are kept in memory, and each access decodes and transforms one image."""

    def __init__(self, shards: str, transform: Callable[[Image.Image], list[Tensor]]) -> None:
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


def scheduled(done: float, start: float, end: float, warmup: float = 0.0) -> float:
    """Return a value that rises linearly to `start` in the share `warmup` of a run, then follows a cosine to `end`.

    `done` is the point of the run, from 0 to 1.
    """
    parts = 100_000
    return cosine(round(done * parts), parts, start, end, round(warmup * parts))


def lightly_dino(encoder: Encoder, s: LibraryBenchmark) -> Recipe:
    from lightly.loss import DINOLoss  # pyright: ignore[reportMissingImports]
    from lightly.models import utils  # pyright: ignore[reportMissingImports]
    from lightly.models.modules import DINOProjectionHead  # pyright: ignore[reportMissingImports]
    from lightly.transforms import DINOTransform  # pyright: ignore[reportMissingImports]

    head, teacher_head = (DINOProjectionHead(encoder.dim, 2048, 256, s.prototypes, batch_norm=True) for _ in range(2))
    teacher_head.load_state_dict(head.state_dict())  # weight norm does not support deepcopy
    teacher_head.requires_grad_(False)
    teacher = copy.deepcopy(encoder).requires_grad_(False)
    criterion = DINOLoss(output_dim=s.prototypes)

    def loss(views: list[Tensor], done: float) -> Tensor:
        with torch.no_grad():
            targets = [teacher_head(teacher(view).pooled) for view in views[:2]]
        outputs = [head(encoder(torch.cat(part)).pooled) for part in (views[:2], views[2:])]
        return criterion(targets, list(torch.cat(outputs).chunk(len(views))), teacher_temp=0.04)

    def update(done: float) -> None:
        utils.update_momentum(encoder, teacher, 0.99)
        utils.update_momentum(head, teacher_head, 0.99)

    views = DINOTransform(s.size, local_crop_size=s.size // 2, gaussian_blur=(0, 0, 0))
    decayed, undecayed = utils.get_weight_decay_parameters([encoder, head])
    rate = 5e-4 * s.batch_size / 256
    optim: dict[str, Any] = {"weight_decay": (0.04, 0.4), "undecayed": undecayed}
    return Recipe(views, loss, decayed, teacher, rate, rate / 1000, 0.1, update=update, **optim)


def lightly_lejepa(encoder: Encoder, s: LibraryBenchmark) -> Recipe:
    from lightly.loss import LeJEPALoss  # pyright: ignore[reportMissingImports]
    from lightly.models.modules import LeJEPAProjectionHead  # pyright: ignore[reportMissingImports]
    from lightly.transforms import DINOTransform  # pyright: ignore[reportMissingImports]

    head, criterion = LeJEPAProjectionHead(encoder.dim), LeJEPALoss()

    def loss(views: list[Tensor], done: float) -> Tensor:
        near, far = (head(encoder(torch.cat(part)).pooled).float() for part in (views[2:], views[:2]))
        near, far = (part.unflatten(0, (-1, len(views[0]))) for part in (near, far))
        return criterion(local_proj=near, global_proj=far)

    views = DINOTransform(s.size, (0.3, 1.0), s.size // 2, (0.05, 0.3), gaussian_blur=(0, 0, 0))
    return Recipe(views, loss, [*encoder.parameters(), *head.parameters()], encoder, 5e-4, 5e-7, 0.01)


def stable_pretraining_views(s: LibraryBenchmark, split: float) -> Callable[[Image.Image], list[Tensor]]:
    """Return the augmentation of the benchmarks on Imagenette. `split` is the largest area of a local crop."""
    import stable_pretraining  # pyright: ignore[reportMissingImports]
    from stable_pretraining.data import transforms  # pyright: ignore[reportMissingImports]

    def crop(side: int, scale: tuple[float, float]) -> Any:
        return transforms.Compose(
            transforms.RGB(),
            transforms.RandomResizedCrop((side, side), scale=scale),
            transforms.RandomHorizontalFlip(p=0.5),
            transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.RandomSolarize(threshold=128, p=0.2),
            transforms.ToImage(**stable_pretraining.data.static.ImageNet),
        )

    crops = [crop(s.size, (split, 1.0))] * 2 + [crop(s.size // 2, (0.05, split))] * 6
    views = transforms.MultiViewTransform(crops)
    return lambda image: [view["image"] for view in views({"image": image})["views"]]


def stable_pretraining_dino(encoder: Encoder, s: LibraryBenchmark) -> Recipe:
    from stable_pretraining.methods.dino import DINO  # pyright: ignore[reportMissingImports]

    model = DINO(Pooled(encoder), n_prototypes=s.prototypes, warmup_epochs_temperature_teacher=0)

    def loss(views: list[Tensor], done: float) -> Tensor:
        model.temperature_teacher = 0.04 + 0.03 * min(2 * done, 1.0)  # rises in 10 of 20 epochs
        return model(global_views=views[:2], local_views=views[2:]).loss

    def update(done: float) -> None:
        for part in (model.backbone, model.projector):
            part.ema_coefficient.fill_(scheduled(done, 0.996, 1.0))
            part.update_teacher()

    views = stable_pretraining_views(s, 0.4)
    parameters = [*encoder.parameters(), *model.projector.student.parameters()]
    teacher = model.backbone.teacher.encoder
    return Recipe(views, loss, parameters, teacher, 5e-4, 0.0, 0.01, betas=(0.9, 0.95), update=update)


def stable_pretraining_lejepa(encoder: Encoder, s: LibraryBenchmark) -> Recipe:
    from stable_pretraining.backbone import MLP  # pyright: ignore[reportMissingImports]
    from stable_pretraining.methods.lejepa import LeJEPA  # pyright: ignore[reportMissingImports]

    layers = MLP(512, [2048, 2048, 512], norm_layer="batch_norm", activation_layer=nn.ReLU)
    projector = nn.Sequential(nn.Linear(encoder.dim, 512), layers)  # as by default, for the width of this encoder
    model = LeJEPA("test_vit", projector=projector)
    model.backbone = Pooled(encoder)  # in place of timm's test_vit

    def loss(views: list[Tensor], done: float) -> Tensor:
        return model(global_views=views[:2], local_views=views[2:]).loss

    parameters = [*encoder.parameters(), *projector.parameters()]
    return Recipe(stable_pretraining_views(s, 0.3), loss, parameters, encoder, 4e-4, 4e-6, 0.1)


def official_dino(encoder: Encoder, s: LibraryBenchmark) -> Recipe:
    sys.path.insert(0, str(s.code.resolve()))
    import main_dino  # pyright: ignore[reportMissingImports]
    import utils  # pyright: ignore[reportMissingImports]

    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    backbones = [encoder, copy.deepcopy(encoder)]
    student, teacher = (
        utils.MultiCropWrapper(Pooled(backbone), main_dino.DINOHead(encoder.dim, s.prototypes))
        for backbone in backbones
    )
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    criterion = main_dino.DINOLoss(s.prototypes, 2 + 8, 0.04, 0.04, 0, 1)
    views = main_dino.DataAugmentationDINO((0.4, 1.0), (0.05, 0.4), 8)
    for pipeline in (views.global_transfo1, views.global_transfo2, views.local_transfo):
        pipeline.transforms = [part for part in pipeline.transforms if not isinstance(part, utils.GaussianBlur)]
        pipeline.transforms[0].size = (s.size // 2,) * 2 if pipeline is views.local_transfo else (s.size,) * 2

    def loss(views: list[Tensor], done: float) -> Tensor:
        return criterion(student(views).float(), teacher(views[:2]).float(), 0)

    def clip(done: float) -> None:
        utils.clip_gradients(student, 3.0)
        utils.cancel_gradients_last_layer(int(100 * done), student, 1)  # the first of 100 epochs

    @torch.no_grad()
    def update(done: float) -> None:
        momentum = scheduled(done, 0.996, 1.0)
        for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
            theirs.mul_(momentum).add_((1 - momentum) * ours)

    decayed, undecayed = (group["params"] for group in utils.get_params_groups(student))
    rate = 5e-4 * s.batch_size / 256
    optim: dict[str, Any] = {"weight_decay": (0.04, 0.4), "undecayed": undecayed, "clip": clip, "update": update}
    return Recipe(views, loss, decayed, backbones[1], rate, 1e-6, 0.1, **optim)


RECIPES = {
    ("lightly", "dino"): lightly_dino,
    ("lightly", "lejepa"): lightly_lejepa,
    ("stable_pretraining", "dino"): stable_pretraining_dino,
    ("stable_pretraining", "lejepa"): stable_pretraining_lejepa,
    ("official", "dino"): official_dino,
}


def batches(loader: DataLoader[list[Tensor]]) -> Iterator[list[Tensor]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def train(settings: LibraryBenchmark) -> Encoder:
    """Train, and return the encoder to evaluate: the teacher's, if there is one."""
    s = settings
    torch.manual_seed(s.seed)
    encoder = encoders.build(s.encoder, image_size=s.size, init="xavier", position_init="sincos")
    recipe = RECIPES[s.library, s.method](encoder, s)
    groups = [{"params": recipe.parameters}, {"params": recipe.undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas)
    limit, started = 60 * s.cpu_minutes, time.process_time()
    loader = DataLoader(Images(s.train, recipe.views), s.batch_size, shuffle=True, drop_last=True)
    for step, views in enumerate(batches(loader)):
        done = (time.process_time() - started) / limit
        if step % 20 == 0 or done >= 1:
            print(f"{step} steps, {step * s.batch_size / (done * limit):.1f} images per CPU second", flush=True)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = scheduled(done, recipe.rate, recipe.last_rate, recipe.warmup)
        optimizer.param_groups[0]["weight_decay"] = scheduled(done, *recipe.weight_decay)
        with torch.autocast("cpu", torch.bfloat16, enabled=s.precision == "bf16"):
            loss = recipe.loss(views, done)
        optimizer.zero_grad()
        loss.backward()
        recipe.clip(done)
        optimizer.step()
        recipe.update(done)
    return recipe.encoder


if __name__ == "__main__":
    with exit_on_user_error():
        settings = parse(LibraryBenchmark)
        settings.output.mkdir(parents=True, exist_ok=True)
        encoders.save(train(settings), settings.output / "encoder.safetensors")

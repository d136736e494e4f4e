"""Fine-tuning of an encoder with labels, as in MAE (2111.06377): a linear classifier on the pooled features.

The recipe is that of MAE's main_finetune.py: layer-wise learning-rate decay, RandAugment, random erasing, mixup,
CutMix, label smoothing and drop path, and for a ViT the mean of the patch tokens with a new final norm. The whole
encoder is trained, or only its last blocks, or low-rank updates of its weights (LoRA, 2106.09685).

Shapes: B images with C channels and H x W pixels; D width of the encoder; K classes.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from tessera import encoders
from tessera.data.batch import Batch
from tessera.data.colors import Share, Strength
from tessera.data.crops import Areas, Degrees, RandomCrop, RandomCropConfig, Ratios
from tessera.data.pixels import normalize, to_pixels
from tessera.encoders.base import Encoder, Preprocessing
from tessera.encoders.images import Images
from tessera.encoders.randomness import BITS, next_keys
from tessera.encoders.segments import copy_to_device
from tessera.encoders.unused import freeze_unused, unused_parameters
from tessera.encoders.vit import ViT
from tessera.extras.finetune.lora import add_lora
from tessera.extras.finetune.mixing import draw_erased, draw_mix, erase, generators, mix_images, partners
from tessera.extras.finetune.rand_augment import HIGHEST, draw_operations, rand_augment
from tessera.pretrain.methods.method import Method, RunSize, full_precision
from tessera.pretrain.optim.adamw import OptimConfig, flat_blocks, layers
from tessera.pretrain.optim.running_statistics import running_statistics
from tessera.runtime.settings import Section, SettingsError

UNDECAYED = ("pos_embed", "cls_token", "dist_token", "reg_token")
"""Parameters whose names contain one of these substrings have no weight decay, as in MAE's fine-tuning."""
HEAD_STD = 2e-5
"""Standard deviation of the classifier's initial weights, as in MAE's main_finetune.py."""


class FinetuneConfig(Section):
    """Settings of fine-tuning with labels."""

    size: int | None = Field(default=None, ge=1)
    """side length of a crop, in pixels; default: the size that the encoder was built for"""
    scale: Areas = (0.08, 1.0)
    """smallest and largest area of a box before the resize, as a share of the image's area"""
    ratio: Ratios = (3 / 4, 4 / 3)
    """smallest and largest ratio of width to height of a box before the resize"""
    flip: Share = 0.5
    """probability that a crop is mirrored left to right"""
    rotation: Degrees = 0.0
    """largest rotation of a crop about its centre in either direction, in degrees; corners are filled by reflection"""
    classes: int | None = Field(default=None, ge=2)
    """number of classes; labels are 0 to classes - 1; default: counted in the labels of the training shards"""
    mixup: Strength = 0.8
    """parameter a of mixup, whose mixing weights have the distribution Beta(a, a); 0: no mixup"""
    cutmix: Strength = 1.0
    """parameter a of CutMix, where the share of the area to keep has the distribution Beta(a, a); 0: no CutMix"""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """share of the target that is spread equally over all classes"""
    randaugment: float = Field(default=9.0, ge=0, le=HIGHEST)
    """magnitude of RandAugment, which applies up to two operations to a crop; 0: no RandAugment"""
    erasing: Share = 0.25
    """probability that a box of a crop is replaced by noise (random erasing)"""
    head_steps: int = Field(default=0, ge=0)
    """number of steps at the start in which only the classifier is trained (2202.10054)"""
    frozen_blocks: int = Field(default=0, ge=0)
    """number of first blocks of the encoder that keep their weights, with everything before these blocks"""
    lora_rank: int = Field(default=0, ge=0)
    """rank of low-rank updates (LoRA, 2106.09685), which are trained in place of the encoder's own weights; 0: the
    encoder's own weights are trained"""
    lora_alpha: float | None = Field(default=None, gt=0)
    """factor of the low-rank updates, which is divided by lora_rank; default: lora_rank"""
    lora_layers: tuple[str, ...] | None = None
    """names of the linear layers in the blocks that get a low-rank update, such as qkv,fc1; default: those of
    attention"""


def resolve(config: FinetuneConfig, optim: OptimConfig, size: RunSize) -> tuple[FinetuneConfig, OptimConfig]:
    """Return the settings of fine-tuning and of the optimizer. Missing settings get MAE's values for ViT-B.

    The published warm-up is 5 of 100 epochs. Shorter runs have a shorter warm-up. Small data sets have a higher
    learning rate (docs/evaluation.md). Low-rank updates have the same learning rate in all layers.
    """
    defaults = {
        "lr": 5e-4 if size.large else size.small_lr(8e-3),
        "min_lr": 1e-6,
        "warmup_steps": min(5 * size.epoch, size.steps // 20),
        "weight_decay": 0.05,
        "weight_decay_end": 0.05,
        "reach_lr_in_warmup": False,
        "layer_decay": 1.0 if config.lora_rank else 0.65,
        "betas": (0.9, 0.999),
        "clip": 0.0,
    }
    return config.filled({"classes": size.classes}), optim.filled(defaults)


def mixed_cross_entropy(logits: Tensor, labels: Tensor, partner: Tensor, share: Tensor, smoothing: float) -> Tensor:
    """Return the cross entropy between predictions and mixed, smoothed labels (1512.00567), as a float32 scalar.

        target[b, k] = share[b] * smooth(labels[b], k) + (1 - share[b]) * smooth(labels[partner[b]], k)
        smooth(label, k) = (1 - smoothing) * (k == label) + smoothing / K
        loss = mean over b of  -sum over k of  target[b, k] * log_softmax(logits[b])[k]

    Args:
        logits: class scores, (B, K) float32.
        labels: class index of each image, (B,) int64.
        partner: index of the image with which each image is mixed, (B,) int64.
        share: weight of each image's own label, (B,) float32.
        smoothing: share of the target that is spread equally over all classes.
    """
    own = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)  # (B,)
    other = F.cross_entropy(logits, labels[partner], reduction="none", label_smoothing=smoothing)  # (B,)
    return (share * own + (1 - share) * other).mean()


def _freeze(encoder: Encoder, config: FinetuneConfig, side: int) -> None:
    """Freeze the weights of an encoder that the settings exclude from training, and add low-rank updates.

    Raises:
        ValueError: the settings exclude each other, or do not fit the encoder.
    """
    blocks = len(flat_blocks(encoder))
    if config.lora_rank and config.frozen_blocks:
        raise ValueError("lora_rank freezes all blocks. Set either lora_rank or frozen_blocks.")
    if config.frozen_blocks > blocks:
        raise ValueError(f"frozen_blocks is {config.frozen_blocks}, but the encoder has {blocks} blocks.")
    if config.lora_rank:
        add_lora(encoder, config.lora_rank, config.lora_alpha or config.lora_rank, config.lora_layers)
        trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
        if unused := sorted(trained & unused_parameters(encoder, [side])):
            raise ValueError(
                f"A low-rank update would have no effect, because the encoder reads the weight of the layer "
                f"{unused[0].rpartition('.')[0]} without calling the layer. Choose other lora_layers."
            )
    elif config.lora_alpha is not None or config.lora_layers is not None:
        raise ValueError("lora_alpha and lora_layers have no effect without lora_rank. Set lora_rank.")
    if config.frozen_blocks:
        for _, parameter, layer in layers(encoder):
            if layer <= config.frozen_blocks:
                parameter.requires_grad_(False)
    if (config.lora_rank or config.frozen_blocks or config.head_steps) and running_statistics(encoder):
        raise ValueError(
            "This encoder has batch norm, whose statistics change although weights are frozen. "
            "Set lora_rank, frozen_blocks and head_steps to 0."
        )


class Finetune(Method):
    """The fine-tuning method: an encoder, and a linear classifier of the encoder's pooled features."""

    Config = FinetuneConfig
    resolve = staticmethod(resolve)
    needs_all_channels = True  # images are mixed pixel by pixel
    small_settings: ClassVar[dict[str, Any]] = {"size": 16, "classes": 10}
    supervised = True

    def __init__(self, encoder: Encoder, config: FinetuneConfig, steps: int) -> None:
        """Build the classifier for an encoder. `config` holds resolved settings.

        Raises:
            ValueError: the number of classes is not set, or the encoder was built for images that are not square.
        """
        super().__init__()
        del steps
        if config.classes is None:
            raise ValueError("The number of classes is not set. Set finetune.classes.")
        side = config.size or encoder.settings["image_size"]
        if not isinstance(side, int):
            raise ValueError(f"The encoder was built for images of {side} pixels. Set finetune.size to one number.")
        self.config, self.image_size, self.classes = config, side, config.classes
        self.together = 2 if config.mixup or config.cutmix else 1  # `mixing` mixes pairs of neighbours
        freeze_unused(encoder, [side])
        _freeze(encoder, config, side)
        encoder.no_weight_decay = (*encoder.no_weight_decay, *UNDECAYED)
        self.encoder = encoder
        self.head = nn.Linear(encoder.dim, config.classes)
        nn.init.trunc_normal_(self.head.weight, std=HEAD_STD)
        nn.init.zeros_(self.head.bias)

    @staticmethod
    def encoder_defaults(config: FinetuneConfig, variant: str, size: RunSize) -> dict[str, Any]:
        del size
        wanted: dict[str, Any] = {"drop_path": 0.1, "mask_token": False}
        if config.size is not None:
            wanted["image_size"] = config.size
        if encoders.family(variant) is ViT and encoders.VARIANTS[variant].get("positions") != "rope":
            wanted |= {"pool": "mean", "positions": "learned"}
        return encoders.supported(variant, wanted)

    def transform(self) -> RandomCrop:
        c = self.config
        return RandomCrop(
            RandomCropConfig(size=self.image_size, scale=c.scale, ratio=c.ratio, flip=c.flip, rotation=c.rotation)
        )

    def forward(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch with labels and one view: B images, (B, C, H, W).

        The images are first changed by RandAugment, then erased, then mixed. All random numbers depend only on seed,
        step and sample.
        """
        del step
        (view,) = batch.views
        images, labels = view.images, batch.labels
        if not isinstance(images, Tensor) or labels is None:
            raise TypeError("Fine-tuning needs batches of labelled images of one size.")
        images, share = self._augmented(images, batch.preprocessing)
        logits = self.logits(images).float()
        with full_precision(logits):
            partner = partners(len(images), logits.device)
            return mixed_cross_entropy(logits, labels, partner, share, self.config.label_smoothing), {}

    def _augmented(self, images: Tensor, preprocessing: Preprocessing) -> tuple[Tensor, Tensor]:
        """Augment, erase and mix images: (B, C, H, W) -> (B, C, H, W). Also return the weight (B,) of each image's own
        label."""
        c, size = self.config, (images.shape[2], images.shape[3])
        keys = next_keys(len(images))
        if keys is None:  # outside of a training run, draw random keys, as drop path does
            keys = torch.randint(2**BITS, (len(images),))
        rngs = generators(keys)
        if c.randaugment and preprocessing.pixel_type != "uint8":
            raise SettingsError(
                f"RandAugment works on 256 levels, but the images are {preprocessing.pixel_type}. Set "
                "--finetune.randaugment 0."
            )
        if c.randaugment:
            fill = [round(255 * mean) for mean in preprocessing.mean]
            pixels = rand_augment(to_pixels(images, preprocessing), draw_operations(rngs, c.randaugment), fill)
            images = normalize(pixels.div_(255), preprocessing)
        images = erase(images, draw_erased(rngs, size, c.erasing), keys)
        mixed = draw_mix(rngs, size, c.mixup, c.cutmix)
        return mix_images(images, mixed), copy_to_device(mixed.share, images.device)

    def frozen(self) -> dict[str, int]:
        return {"encoder.": self.config.head_steps} if self.config.head_steps else {}

    def logits(self, images: Images) -> Tensor:
        return self.head(self.encoder(images).pooled)

    def trained_encoder(self) -> Encoder:
        return self.encoder

    def trained_parts(self) -> list[nn.Module]:
        return [self.encoder, self.head]

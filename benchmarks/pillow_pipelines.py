"""Usual image pipelines of a loader worker, built from Pillow and torchvision, for comparison with the loader."""

import random
from collections.abc import Callable
from io import BytesIO

from PIL import Image, ImageFilter
from torchvision import transforms

from tessera.encoders.base import IMAGENET

BICUBIC = transforms.InterpolationMode.BICUBIC
FINISH = (transforms.ToTensor(), transforms.Normalize(IMAGENET.mean, IMAGENET.std))


def pillow_decode(encoded: bytes) -> Image.Image:
    """Decode an image to RGB."""
    return Image.open(BytesIO(encoded)).convert("RGB")


def pillow_then(transform: Callable[[Image.Image], object]) -> Callable[[bytes], object]:
    """Return a pipeline that decodes an image and then applies `transform`."""
    return lambda encoded: transform(pillow_decode(encoded))


class PillowMultiCrop:
    """DINO's augmentation as in the official code: one crop at a time, with the colour changes on the CPU."""

    def __init__(self) -> None:
        jitter = [
            transforms.RandomHorizontalFlip(0.5),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            transforms.RandomGrayscale(0.2),
        ]

        def crop(size: int, scale: tuple[float, float], *steps: Callable) -> transforms.Compose:
            box = transforms.RandomResizedCrop(size, scale, interpolation=BICUBIC)
            return transforms.Compose([box, *jitter, *steps, *FINISH])

        self.crops = [
            crop(224, (0.4, 1.0), self.blur),
            crop(224, (0.4, 1.0), transforms.RandomApply([self.blur], 0.1), transforms.RandomSolarize(128, 0.2)),
            *[crop(96, (0.05, 0.4), transforms.RandomApply([self.blur], 0.5))] * 8,
        ]

    @staticmethod
    def blur(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))

    def __call__(self, encoded: bytes) -> list[object]:
        image = pillow_decode(encoded)
        return [crop(image) for crop in self.crops]


def pillow_mae() -> Callable[[bytes], object]:
    """Return the pipeline of MAE: one random crop."""
    box = transforms.RandomResizedCrop(224, (0.2, 1.0), interpolation=BICUBIC)
    return pillow_then(transforms.Compose([box, transforms.RandomHorizontalFlip(), *FINISH]))


def pillow_probe() -> Callable[[bytes], object]:
    """Return the pipeline of evaluation: the centre crop."""
    return pillow_then(transforms.Compose([transforms.Resize(256, BICUBIC), transforms.CenterCrop(224), *FINISH]))

"""`tessera pretrain` with one more encoder: `resnet18_cifar`, timm's ResNet-18 with the stem for images of 32 pixels.

    python benchmarks/small_resnet.py --encoder resnet18_cifar --method dino --dino.global_size 32 ...

The stem is a 3 x 3 convolution of stride 1 without max-pooling (SimCLR, 2002.05709, section B.9). Published results on
CIFAR-10 use it. The stride of the encoder is 8; with the stem for ImageNet, it is 32.
"""

from typing import Any

import timm
from torch import nn

from tessera import encoders
from tessera.pretrain.run import main

NAME = "resnet18_cifar"


def make(channels: int = 3) -> nn.Module:
    """Return the ResNet-18, with random weights."""
    model: Any = timm.create_model("resnet18", num_classes=0, in_chans=channels)
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def register() -> encoders.Encoder:
    """Register the encoder, and return one."""
    return encoders.from_module(make, NAME, image_size=32, stride=8)


if __name__ == "__main__":
    register()
    raise SystemExit(main())

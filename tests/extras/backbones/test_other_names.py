"""Names of encoders in other projects: every suggestion exists here."""

import pytest
import timm

from tessera import encoders
from tessera.extras.backbones.other_names import ENCODERS


def test_what_is_suggested_exists() -> None:
    for variant, published in ENCODERS.values():
        name = variant.removeprefix("timm:")
        assert timm.is_model(name) if name != variant else variant in encoders.VARIANTS, variant
        assert published is None or timm.is_model_pretrained(published.removeprefix("timm:")), published


@pytest.mark.parametrize(
    ("theirs", "ours", "published"),
    [
        ("dinov2_vits14", "vit_small_14_dinov2", "timm:vit_small_patch14_dinov2.lvd142m"),
        ("dinov2/vitg14-notpretrained", "vit_giant_14_dinov2_registers", None),
        ("facebook/dinov2-giant", "vit_giant_14_dinov2", "timm:vit_giant_patch14_dinov2.lvd142m"),
        ("dino_vits16", "vit_small", "timm:vit_small_patch16_224.dino"),
        ("dinov3_vitl16", "rope_vit_large", "timm:vit_large_patch16_dinov3.lvd1689m"),
        ("mae_vit_base_patch16", "vit_base", "timm:vit_base_patch16_224.mae"),
        ("ViT-B/16", "vit_base", None),
        ("torchvision/resnet50", "timm:resnet50", "timm:resnet50"),
    ],
)
def test_encoders_of_other_projects(theirs: str, ours: str, published: str | None) -> None:
    assert encoders.other_name(theirs) == (ours, published)
    with pytest.raises(encoders.EncoderError) as error:
        encoders.build(theirs)
    assert f"Did you mean {ours!r}?" in str(error.value)
    assert len(str(error.value)) < 200
    assert published is None or f"--init_from {published}" in str(error.value)


def test_the_size_of_an_encoder_is_that_of_the_name() -> None:
    """The variant has the width and the patch size of the model of timm with the published weights."""
    import torch

    for name in ("dinov2_vits14", "dinov2_vitl14_reg", "dino_vits16", "dinov3_vits16plus", "mae_vit_huge_patch14"):
        variant, published = ENCODERS[name]
        assert published is not None
        with torch.device("meta"):
            ours, theirs = encoders.build(variant), timm.create_model(published.removeprefix("timm:"))
        assert ours.dim == theirs.embed_dim
        assert ours.settings["patch_size"] == theirs.patch_embed.patch_size[0]
        assert ours.settings["depth"] == len(theirs.blocks)

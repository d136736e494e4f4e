"""Names of encoders in other projects."""

_SIZES = {"s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}
_DINOV3 = {
    "vits16": ("small", "vit_small_patch16_dinov3"),
    "vits16plus": ("small_plus", "vit_small_plus_patch16_dinov3"),
    "vitb16": ("base", "vit_base_patch16_dinov3"),
    "vitl16": ("large", "vit_large_patch16_dinov3"),
    "vith16plus": ("huge_plus", "vit_huge_plus_patch16_dinov3"),
    "vit7b16": ("7b", "vit_7b_patch16_dinov3"),
}


def _encoders() -> dict[str, tuple[str, str | None]]:
    names: dict[str, tuple[str, str | None]] = {
        "dino_resnet50": ("timm:resnet50", None),
        "dinov3_vitl16plus": ("rope_vit_large_plus", None),
        "vit_giant2": ("vit_giant_14_dinov2", "timm:vit_giant_patch14_dinov2.lvd142m"),
        "vit_7b": ("rope_vit_7b", "timm:vit_7b_patch16_dinov3.lvd1689m"),
        "deit_tiny": ("vit_tiny", "timm:deit_tiny_patch16_224.fb_in1k"),
        "deit_small": ("vit_small", "timm:deit_small_patch16_224.fb_in1k"),
        "deit_base": ("vit_base", "timm:deit_base_patch16_224.fb_in1k"),
    }
    for letter in "sb":
        size = _SIZES[letter]
        sixteen = (f"vit_{size}", f"timm:vit_{size}_patch16_224.dino")
        eight = (f"timm:vit_{size}_patch8_224", f"timm:vit_{size}_patch8_224.dino")
        names |= {f"dino_vit{letter}16": sixteen, f"facebook/dino-vit{letter}16": sixteen}
        names |= {f"dino_vit{letter}8": eight, f"facebook/dino-vit{letter}8": eight}
    for letter in "sblg":
        size = _SIZES[letter]
        plain = (f"vit_{size}_14_dinov2", f"timm:vit_{size}_patch14_dinov2.lvd142m")
        with_registers = (f"vit_{size}_14_dinov2_registers", f"timm:vit_{size}_patch14_reg4_dinov2.lvd142m")
        names[f"dinov2_vit{letter}14"] = plain
        # lightly-train 0.18.0, _models/dinov2_vit/dinov2_vit_src/configs/__init__.py: `vits14` loads
        # dinov2_vits14_reg4_pretrain.pth, and only the names with `noreg` have no registers.
        for end, (ours, weights) in (("", with_registers), ("-noreg", plain)):
            names |= dict.fromkeys(
                (f"dinov2/vit{letter}14{end}{more}" for more in ("", "-pretrained")), (ours, weights)
            )
            names[f"dinov2/vit{letter}14{end}-notpretrained"] = (ours, None)
        names |= dict.fromkeys((f"facebook/dinov2-{size}", f"dinov2_vit{letter}14_lc"), plain)
        names |= {f"dinov2_vit{letter}14_{end}": with_registers for end in ("reg", "reg4", "reg_lc")}
        names[f"facebook/dinov2-with-registers-{size}"] = with_registers
    for short, (size, published) in _DINOV3.items():
        ours = (f"rope_vit_{size}", f"timm:{published}.lvd1689m")
        names |= dict.fromkeys((f"dinov3_{short}", f"dinov3/{short}"), ours)
        names[f"facebook/dinov3-{short}-pretrain-lvd1689m"] = ours
    for size in ("tiny", "small", "base", "large"):
        convnext = (f"timm:convnext_{size}", f"timm:convnext_{size}.dinov3_lvd1689m")
        names |= dict.fromkeys((f"dinov3_convnext_{size}", f"dinov3/convnext-{size}"), convnext)
        names[f"facebook/dinov3-convnext-{size}-pretrain-lvd1689m"] = convnext
    for size, patch in (("base", 16), ("large", 16), ("huge", 14)):
        mae = (f"vit_{size}", f"timm:vit_{size}_patch{patch}_224.mae")
        names |= dict.fromkeys((f"mae_vit_{size}_patch{patch}", f"vit_{size}_patch{patch}"), mae)
        names |= dict.fromkeys((f"facebook/vit-mae-{size}", f"mae_vit_{size}"), mae)
    for letter, patch in (("s", 16), ("b", 16), ("l", 16), ("h", 14)):
        plain = (f"vit_{_SIZES[letter]}", None)
        names |= dict.fromkeys((f"vit_{letter}_{patch}", f"vit-{letter}/{patch}", f"vit-{letter}-{patch}"), plain)
        names |= dict.fromkeys((f"vit-{letter}", f"vit{letter}", f"vit{letter}{patch}"), plain)
    for size in ("tiny", "small", "base", "large"):
        names |= dict.fromkeys((f"swin_{size[0]}", f"swin-{size[0]}", f"swin-{size}"), (f"swin_{size}", None))
    return names


ENCODERS = _encoders()
"""Name of an encoder elsewhere, in small letters -> variant here, and the name of its published weights or None."""

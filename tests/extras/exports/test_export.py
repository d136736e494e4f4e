"""Exports are loaded by their libraries, equal the encoder, and are refused by name otherwise."""

import json
import re
from pathlib import Path

import pytest
import torch

from tessera import encoders
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.extras.exports import certificate as certificates
from tessera.extras.exports import export as exporting
from tessera.extras.exports.export import ENDINGS, export
from tessera.extras.formats import transformers_export, vit
from tests.encoders.helpers import images_of, scramble
from tests.launched import ROOT

FAMILIES = {
    "ViT": ("vit_micro", {"depth": 2, "interpolation": "mae", "mask_token": True}),
    "ViT of DINOv2": ("vit_micro", {"depth": 2, "layer_scale": 1e-5, "registers": 2, "interpolation": "antialias"}),
    "RoPE-ViT": ("rope_vit_micro", {"depth": 2, "layer_scale": 1e-5, "mask_token": True}),
    "Swin": ("swin_micro", {"image_size": 32}),
    "Twins-SVT": ("twins_svt_micro", {}),
    "NaViT": ("navit_micro", {"depth": 2}),
    "SAM-ViT": ("sam_vit_micro", {"depth": 2, "global_blocks": (1,)}),
    "model of timm": ("timm:test_resnet", {"image_size": 64}),
}


def table() -> dict[str, list[bool]]:
    """Return the cells of the table in docs/encoders.md: True for yes, False for no."""
    text = (ROOT / "docs" / "encoders.md").read_text()
    rows = re.search(r"\| family \| `timm` \|.*\n\|[-|]+\n((?:\|.*\n)+)", text)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]
    return {name: [cell.split(",")[0] == "yes" for cell in others] for name, *others in cells}


def test_the_documented_families_are_tested() -> None:
    assert table().keys() == FAMILIES.keys()


def test_the_measured_differences_are_small_and_agree_with_the_documented_table() -> None:
    text = (ROOT / "benchmarks" / "results" / "exports.md").read_text()
    found = {}
    for row in re.findall(r"^\| (.*) \|$", text.partition("## Run folders")[0], re.MULTILINE)[2:]:
        name, _, ours, timm, transformers, onnx, torch_, *dynamic = row.split(" | ")
        found[name] = [not cell.startswith("(") for cell in (timm, transformers, onnx, torch_, dynamic[0])]
        numbers = [cell for cell in (ours, timm, transformers, onnx, torch_, *dynamic) if not cell.startswith("(")]
        assert max(map(float, numbers)) < 1e-5
        assert dynamic[0].startswith("(") == dynamic[1].startswith("(")
    assert found == table()


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.medium if name == "ViT" else pytest.mark.slow) for name in FAMILIES],
)
@torch.no_grad()
def test_each_family_exports_to_the_documented_formats(family: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    variant, settings = FAMILIES[family]
    encoder = scramble(encoders.build(variant, **settings))
    side, step = encoder.settings["image_size"], encoder.stride
    cases = [("timm", False), ("transformers", False), ("onnx", False), ("torch", False), ("onnx", True)]
    for (form, dynamic), documented in zip(cases, table()[family], strict=True):
        file = tmp_path / (ENDINGS[form] if form == "transformers" else f"{form}{ENDINGS[form]}")
        if not documented:
            with pytest.raises((EncoderError, WeightsError), match=r"no equivalent|no NaViT|no dynamic size"):
                export(encoder, file, form, dynamic_size=dynamic)
            assert dynamic or not file.exists()
            continue
        found = export(encoder, file, form, dynamic_size=dynamic)
        assert json.loads(file.with_suffix(".certificate.json").read_text()) == json.loads(json.dumps(found))
        accounted = found["tensors"]["names"].keys() | set(found["tensors"]["left_out"])
        assert accounted == encoder.state_dict().keys()
        assert {output["images"][0] for output in found["outputs"]} == {1, 2, 3}
        if form == "onnx":  # with a session of this test
            session = ort.InferenceSession(file)
            assert {one.shape[0] for one in (*session.get_inputs(), *session.get_outputs())} == {"batch"}
            smaller = [(side, side), (side - step, side), (side, side - step)]
            for count, size in enumerate(smaller if dynamic else smaller[:1] * 3, 1):
                images = images_of(count, encoder.channels, *size)
                pooled, tokens = (torch.from_numpy(out) for out in session.run(None, {"images": images.numpy()}))
                expected = encoder(images)
                torch.testing.assert_close(pooled, expected.pooled, rtol=1e-3, atol=1e-4)
                torch.testing.assert_close(tokens.flatten(0, 1), expected.tokens, rtol=1e-3, atol=1e-4)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # no temporary folder is left


@pytest.mark.parametrize("family", ["RoPE-ViT", "Swin", "NaViT"])
@torch.no_grad()
def test_a_graph_follows_another_precision(family: str) -> None:
    """These families convert tensors: RoPE its rotations, Swin its bias tables, NaViT its queries and keys."""
    variant, settings = FAMILIES[family]
    encoder = scramble(encoders.build(variant, **settings))
    side = encoder.settings["image_size"]
    images = images_of(2, encoder.channels, side, side)
    expected = encoder(images).pooled
    graph = exporting.trace(encoder, False).module()
    with torch.autocast("cpu", torch.bfloat16):
        found = [graph(images)[0]]
    for dtype in (torch.float16, torch.bfloat16):
        found.append(graph.to(dtype)(images.to(dtype))[0])
        assert found[-1].dtype == dtype
    for pooled in found:
        assert (pooled.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_fine_tuned_vit_exports_to_timm(tmp_path) -> None:
    """Its norm comes after the mean of the patch tokens, which timm applies to the pooled features only."""
    encoder = scramble(encoders.build("vit_micro", depth=2, pool="mean", positions="learned"), seed=1).eval()
    certificate = export(encoder, tmp_path / "model.safetensors", "timm")
    assert "fc_norm.weight" in str(certificate)
    images = torch.randn(2, 3, 16, 16)
    timm = pytest.importorskip("timm")
    name, options, _ = vit.to_timm(encoder)
    model = timm.create_model(name, checkpoint_path=str(tmp_path / "model.safetensors"), **options).eval()
    torch.testing.assert_close(model(images), encoder(images).pooled, rtol=1e-4, atol=1e-4)


def test_a_tensor_that_the_library_initialises_itself_is_refused_by_name(tmp_path, monkeypatch) -> None:
    """transformers reports such a load as a success. Layer scale keeps the features nearly equal."""
    pytest.importorskip("transformers")
    encoder = encoders.build("vit_micro", depth=2, layer_scale=1e-5)
    convert = transformers_export.to_transformers

    def without_a_layer(encoder):
        config, state = convert(encoder)
        return config, {name: tensor for name, tensor in state.items() if "layer.1.mlp.fc1" not in name}

    monkeypatch.setattr(transformers_export, "to_transformers", without_a_layer)
    with pytest.raises(WeightsError, match=r"only in part.*Not from the file: encoder\.layer\.1\.mlp\.fc1"):
        export(encoder, tmp_path / "model.safetensors", "transformers", tolerance=10)
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_that_the_features_need_is_refused_by_name(monkeypatch) -> None:
    encoder = encoders.build("vit_micro", depth=2, mask_token=True).eval()
    state = dict(encoder.state_dict())
    for gone in ("mask_token", "blocks.1.mlp.fc1.bias"):
        rest = {name: tensor for name, tensor in state.items() if name != gone}
        exported = certificates.Exported(rest, rest, {name: [name] for name in rest}, lambda images: None, "")
        if gone == "mask_token":
            assert certificates._check_tensors(encoder, exported) == ["mask_token"]
            continue
        with pytest.raises(WeightsError, match=r"features depend: blocks\.1\.mlp\.fc1\.bias"):
            certificates._check_tensors(encoder, exported)


def test_a_drift_is_refused_with_its_size(tmp_path) -> None:
    """timm's attention has another factor, which only the features tell."""
    encoder = scramble(encoders.build("vit_micro", depth=2, qk_scale=0.5))
    file = tmp_path / "timm.safetensors"
    with pytest.raises(WeightsError, match=r"pooled of the export differ by up to .* accept the difference with"):
        export(encoder, file, "timm")
    assert list(tmp_path.iterdir()) == []
    assert export(encoder, file, "timm", tolerance=1.0)["outputs"][0]["pooled"] > 1e-3


@pytest.mark.medium
def test_a_graph_for_other_sizes_than_its_own_is_refused(tmp_path, monkeypatch) -> None:
    """DINO's rule at the table's own size differs from the rule at all other sizes, which a graph follows."""
    encoder = scramble(encoders.build("vit_micro", depth=1, interpolation="dino"))
    with pytest.raises(EncoderError, match="no dynamic size, because DINO's rule"):
        export(encoder, tmp_path / "a.pt2", "torch", dynamic_size=True)
    monkeypatch.setattr(exporting, "check_dynamic", lambda encoder: None)
    with pytest.raises(WeightsError, match=r"(The|of the) export"):
        export(encoder, tmp_path / "a.pt2", "torch", dynamic_size=True)


def test_a_missing_package_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(WeightsError, match=r"needs onnx\. Install it with `pip install onnx"):
        export(encoders.build("vit_micro"), tmp_path / "a.onnx", "onnx")

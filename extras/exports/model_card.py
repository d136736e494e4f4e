"""Write the model card of an exported encoder: data, settings and scores of its run, in Markdown."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tessera.extras.exports.preparation import absent_values
from tessera.extras.report.run_folders import RESULT_BYTES, RunFolder, parse_json, read_run
from tessera.runtime.files import read_bounded
from tessera.runtime.user_error import without_controls

DATA = ("data.", "evaluation.train", "evaluation.val")
"""Starts of the names of settings that the section about data shows."""
TRAINING = ("method", "steps", "batch_size", "seed", "precision", "init_from", "optim.")
"""Starts of the names of settings that the section about training shows, with those of the method."""

OPENING = (
    "from PIL import Image, ImageOps",
    "",
    'image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGBA")',
    'white = Image.new("RGBA", image.size, "white")',
    'image = Image.alpha_composite(white, image).convert("RGB")',
)
"""Lines of Python that open an image file as `data.decode` does."""


def model_card(certificate: Mapping[str, Any], folder: Path | None) -> str:
    """Return the model card of an export.

    Args:
        certificate: return value of `export.export`.
        folder: folder of the run that trained the encoder, or None if it is not known. If the certificate names no
            step, the weights are those of the last one.
    """
    encoder, tensors = certificate["encoder"], certificate["tensors"]
    worst = {name: max(output[name] for output in certificate["outputs"]) for name in ("pooled", "tokens")}
    shapes = ", ".join(" x ".join(map(str, output["images"])) for output in certificate["outputs"])
    left_out = ", ".join(tensors["left_out"]) or "none"
    lines = [
        f"# {encoder['variant']}",
        "",
        f"{certificate['file']} ({certificate['format']}), sha256 `{certificate['sha256']}`.",
        "",
        "```python",
        certificate["use"],
        "```",
        "",
        "## Input and output",
        "",
        *_input(certificate["preprocessing"]),
        *_output(certificate["format"]),
        "",
        "## Check",
        "",
        f"{tensors['exported']} tensors were written and loaded again. Left out: {left_out}.",
        f"Largest difference from the encoder: pooled {worst['pooled']:.2g}, tokens {worst['tokens']:.2g}.",
        f"Compared with images of {shapes}.",
        *_photograph(certificate["photograph"]),
        "",
    ]
    run = None if folder is None else read_run(folder, folder.name)
    if run is not None and run.settings:
        step = run.last_step if certificate["step"] is None else certificate["step"]
        lines += [*_run(run, step), *_further_pretraining(run.folder / "adapt.json", step)]
    else:
        lines += ["## Training", "", "The run folder of this encoder is not known.", ""]
    lines += ["## Settings of the encoder", "", *_listed(encoder.items())]
    lines += ["## Versions", "", *_listed(certificate["versions"].items())]
    return "\n".join(lines)


def _input(described: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines about the preparation of an image."""
    if "crop" in described:
        yield "An upright image is resized, so that its short side has the length `resize`, and cropped at the centre:"
        yield ""
    yield from _listed(described.items())
    if described.get("mode") == "RGB":
        yield from ["An image file is opened upright, on a white background:", "", "```python", *OPENING, "```", ""]
    if "low" in described:
        yield f"Images (B, C, H, W) of the type {described['pixel_type']}: a value v of channel c becomes"
        yield "x = clamp((v - low[c]) / (high[c] - low[c]), 0, 1), minus mean[c], divided by std[c]."
        yield absent_values(described)
    else:
        yield "Images (B, C, H, W): pixels from 0 to 1, minus mean, divided by std."


def _photograph(compared: Mapping[str, Any] | None) -> Iterable[str]:
    """Yield the lines about the comparison with a photograph."""
    if compared is not None:
        size = " x ".join(map(str, compared["image"]))
        yield f"A photograph of {size} pixels, prepared by the rule that the export states: pixels differ by at most"
        yield f"{compared['levels']:.1f} of 255 levels, pooled features by {compared['pooled']:.1g}, and tokens by"
        yield f"{compared['tokens']:.1g} of the largest feature."


def _output(form: str) -> Iterable[str]:
    """Yield the lines about the output of an encoder."""
    if form == "timm":
        yield "`model(images)` returns pooled features (B, D), and `model.forward_features(images)` a map, or class,"
        yield "register and patch tokens. The name is that of a model in timm, whose sizes the call changes."
    else:
        yield "Pooled features (B, D), and tokens (B, N, D) row by row."
    if form in ("onnx", "torch"):
        yield "Images and graph are float32. `.half()` and autocast do not change the constants of the graph."


def _run(run: RunFolder, step: int) -> Iterable[str]:
    """Yield the lines about the data, the scores and the settings of a run whose weights of one step are exported."""
    settings = {name: value for name, value in run.settings.items() if value is not None}
    images = next((record.get("images") for record in run.records if record["step"] == step), None)
    yield from ["## Data", ""]
    yield from _listed((name, value) for name, value in settings.items() if name.startswith(DATA))
    yield from ["## Scores", ""]
    scores = {name: curve[step] for name, curve in run.scores.items() if step in curve}
    if scores:
        yield from ["| evaluation | step | score |", "|---|--:|--:|"]
        yield from (f"| {name} | {step:,} | {100 * score:.2f} % |" for name, score in scores.items())
    else:
        yield f"The run folder holds no scores of step {step:,}."
    seen = "" if images is None else f", {images:,} images"
    yield from ["", "## Training", "", f"{run.method}, {step:,} steps{seen}.", ""]
    training = (*TRAINING, f"{run.method}.")
    yield from _listed((name, value) for name, value in settings.items() if name.startswith(training))


def _further_pretraining(file: Path, step: int) -> Iterable[str]:
    """Yield the lines about the verdict of `tessera adapt`, if it compared this step with the encoder before."""
    if not file.exists():
        return
    found = parse_json(read_bounded(file, RESULT_BYTES))
    if found["step"] != step:
        return
    yield from ["## Further pretraining", "", f"`tessera adapt`, {found['seeds']} seeds: {found['advice']}", ""]
    yield from ["| score | before | gain | p, corrected |", "|---|--:|--:|--:|"]
    for one in found["gains"]:
        if one["method"] == found["method"]:
            p = "unknown" if one["p"] is None else f"{one['p']:.2g}"
            gain = f"{100 * one['gain']:+.2f} ± {100 * one['error']:.2f}"
            yield f"| {one['score']} | {100 * one['before']:.2f} % | {gain} | {p} |"
    yield ""


def _listed(items: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a code block with a line for each item."""
    return ["```yaml", *(without_controls(f"{name}: {value}") for name, value in items), "```", ""]

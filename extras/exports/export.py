"""Export encoders to files of this project, timm, transformers, ONNX and `torch.export`, with a certificate.

A file is written to a temporary folder and loaded again with the library that reads the format. It is moved to its
place only if `certificate` finds all tensors and equal features.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tessera import encoders
from tessera.encoders.base import Encoder
from tessera.encoders.errors import EncoderError, WeightsError
from tessera.encoders.loading import State
from tessera.encoders.navit import NaViT
from tessera.encoders.preprocessing import image_size
from tessera.encoders.vit import ViT
from tessera.encoders.weight_files import format_of
from tessera.extras.backbones.module import ModuleEncoder
from tessera.extras.backbones.timm_models import import_timm
from tessera.extras.exports.certificate import TOLERANCE, Exported, Photograph, certify, names_after, shapes, tokens_of
from tessera.extras.exports.preparation import byte_moments, description, prepare, pretrained_cfg, ranged_sentence
from tessera.extras.formats import transformers_export
from tessera.runtime.files import atomic_write

log = logging.getLogger(__name__)

ENDINGS = {
    "ours": ".safetensors",
    "timm": ".safetensors",
    "transformers": "model.safetensors",
    "onnx": ".onnx",
    "torch": ".pt2",
}
"""End of the file name of each format. transformers requires the full name."""
METADATA = "preprocessing"
"""Name under which files of "onnx" and "torch" (with the ending .json) store the preparation of images, as JSON."""


def export(
    encoder: Encoder,
    output: str | Path,
    form: str = "ours",
    *,
    dynamic_size: bool = False,
    tolerance: float = TOLERANCE,
    step: int | None = None,
    photograph: Photograph | None = None,
) -> dict[str, Any]:
    """Write an encoder to `output`, and its certificate to a file of the same name that ends in .certificate.json.

    Return the certificate. Its entry "use" is the Python expression that loads the file. The file is loaded again and
    compared with the encoder before it replaces an existing file.

    Args:
        encoder: encoder made by `encoders.build`. It is set to evaluation mode.
        output: file to write.
        form: format, a key of `ENDINGS`.
        dynamic_size: accept images of any size ("onnx" and "torch" only). Otherwise, images have the encoder's size.
        tolerance: largest accepted difference between two features, as a fraction of the largest feature.
        step: number of completed optimizer steps, which the certificate and "ours" store.
        photograph: photograph with which the preparation of images is compared, or None for no comparison.

    Raises:
        WeightsError: the format has no equivalent of the encoder, the export lacks tensors, or its features differ.
        EncoderError: the encoder cannot be traced, or the name of `output` does not fit the format.
    """
    output = Path(output)
    if not output.name.endswith(ENDINGS[form]):
        hint = f"must end in {ENDINGS[form]}"
        if form == "transformers":
            hint = f"has the wrong name, because transformers reads {output.parent}/{ENDINGS[form]}"
        raise WeightsError(f"{output} {hint}.")
    if dynamic_size and form not in ("onnx", "torch"):
        raise EncoderError(f"--dynamic_size is for onnx and torch. The size of images in {form} follows its own rules.")
    if form in ("timm", "transformers") and not byte_moments(encoder.preprocessing):
        log.warning("%s", ranged_sentence(encoder))
    encoder.eval()
    with _frozen(encoder), tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        file = Path(folder) / output.name
        if form == "ours":
            exported = to_ours(encoder, file, step)
        elif form in ("timm", "transformers"):
            exported = {"timm": to_timm, "transformers": to_transformers}[form](encoder, file)
        else:
            exported = {"onnx": to_onnx, "torch": to_torch}[form](encoder, file, dynamic_size)
        certificate = certify(encoder, exported, file, form, tolerance, photograph)
        certificate["step"] = step
        certificate["use"] = exported.use.replace(str(Path(folder)), str(output.parent))
        for written in Path(folder).iterdir():
            os.replace(written, output.with_name(written.name))
    with atomic_write(output.with_suffix(".certificate.json")) as temporary:
        temporary.write_text(json.dumps(certificate, indent=2) + "\n")
    return certificate


def to_ours(encoder: Encoder, file: Path, step: int | None) -> Exported:
    """Save the encoder to `file`, a .safetensors file, and to a .json file of the same name."""
    encoders.save(encoder, file, step=step)
    loaded = encoders.load(file)
    state = dict(encoder.state_dict())
    return Exported(
        tensors=state,
        loaded=dict(loaded.state_dict()),
        names={name: [name] for name in state},
        run=lambda images: tokens_of(loaded(images)),
        use=f'tessera.load("{file}")',
    )


def to_timm(encoder: Encoder, file: Path) -> Exported:
    """Write the weights to `file` with timm's names.

    Raises:
        WeightsError: timm has no equivalent model, is not installed, or does not load the weights.
        EncoderError: the number of channels differs between the preprocessing and the encoder.
    """
    timm = import_timm("An export to timm", WeightsError)
    form = format_of(encoder)
    name, options, state = form.to_timm(encoder)
    options["pretrained_cfg_overlay"] = pretrained_cfg(encoder)
    _save(state, file)
    with _one_sentence(encoder, "timm"):
        model = timm.create_model(name, checkpoint_path=str(file), **options)
    wrapped = ModuleEncoder(
        model, image_size=image_size(encoder), channels=encoder.channels, stride=encoder.stride
    ).eval()
    distilled = getattr(encoder, "dist_token", None) is not None
    norm = getattr(model, "fc_norm", None) if "fc_norm.weight" in state else None

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        pooled, tokens = tokens_of(wrapped(images))
        if norm is not None:  # timm applies this norm to the pooled features only
            tokens = norm(tokens)
        # The pooled features of timm's model are the mean of two tokens.
        return model.forward_features(images)[:, 0] if distilled else pooled, tokens

    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    return Exported(
        tensors=load_file(file),
        loaded=dict(model.state_dict()),
        names=names_after(encoder, lambda copy: form.to_timm(copy)[2], state),
        run=run,
        use=f'timm.create_model("{name}", checkpoint_path="{file}"{arguments})',
        packages=("timm",),
        prepare=timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False),
    )


def to_transformers(encoder: Encoder, file: Path) -> Exported:
    """Write the weights to `file`, model.safetensors, and the configuration of the model and of its image processor to
    config.json in the same folder.

    Raises:
        WeightsError: transformers has no equivalent model, or a package is not installed.
        EncoderError: the number of channels differs between the preprocessing and the encoder.
    """
    config, state = transformers_export.to_transformers(encoder)
    import_timm("The image processor of an export to transformers", WeightsError)
    # The image processors of transformers place the crop half a pixel away if the margin is odd. The one that wraps the
    # transform of timm does not. It reads config.json, and other programs read preprocessor_config.json.
    # It takes RGB images of 8 bits only.
    processor = None
    if encoder.channels == 3 and byte_moments(encoder.preprocessing):
        processor = {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": pretrained_cfg(encoder)}
        file.with_name("preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    _save(state, file)
    file.with_name("config.json").write_text(json.dumps(config | (processor or {}), indent=2) + "\n")
    with _one_sentence(encoder, "transformers"):
        from transformers import AutoImageProcessor, AutoModel  # imported here, because the import takes seconds

        model = AutoModel.from_pretrained(file.parent).eval()
    prepared = AutoImageProcessor.from_pretrained(file.parent, backend="pil") if processor else None
    prefix = encoder.num_prefix_tokens if isinstance(encoder, ViT) else 0

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        output = model(images)
        return output.pooler_output, output.last_hidden_state[:, prefix:]

    return Exported(
        tensors=load_file(file),
        loaded=dict(model.state_dict()),
        names=names_after(encoder, lambda copy: transformers_export.to_transformers(copy)[1], state),
        run=run,
        use=f'transformers.AutoModel.from_pretrained("{file.parent}")',
        packages=("transformers", "timm"),
        prepare=(lambda image: prepared(image)["pixel_values"][0]) if prepared else None,
    )


def to_onnx(encoder: Encoder, file: Path, dynamic_size: bool) -> Exported:
    """Write a graph to `file` for ONNX Runtime: images (B, C, H, W) -> pooled (B, D) and tokens (B, N, D).

    The weights of the graph have the names of the encoder. Weights beyond ONNX's limit of 2 GB are in a second file.

    Raises:
        WeightsError: a package of `tessera-ssl[onnx]` is not installed.
        EncoderError: the encoder cannot be exported.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError as error:
        raise WeightsError(
            f"An export to ONNX needs {error.name}. Install it with `pip install onnx onnxscript onnxruntime`."
        ) from error
    program = trace(encoder, dynamic_size)
    with torch.no_grad(), _one_sentence(encoder, "ONNX"):
        # Without torch's optimisation, each weight keeps its name. ONNX Runtime optimises the graph when it loads it.
        graph = torch.onnx.export(program, (), dynamo=True, optimize=False, verbose=False)
        assert graph is not None
        graph.model.metadata_props[METADATA] = json.dumps(description(encoder))
        graph.model.graph.inputs[0].name = "images"
        for output, name in zip(graph.model.graph.outputs, ("pooled", "tokens"), strict=True):
            output.name = name
        for value in (*graph.model.graph.inputs, *graph.model.graph.outputs):
            assert value.shape is not None
            value.shape[0] = "batch"
        graph.save(file)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; warnings are about constants that it does not fold
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    written = {
        tensor.name.removeprefix("encoder."): torch.from_numpy(
            onnx.numpy_helper.to_array(tensor, str(file.parent)).copy()
        )
        for tensor in onnx.load(file, load_external_data=False).graph.initializer
    }

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        pooled, tokens = session.run(["pooled", "tokens"], {"images": images.numpy()})
        return torch.from_numpy(pooled), torch.from_numpy(tokens)

    described = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
    use, packages = f'onnxruntime.InferenceSession("{file}")', ("onnx", "onnxruntime")
    return _traced(encoder, written, run, use, described, dynamic_size, packages)


def to_torch(encoder: Encoder, file: Path, dynamic_size: bool) -> Exported:
    """Write a program of `torch.export` to `file`: images (B, C, H, W) -> pooled (B, D) and tokens (B, N, D).

    Raises:
        EncoderError: the encoder cannot be traced.
    """
    extra = {f"{METADATA}.json": json.dumps(description(encoder))}
    torch.export.save(trace(encoder, dynamic_size), file, extra_files=extra)
    read = dict.fromkeys(extra, "")
    program = torch.export.load(file, extra_files=read)
    described = json.loads(read[f"{METADATA}.json"])
    written = {name.removeprefix("encoder."): tensor for name, tensor in program.state_dict.items()}
    return _traced(encoder, written, program.module(), f'torch.export.load("{file}").module()', described, dynamic_size)


def _traced(
    encoder: Encoder,
    written: State,
    run: Callable[[Tensor], tuple[Tensor, Tensor]],
    use: str,
    described: dict[str, Any],
    dynamic_size: bool,
    packages: tuple[str, ...] = (),
) -> Exported:
    """Return the export of a graph, whose weights have the names of the encoder. `written` may also hold constants.

    `described` is the preparation of images that the file states.
    """
    state = {name: tensor for name, tensor in encoder.state_dict().items() if name in written}
    names = {name: [name] for name in state}
    loaded = {name: written[name] for name in state}
    return Exported(state, loaded, names, run, use, packages, dynamic_size, lambda image: prepare(image, described))


class _Outputs(nn.Module):
    """Module that returns the features as two tensors: images (B, C, H, W) -> pooled (B, D), tokens (B, N, D)."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return tokens_of(self.encoder(images))


def trace(encoder: Encoder, dynamic_size: bool) -> ExportedProgram:
    """Trace an encoder with `torch.export`. The number of images is dynamic.

    Raises:
        EncoderError: the encoder cannot be traced.
    """
    if dynamic_size:
        check_dynamic(encoder)
    # The second shape has unequal sides, so that the trace does not assume square images.
    images, free = torch.zeros(shapes(encoder, dynamic_size)[1]), Dim.DYNAMIC
    sizes = {0: free, 2: free, 3: free} if dynamic_size else {0: free}
    with torch.no_grad(), _one_sentence(encoder, "torch.export"):
        return torch.export.export(_Outputs(encoder.eval()), (images,), dynamic_shapes=(sizes,), strict=False)


def check_dynamic(encoder: Encoder) -> None:
    """Raise `EncoderError` if a graph of the encoder is correct for images of one size only."""
    if isinstance(encoder, ViT) and encoder.pos_embed is not None and encoder.interpolation == "dino":
        raise EncoderError(
            "This ViT has no dynamic size, because DINO's rule keeps the position table at the size of the table and "
            "resizes it at all other sizes. Export one size, without --dynamic_size (--set image_size=S)."
        )
    if encoder.settings.get("fixed_size"):
        raise EncoderError(
            "This encoder has no dynamic size, because fixed_size is set. Export it without --dynamic_size."
        )
    if not isinstance(encoder, ViT | NaViT | ModuleEncoder):
        raise EncoderError(
            f"{type(encoder).__name__} has no dynamic size, because its windows or relative positions are laid out for "
            "one size. Export one size, without --dynamic_size (--set image_size=S)."
        )


@contextmanager
def _frozen(encoder: Encoder) -> Iterator[None]:
    """Freeze the parameters of an encoder, so that the outputs of an exported program carry no graph."""
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    encoder.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _one_sentence(encoder: Encoder, target: str) -> Iterator[None]:
    """Turn any error of a library's exporter into an `EncoderError` of one sentence."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error  # torch.onnx wraps the reason in advice about its own bugs
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise EncoderError(
            f"{getattr(encoder, 'label', type(encoder).__name__)} cannot be exported to {target} with torch "
            f"{torch.__version__}: {reason[:300]} Export it with --to ours."
        ) from error


def _save(state: State, file: Path) -> None:
    save_file({key: tensor.detach().contiguous() for key, tensor in state.items()}, file, metadata={"format": "pt"})

"""Wrap any module that computes a feature map or tokens as an `Encoder`: models of timm, and modules of the user.

Letters in shapes: B images; C channels, H x W pixels; h x w token grid; D width of a token; P prefix tokens, such as a
class token.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor, nn

from tessera.encoders.base import Encoder, Features
from tessera.encoders.checks import check_counts
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Images, Mask
from tessera.encoders.randomness import next_keys
from tessera.encoders.registry import VARIANTS, backbone, build
from tessera.encoders.unused import ON_META

Layout = Literal["BCHW", "BHWC", "tokens"]
CACHE = "attention_bias_cache"
"""Attribute in which modules of timm (LeViT, EfficientFormer, TinyViT, ...) keep a function of their weights in
evaluation mode. A teacher stays in evaluation mode while its weights change, so the cache must not be used."""


class ModuleEncoder(Encoder):
    """An encoder whose features are the output of another module, which is the attribute `model`.

    The output of `module.forward_features(images)`, or of `module(images)` if there is no such function, must be a map
    (B, D, h, w) or (B, h, w, D), or tokens (B, P + h * w, D). A call with black images on the meta device finds the
    form of the output.

    - `tokens` are the cells of the map, or the tokens without the P prefix tokens.
    - `pooled` is the result of `module.forward_head(output, pre_logits=True)` if the module has this function, as
      models of timm do, and the result has the width of the tokens. Otherwise, `pooled` is the first prefix token or,
      if there are no prefix tokens, the mean of the tokens.
    - Hidden tokens are hidden in the pixels: their squares of `stride` x `stride` pixels have a learned colour.
    - The grid of tokens has ceil(H / stride) x ceil(W / stride) cells. If the module rounds down, or supports only
      sides that are multiples of `stride`, images are padded with zeros below and to the right.

    Random numbers of the module, such as those of dropout, come from torch's generator. In a training step, the
    generator is seeded by the seed of the run, the step and the samples, so that a resumed run draws the same numbers.
    """

    label: ClassVar[str] = "module"
    """Name of the module for messages."""

    def __init__(
        self,
        module: nn.Module,
        *,
        image_size: int | tuple[int, int],
        channels: int = 3,
        stride: int | None = None,
        stage: int | None = None,
        fixed_size: bool = False,
        mask_token: bool = False,
    ):
        """Wrap a module.

        Args:
            module: module that maps images (B, C, H, W) to a map or to tokens.
            image_size: side or (height, width) of an image that the module supports.
            channels: number of channels of an image.
            stride: side, in pixels, of the square that one token covers. None takes it from the `feature_info` of a
                model of timm, or computes it from the output.
            stage: index of the stage whose map is used, with timm's `forward_intermediates`; negative indices count
                from the end. None uses the output of the module.
            fixed_size: resize all images to `image_size`, for a module that supports only one size.
            mask_token: add a learned colour for the pixels of hidden tokens.

        Raises:
            EncoderError: the output of the module is neither a map nor tokens, or does not fit the stride.
        """
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        check_counts(image_size=min(height, width), channels=channels, stride=1 if stride is None else stride)
        if stage is not None and not hasattr(module, "forward_intermediates"):
            raise EncoderError(f"{self.label} has no function forward_intermediates. Remove stage.")
        self.model, self.channels, self.stage = module, channels, stage
        self.mask_token = nn.Parameter(torch.zeros(channels)) if mask_token else None
        self.no_weight_decay = tuple(sorted(getattr(module, "no_weight_decay", tuple)()))
        self._caching = [part for part in module.modules() if hasattr(part, CACHE)]
        self._fixed = (height, width) if fixed_size else None
        self._encoded: set[tuple[int, int]] = set()
        self._inspect_output((height, width), stride or _reduction(module, stage))

    @property
    def blocks(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Children of the module that have submodules. A `Sequential` or `ModuleList` counts as its items."""
        children = list(self.model.children())
        parts = [
            part
            for child in children
            for part in (child if isinstance(child, nn.Sequential | nn.ModuleList) else [child])
        ]
        trained = [part for part in parts if next(part.children(), None) and next(part.parameters(), None) is not None]
        return nn.ModuleList(trained)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of token rows and columns for `height` x `width` pixels, both rounded up.

        With `fixed_size`, the result is that of `image_size`.
        """
        height, width = self._fixed or (height, width)
        return -(-height // self.stride), -(-width // self.stride)

    def forward(self, images: Images, mask: Mask | None = None, *, drop: bool = False) -> Features:
        images = self.checked(images, mask, drop=drop)
        grids = self.grids(images)
        if self._fixed is not None and images.shape[-2:] != self._fixed:
            images = F.interpolate(images, size=self._fixed, mode="bicubic", antialias=True)
        height, width = images.shape[-2:]
        rows, columns = self.grid(height, width)
        if mask is not None:
            hidden = mask.hidden.view(len(images), rows, columns)
            side = self.stride
            hidden = repeat(hidden, "b h w -> b 1 (h i) (w j)", i=side, j=side)[:, :, :height, :width]
            color = cast(Tensor, self.mask_token).to(images.dtype).view(1, -1, 1, 1)
            images = torch.where(hidden, color, images)
        if self._pads and (height % self.stride or width % self.stride):
            images = F.pad(images, (0, -width % self.stride, 0, -height % self.stride))
        with self._seeded(images):
            tokens, pooled = self._encode(images)
        if tokens.shape[1:3] != (rows, columns):
            raise EncoderError(
                f"{self.label} has {tokens.shape[1]} x {tokens.shape[2]} tokens for images of {height} x {width} "
                f"pixels, not {rows} x {columns}, as its stride of {self.stride} pixels requires."
            )
        return Features(pooled, tokens.flatten(0, 2), grids)

    def _final_blocks(self) -> int:
        return 1

    def intermediate(self, images: Images, blocks: int = 1) -> list[Features]:
        if blocks != 1:
            raise EncoderError(f"{self.label} has features of its last block only. Ask for 1 block, not {blocks}.")
        return [self(images)]

    def _encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, h, w, D) and the pooled features (B, D) of images."""
        if not self.training:
            for part in self._caching:
                setattr(part, CACHE, {})
        size = (images.shape[-2], images.shape[-1])
        try:
            output = _output(self.model, images, self.stage)
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            # An error at the first images of a size is most likely due to the size.
            if size in self._encoded or ON_META.search(str(error)) or isinstance(error, torch.OutOfMemoryError):
                raise
            hint = "If it supports only one size, set encoder.fixed_size to true, which resizes images to image_size."
            raise self._refused(error, size, hint) from error
        if not torch.compiler.is_exporting():  # sizes of a trace may be symbols
            self._encoded.add(size)
        tokens, prefix = self._tokens(output, (-(-size[0] // self.stride), -(-size[1] // self.stride)))
        if self._has_head:
            pooled = self.model.forward_head(output, pre_logits=True)  # pyright: ignore[reportCallIssue]
        else:
            pooled = tokens.mean((1, 2)) if prefix is None else prefix
        return tokens, pooled

    def _refused(self, error: Exception, size: tuple[int, int], hint: str) -> Exception:
        """Return the error for images of a size that the module refused with `error`. Keep errors of an encoder."""
        if isinstance(error, EncoderError):
            return error
        reason = str(error).rstrip(".") or type(error).__name__
        return EncoderError(f"{self.label} cannot encode images of {size[0]} x {size[1]} pixels: {reason}. {hint}")

    def _tokens(self, output: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (B, h, w, D), and the first prefix token (B, D) or None."""
        if self._layout == "BHWC":
            return output, None
        if self._layout == "BCHW":
            return output.permute(0, 2, 3, 1), None
        prefix = output.shape[1] - math.prod(grid)
        return output[:, prefix:].unflatten(1, grid), output[:, 0] if prefix else None

    def _inspect_output(self, size: tuple[int, int], stride: int | None) -> None:
        """Set `dim`, `stride` and the form of the output, which is computed for two black images of this size."""
        self._pads = False
        try:
            self._inspect_size(size, stride)
        except (AssertionError, RuntimeError, ValueError) as error:
            if stride is None or not (size[0] % stride or size[1] % stride):
                raise self._refused(error, size, "Choose another image_size.") from error
            self._pads = True
            size = (size[0] + -size[0] % stride, size[1] + -size[1] % stride)
            try:
                self._inspect_size(size, stride)
            except (AssertionError, RuntimeError, ValueError) as padded:
                raise self._refused(padded, size, "Choose another image_size.") from padded
        if not self._pads and not (size[0] % self.stride or size[1] % self.stride):
            self._pads = not self._rounds_up(size)

    def _rounds_up(self, size: tuple[int, int]) -> bool:
        """Return True if one more row and column of pixels add a row and a column of tokens."""
        try:
            output, _ = _black_images(self.model, self.channels, (size[0] + 1, size[1] + 1), self.stage)
            grid = (size[0] // self.stride + 1, size[1] // self.stride + 1)
            return _form(output, size, grid, self.label)[0] == self._layout != "tokens"
        except (AssertionError, RuntimeError, ValueError):
            return False

    def _inspect_size(self, size: tuple[int, int], stride: int | None) -> None:
        output, pooled = _black_images(self.model, self.channels, size, self.stage)
        wanted = None if stride is None else (-(-size[0] // stride), -(-size[1] // stride))
        self._layout: Layout
        self._layout, grid = _form(output, size, wanted, self.label)
        self.stride = stride or max(size[0] // grid[0], 1)
        self.dim = output.shape[1 if self._layout == "BCHW" else -1]
        self._has_head = pooled is not None and tuple(pooled.shape) == (len(output), self.dim)
        if self.grid(*size) != grid or (stride is None and grid[0] * self.stride != size[0]):
            raise EncoderError(
                f"{self.label} has {grid[0]} x {grid[1]} tokens for images of {size[0]} x {size[1]} pixels, which "
                "do not cover the image with squares. Set stride, and an image_size that is a multiple of it."
            )

    @contextmanager
    def _seeded(self, images: Tensor) -> Iterator[None]:
        """In a training step, seed torch's generators for the module. The state of the generators is restored."""
        keys = next_keys(len(images)) if self.training else None
        if keys is None or images.is_meta:
            yield
            return
        seed, cuda = int(keys[0]), images.is_cuda
        with torch.random.fork_rng(devices=[images.device] if cuda else []):
            torch.default_generator.manual_seed(seed)
            if cuda:
                torch.cuda.manual_seed(seed)
            yield


def _output(module: Any, images: Tensor, stage: int | None) -> Any:
    """Return the map of a stage, or the output of the module if `stage` is None."""
    if stage is not None:
        return module.forward_intermediates(images, indices=[stage], intermediates_only=True, output_fmt="NCHW")[0]
    return module.forward_features(images) if hasattr(module, "forward_features") else module(images)


def _reduction(module: nn.Module, stage: int | None) -> int | None:
    """Return the stride of a stage, or of the last stage, of a model of timm. Return None for other modules."""
    try:
        info: Any = getattr(module, "feature_info")  # noqa: B009 - a module has no such attribute for type checkers
        return int(info[-1 if stage is None else stage]["reduction"])
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


def _black_images(module: nn.Module, channels: int, size: tuple[int, int], stage: int | None) -> tuple[Any, Any]:
    """Return the output of the module for two black images, and the pooled output of its head or None.

    The module runs on the meta device in evaluation mode, or on its own device if it reads values of tensors. It stays
    unchanged.
    """
    empty: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in module.parameters()}
    empty |= {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}

    def run(module: Any, device: torch.device | str) -> tuple[Any, Any]:
        output = _output(module, torch.zeros(2, channels, *size, device=device), stage)
        heads = hasattr(module, "forward_head") and stage is None and isinstance(output, Tensor)
        return output, module.forward_head(output, pre_logits=True) if heads else None

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return run(copy.deepcopy(module, empty).eval(), "meta")
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if not ON_META.search(str(error)):
                raise
        first = next(module.parameters(), None)
        return run(copy.deepcopy(module).eval(), "cpu" if first is None else first.device)


def _form(
    output: Any, size: tuple[int, int], wanted: tuple[int, int] | None, label: str
) -> tuple[Layout, tuple[int, int]]:
    """Return the layout of an output, and the rows and columns of its tokens.

    Args:
        output: output of a module.
        size: height and width of the images.
        wanted: rows and columns of tokens, if they are known.
        label: name of the module for messages.

    Raises:
        EncoderError: the output is neither a map nor tokens, or the layout cannot be derived from its shape.
    """
    shape = tuple(output.shape) if isinstance(output, Tensor) else ()
    if len(shape) not in (3, 4):
        raise EncoderError(
            f"The output of {label} is {shape or type(output).__name__}. It must be a map (B, D, h, w) or "
            "(B, h, w, D), or tokens (B, N, D). If the module has stages (timm's forward_intermediates), set stage to "
            "-1, the last one."
        )
    if len(shape) == 3:
        square = math.isqrt(shape[1])
        grid = wanted or (square, square)
        if math.prod(grid) > shape[1]:
            raise EncoderError(f"{label} has {shape[1]} tokens, less than a grid of {grid[0]} x {grid[1]}. Set stride.")
        return "tokens", grid
    layouts: list[tuple[Layout, tuple[int, int]]] = [("BCHW", (shape[2], shape[3])), ("BHWC", (shape[1], shape[2]))]
    if wanted is not None:
        found = [(layout, grid) for layout, grid in layouts if grid == wanted]
    else:  # cells are squares
        found = [(layout, grid) for layout, grid in layouts if grid[0] * size[1] == grid[1] * size[0]]
    if len(found) != 1:
        raise EncoderError(
            f"The output of {label} is {shape} for images of {size[0]} x {size[1]} pixels, from which the layout "
            "cannot be derived. Set stride, or choose another image_size."
        )
    return found[0]


def from_module(
    module: nn.Module | Callable[..., nn.Module],
    name: str,
    *,
    image_size: int | tuple[int, int] = 224,
    channels: int = 3,
    stride: int | None = None,
) -> Encoder:
    """Register a module as the encoder variant `name`, and return an encoder of this variant.

    The module maps images (B, C, H, W) to a map (B, D, h, w) or (B, h, w, D), or to tokens (B, P + h * w, D); see
    `ModuleEncoder`. Runs and evaluations in this process then know the variant. In another process,
    call this function again before a run is resumed or its encoder is loaded.

    Args:
        module: class of the module or a function that returns a new module, which gets those of the arguments
            `image_size` and `channels` that it names. For a module, each encoder of the variant is a copy, which
            starts with the weights of the module.
        name: name of the variant.
        image_size: default of the setting `image_size`, one side or (height, width) in pixels.
        channels: number of channels of an image.
        stride: side, in pixels, of the square that one token covers. None computes it from the output.

    Raises:
        EncoderError: the name belongs to another kind of encoder, or the output is neither a map nor tokens.
    """
    taken = name in VARIANTS and not issubclass(VARIANTS[name]["family"], ModuleEncoder)
    if taken or backbone(name):
        raise EncoderError(f"The name {name!r} belongs to another encoder. Choose another name.")
    make = functools.partial(copy.deepcopy, module) if isinstance(module, nn.Module) else module
    VARIANTS[name] = {"family": module_family(name, make, {"image_size": image_size, "channels": channels}, stride)}
    try:
        return build(name)
    except EncoderError:
        del VARIANTS[name]
        raise


def module_family(
    label: str, make: Callable[..., nn.Module], defaults: Mapping[str, Any], stride: int | None = None
) -> type[ModuleEncoder]:
    """Return a class of encoders for `VARIANTS`, whose constructor makes the module itself.

    Args:
        label: name of the variant.
        make: function that returns a new module. It gets those of the arguments `image_size` and `channels` that it
            names, and the setting `options`.
        defaults: defaults of the settings `image_size` and `channels`.
        stride: side, in pixels, of the square that one token covers. None computes it from the output.
    """
    names = inspect.signature(make).parameters

    class Wrapped(ModuleEncoder):
        __doc__ = SETTINGS

        def __init__(
            self,
            *,
            image_size: int | tuple[int, int] = defaults["image_size"],
            channels: int = defaults["channels"],
            stage: int | None = None,
            fixed_size: bool = False,
            mask_token: bool = False,
            options: dict[str, Any] | None = None,
        ):
            given = {"image_size": image_size, "channels": channels}
            module = make(**{name: value for name, value in given.items() if name in names}, **(options or {}))
            own = {"stride": stride, "stage": stage, "fixed_size": fixed_size, "mask_token": mask_token}
            super().__init__(module, image_size=image_size, channels=channels, **own)

    Wrapped.label = Wrapped.__name__ = Wrapped.__qualname__ = label
    return Wrapped


SETTINGS = """A wrapped module.

Args:
    image_size: image size in pixels, one side or (height, width).
    channels: number of channels of an image.
    stage: index of the stage whose map is used; negative indices count from the end. None uses the output.
    fixed_size: resize all images to image_size, for a module that supports only one size.
    mask_token: add a learned colour for the pixels of hidden tokens.
    options: further arguments of timm.create_model, or of the function that makes the module.
"""
"""Docstring of the classes that `module_family` returns, whose Args become the help of the settings."""

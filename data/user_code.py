"""Code of the user that runs in loader workers: data sets, stages (`data.stages`) and augmentations.

Such code draws from the global generators of Python, NumPy and torch. For each sample, the generators are seeded from
the seed of the run and the position of the sample in the run, and restored afterwards. Random numbers of the user's
code therefore do not depend on workers, processes or restarts, and do not change those of the training.
"""

import importlib
import inspect
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from webdataset.autodecode import DecodingError

from tessera.data.batch import SampleParameters, ViewParameters
from tessera.data.decode import ImageError
from tessera.data.failures import ShardError, unreadable
from tessera.data.python_objects import is_name, kind, named_object
from tessera.data.resample import cut
from tessera.data.sampler import user_seeds
from tessera.runtime.plugins import Registry
from tessera.runtime.settings import SettingsError
from tessera.runtime.user_error import printable

READING, AUGMENTING = range(2)
"""Purposes of `seeded`. Each purpose has random numbers of its own."""
LONGEST_REASON = 300  # maximum number of characters of an error of the user's code in a message
STAGES: Registry[Callable[..., Any]] = Registry(
    "runner of stages", {}, group="tessera.stages", expected="a function that gets the stages", valid=callable
)
"""Runners of stages by the library whose convention the stages follow."""
_lock = threading.RLock()  # several data sets of a list are opened in several threads


@contextmanager
def seeded(seed: int, position: int, purpose: int = READING) -> Iterator[torch.Generator]:
    """Seed the global generators of Python, NumPy and torch (on the CPU) for one sample. Yield a seeded generator.

    Args:
        seed: seed of the run.
        position: position of the sample in the run.
        purpose: `READING` or `AUGMENTING`.
    """
    seeds = user_seeds(seed, position, purpose)
    with _lock:
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        try:
            random.seed(seeds[0])
            np.random.seed(seeds[1] % 2**32)
            torch.default_generator.manual_seed(seeds[2])
            yield torch.Generator().manual_seed(seeds[3])
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Convert errors of the user's code, which handles the sample `name`, to errors of this project.

    Raises:
        ImageError: Pillow cannot decode the image, so the image is corrupt.
        ShardError: any other error. The message has its type and the line of the code.
    """
    try:
        yield
    except (ImageError, ShardError, MemoryError):
        raise
    except Exception as raised:
        error = raised
        if isinstance(raised, DecodingError) and isinstance(raised.__cause__, Exception):
            error = raised.__cause__  # webdataset's error has the whole sample as its text
        reason = printable(str(error)[:LONGEST_REASON])
        # Pillow's error for a truncated image is an `OSError` without a number, and for a damaged PNG a `SyntaxError`
        of_pillow = (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError)
        if isinstance(error, of_pillow) or (isinstance(error, OSError) and error.errno is None):
            raise ImageError(f"a damaged image: {reason}") from error
        if isinstance(error, OSError):
            raise unreadable(name, error, "Restore the file, or correct the data set.") from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        raise ShardError(
            f"{name} cannot be read: {type(error).__name__}: {reason} ({where}). Correct this code."
        ) from error


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Return the function that the user names: `module:function`, or the name of an object (`data.python_objects`).

    The module is imported, so the name must come from the command line or from Python, never from a file. Modules in
    the current folder are found.

    Raises:
        SettingsError: there is no such function.
    """
    shown = printable(name)
    if is_name(name):
        try:
            return named_object(name)
        except KeyError:
            raise SettingsError(f"{setting}: {shown} stands for an object of Python. Pass the object again.") from None
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SettingsError(f"{setting}: {shown} must be module:function, such as my_code:my_function.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{setting}: {shown} cannot be imported: {error}. Correct the name.") from error
    if not callable(found):
        raise SettingsError(f"{setting}: {shown} is a {type(found).__name__}, which cannot be called.")
    return found


def load_stages(given: str | Sequence[Any] | None) -> Callable[[dict[str, Any], str], Any] | None:
    """Return the stages of the user (`data.stages`) as one function (`Access.stages`), or None for no stages.

    Raises:
        SettingsError: a stage cannot be imported or used.
        PluginError: there is no code that runs stages of webdataset.
    """
    return None if given in (None, [], ()) else STAGES["webdataset"](given)


@dataclass(frozen=True)
class Augment:
    """Augmentation of the user, applied to the crops of training images in the loader workers."""

    functions: Sequence[Callable[..., Tensor]]
    """One function for all views, or one for each view. A function takes a tensor (C, H, W) of the type of the
    images, and returns a tensor (C, S, S) of this type. A function with a second argument also gets a seeded
    `torch.Generator`."""
    seed: int
    """Seed of the run."""
    replaces: bool = False
    """True if the functions make each crop from the whole image; False if they change the crops of the method."""

    def check(self, views: int, *, packed: bool) -> None:
        """Check that the augmentation fits the views of a method.

        Raises:
            ValueError: the numbers of functions and views differ, or `replaces` is True for packed crops.
        """
        if len(self.functions) not in (1, views):
            raise ValueError(
                f"data.augment has {len(self.functions)} functions, but the method has {views} views. "
                "Give one function for all views, or one per view."
            )
        if self.replaces and packed:
            raise ValueError("data.augment_replaces is not possible for packed crops. Leave it out.")

    def views(self, views: SampleParameters, size: tuple[int, int]) -> SampleParameters:
        """Return the parameters with which an image of `size` (H, W) is decoded for this augmentation."""
        if not self.replaces:
            return views
        if any(view.is_plain for view in views):
            raise ShardError("data.augment_replaces is not possible with crops of a Gram teacher. Leave it out.")
        return [
            replace(
                view,
                boxes=np.tile([0, 0, *size], (len(view.boxes), 1)),
                flips=np.zeros(len(view.boxes), dtype=bool),
                degrees=None,
                window=(0, 0, *view.shape),  # a window keeps the image from being decoded at a smaller size
                colors=(),
            )
            for view in views
        ]

    @contextmanager
    def cutting(self, key: str, position: int) -> Iterator[Callable[[Tensor, int, ViewParameters, Tensor], None]]:
        """Yield a function `cut(image, number, view, out)` that cuts and augments the crops of a view of one sample.

        `image` (C, H, W) is the image, `number` the index of the view, and `out` (n, S, S, C) of the same type gets the
        crops.

        Args:
            key: name of the sample in error messages.
            position: position of the sample in the run.
        """
        with seeded(self.seed, position, AUGMENTING) as generator:

            def cut_view(image: Tensor, number: int, view: ViewParameters, out: Tensor) -> None:
                if not self.replaces:
                    cut(image, view, out)
                if view.is_plain:
                    return
                function = self.functions[number % len(self.functions)]
                more = (generator,) if _takes_generator(function) else ()
                for place in out.permute(0, 3, 1, 2):  # (C, S, S)
                    with named_errors(key):
                        crop = function(image if self.replaces else place.contiguous(), *more)
                    self._check_crop(crop, place, function, number)
                    place.copy_(crop)

            yield cut_view

    def _check_crop(self, crop: Any, place: Tensor, function: Callable[..., Any], number: int) -> None:
        """Raise `ShardError` if the result of a function is not a crop of the type and shape of `place`."""
        if isinstance(crop, Tensor) and crop.dtype == place.dtype and crop.shape == place.shape:
            return
        found = f"{_name(crop)} of shape {tuple(crop.shape)}" if isinstance(crop, Tensor) else type(crop).__name__
        hint = " Give one function per view, if the views have crops of different sizes." if self.replaces else ""
        raise ShardError(
            f"data.augment: {kind(function)} returned {found} for view {number}. It must return a tensor of the type "
            f"{_name(place)} and of shape {tuple(place.shape)}; the run normalises the crops itself.{hint}"
        )


def _name(values: Tensor) -> str:
    """Return the name of a tensor's type, such as uint8."""
    return str(values.dtype).removeprefix("torch.")


def _takes_generator(function: Callable[..., Any]) -> bool:
    """Return True if a function has a second required argument. Modules, such as torchvision's, take only the image."""
    if isinstance(function, torch.nn.Module):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters) > 1

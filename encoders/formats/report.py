"""What becomes of a checkpoint, and the checks that every family of encoders makes of one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Source = Literal["auto", "ours", "dino", "mae", "deit", "swin", "twins", "sam", "vit_pytorch", "timm"]
State = dict[str, Tensor]


@dataclass
class Report:
    """What became of a checkpoint; prints as text."""

    used: list[str] = field(default_factory=list)
    """tensors that the encoder took"""
    left_out: list[str] = field(default_factory=list)
    """parts of the checkpoint that the encoder has no place for, and that belong elsewhere"""
    fresh: list[str] = field(default_factory=list)
    """tensors of the encoder that the checkpoint does not have; they keep their initial values"""
    resized: list[str] = field(default_factory=list)
    """a sentence for each tensor that was changed to fit"""

    def __str__(self) -> str:
        lines = [f"{len(self.used)} tensors loaded"]
        lines += [f"left out: {_short(self.left_out)}"] if self.left_out else []
        lines += [f"not in the checkpoint, initial values kept: {_short(self.fresh)}"] if self.fresh else []
        return "\n".join(lines + self.resized)


def check_names(state: Iterable[str], expected: Iterable[str], decides: Mapping[str, str]) -> None:
    """Whether the checkpoint has the tensors that the encoder needs, and no others.

    Args:
        decides: part of a tensor's name -> the setting of the encoder that it depends on.

    Raises:
        ValueError: lists what is missing and what is unknown, and the settings to look at.
    """
    missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint does not fit the encoder; missing from the checkpoint: {listed(missing)}; "
            f"unknown to the encoder: {listed(unexpected)}; {advice(missing + unexpected, decides)}"
        )


def check_shapes(state: State, own: State, decides: Mapping[str, str]) -> None:
    """Whether all tensors of `state` have the shapes that they have in the encoder, `own`.

    Raises:
        ValueError: lists the others.
    """
    wrong = [
        f"{name} {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
        for name, tensor in state.items()
        if tensor.shape != own[name].shape
    ]
    if wrong:
        raise ValueError(f"shapes that do not fit the encoder's: {listed(wrong)}; {advice(wrong, decides)}")


def adapt_channels(weight: Tensor, channels: int, name: str, report: Report) -> Tensor:
    """Filters of the first layer (D, C, h, w) for `channels` channels: theirs in turn, times C / channels.

    So an image that repeats its channels gives what it gave before.
    """
    before = weight.shape[1]
    if before == channels:
        return weight
    report.resized.append(f"{name} repeated in turn from {before} to {channels} channels, times {before}/{channels}")
    return weight[:, [i % before for i in range(channels)]] * (before / channels)


def advice(names: Iterable[str], decides: Mapping[str, str]) -> str:
    """Which settings decide about these tensors."""
    settings = sorted({setting for part, setting in decides.items() if any(part in name for name in names)})
    return f"settings to look at: {', '.join(settings)}" if settings else "no setting of the encoder changes this"


def listed(names: Iterable[str], most: int = 12) -> str:
    names = list(names)
    return (", ".join(names[:most]) or "nothing") + (f" and {len(names) - most} more" if len(names) > most else "")


def _short(names: Iterable[str]) -> str:
    """Names by their first part, with a count: `head.* (2)`."""
    groups: dict[str, int] = {}
    for name in names:
        first, dot, _ = name.partition(".")
        groups[first + ".*" * bool(dot)] = groups.get(first + ".*" * bool(dot), 0) + 1
    return ", ".join(name if count == 1 and "*" not in name else f"{name} ({count})" for name, count in groups.items())

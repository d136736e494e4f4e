"""Settings of device_check.py, which all stages read, and the device."""

from pathlib import Path

import torch
from pydantic import Field

from tessera.runtime.settings import Settings

ROOT = Path(__file__).parents[2]


def device() -> torch.device:
    """Return the GPU, or the CPU if there is no GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Wait until the device has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class DeviceCheck(Settings):
    """Check the training on a GPU and measure its speed. Each stage is a process of its own with a time limit."""

    output: Path = Path("runs/device_check")
    """folder for results.jsonl, results.md and log.txt; the rows of a new check are appended to results.jsonl"""
    stages: str | list[str] | None = None
    """names of the stages to run; default: all"""
    minutes: float = Field(default=9.5, gt=0)
    """time for all stages; a stage that is still running is then ended, and no further stage is started"""
    data: str | None = None
    """labelled SHARDS of full-size images for the stage `run`; default: generated JPEGs of 500 x 375 pixels"""
    cifar: Path | None = None
    """folder with the CIFAR-10 shards cifar10-{train,test}-*.tar.gz for the stage `cifar`; default: the stage is left
    out"""
    allow_cpu: bool = False
    """rehearse the stages without a GPU, with small shapes; the times then say nothing"""
    stage: str | None = None
    """for internal use: the stage that this process runs"""

    @property
    def small(self) -> bool:
        """True for a rehearsal with small shapes on a machine without a GPU."""
        return not torch.cuda.is_available()

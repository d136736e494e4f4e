"""The objects of a pretraining run that the training loop uses."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator

from tessera.pretrain.checkpoints.save import Saver
from tessera.pretrain.checkpoints.trainer_json import TrainState
from tessera.pretrain.config import RunConfig
from tessera.pretrain.engines import Engine
from tessera.pretrain.flop import Work
from tessera.pretrain.methods.method import Method
from tessera.pretrain.monitoring.online import Accuracy, OnlineEvaluation, OnlineKNN, OnlineViews
from tessera.pretrain.monitoring.recorder import Recorder


@dataclass
class TrainingRun:
    """Objects of a pretraining run that the training loop uses."""

    config: RunConfig
    output: Path
    accelerator: Accelerator
    method: Method
    engine: Engine
    recorder: Recorder | None
    """Recorder of metrics and pictures; None except on the main process."""
    online: OnlineKNN | OnlineViews | None
    """k-NN and linear probe, or the score without labels; None for a supervised method, or if it is turned off."""
    saver: Saver
    images: int
    """Number of images of the data set."""
    state: TrainState = field(default_factory=lambda: TrainState(step=0))
    """Progress of the run, such as the number of steps and images so far. Every checkpoint stores this state."""
    accuracy: Accuracy | None = None
    """Evaluation of a supervised method; None for other methods, or if the settings name no evaluation shards."""
    dense: OnlineEvaluation | None = None
    """Evaluation of images with maps; None if the settings name none."""

    work: Work | None = None
    """FLOP and tokens per image; None if they cannot be counted, and except on the main process."""

    @cached_property
    def copy_stream(self) -> torch.cuda.Stream:
        """Stream on which batches are copied to the GPU of this process."""
        return torch.cuda.Stream(self.accelerator.device)

    @property
    def steps(self) -> int:
        """Length of the run in optimizer steps."""
        return self.config.steps

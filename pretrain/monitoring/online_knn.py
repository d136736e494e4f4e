"""k-NN inside pretraining: how good the encoder's features are right now."""

from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from data.augment import to_model_input
from data.crops import CenterCrop
from data.loader import Reading, evaluation_batches
from data.shards import DEFAULT, SourceConfig
from encoders.base import Encoder
from evaluation.features import check_disjoint, extract, resize_size
from evaluation.knn import knn_accuracy
from pretrain.config import EvaluationConfig


class Scorer:
    """Scores an encoder on labelled shards. Called on all processes together."""

    def __init__(
        self,
        config: EvaluationConfig,
        bank: str | list[str],
        image_size: int,
        accelerator: Accelerator,
        source: SourceConfig = DEFAULT,
    ) -> None:
        """`bank`: labelled SHARDS of the neighbours; `image_size`: side in pixels of the encoded images."""
        assert config.val is not None
        check_disjoint(bank, config.val)
        self.config, self.bank, self.val = config, bank, config.val
        self.image_size, self.accelerator, self.source = image_size, accelerator, source
        self.held_out = self._first_images(config.pictures)

    def _first_images(self, count: int) -> Tensor:
        """(count, 3, H, W) normalised: the first held-out images as they are scored, for pictures."""
        transform = CenterCrop(self.image_size, resize=resize_size(self.image_size, None))
        reading = Reading(source=self.source)
        batches = evaluation_batches(self.val, transform, max(count, 1), labels=False, reading=reading)
        return cast(Tensor, to_model_input(next(iter(batches)).to(self.accelerator.device)).views[0].images)[:count]

    def score(self, encoder: Encoder) -> dict[str, float]:
        """`knn_top1`, 0 to 1. Leaves the encoder in the mode it was in and draws no random numbers."""
        training = encoder.training
        encoder.eval()
        with torch.random.fork_rng(devices=[]):
            parts = [
                extract(
                    encoder,
                    shards,
                    accelerator=self.accelerator,
                    image_size=self.image_size,
                    batch_size=self.config.batch_size,
                    progress=False,
                    source=self.source,
                )
                for shards in (self.bank, self.val)
            ]
        encoder.train(training)
        (train, train_labels), (val, val_labels) = parts
        accuracy = knn_accuracy(train, train_labels, val, val_labels, k=(self.config.k,), accelerator=self.accelerator)
        return {"knn_top1": accuracy[self.config.k][0]}

"""Online k-NN: the accuracy of the encoder's features during pretraining."""

import torch
from accelerate import Accelerator
from torch import Tensor

from data.augment import to_model_input
from data.crops import CenterCrop
from data.loader import Reading, evaluation_batches
from data.shards import DEFAULT, SourceConfig
from encoders.base import Encoder, Preprocessing
from evaluation.features import Extraction, check_disjoint, extract, resize_size, single_view
from evaluation.knn import KNNProtocol, knn_accuracy
from pretrain.config import EvaluationConfig


class OnlineKNN:
    """k-NN evaluation of an encoder on labelled shards. All processes must create and call the evaluation."""

    def __init__(
        self,
        config: EvaluationConfig,
        bank: str | list[str],
        image_size: int,
        accelerator: Accelerator,
        source: SourceConfig = DEFAULT,
    ) -> None:
        """
        Args:
            config: settings; `config.val` names the shards of the queries.
            bank: labelled SHARDS of the neighbours.
            image_size: side of the images in pixels.
            accelerator: processes and device.
            source: options for reading remote shards.

        Raises:
            EvaluationError: a shard is in the bank and in `config.val`.
        """
        assert config.val is not None
        check_disjoint(bank, config.val)
        self.config, self.bank, self.val = config, bank, config.val
        self.image_size, self.accelerator, self.source = image_size, accelerator, source
        self._first: Tensor | None = None

    def first_images(self, preprocessing: Preprocessing) -> Tensor:
        """Return the first `config.pictures` images of `config.val`, normalised, for pictures: (N, C, S, S)."""
        if self._first is None:
            transform = CenterCrop(self.image_size, resize=resize_size(self.image_size, None))
            count = self.config.pictures
            reading = Reading(source=self.source, preprocessing=preprocessing)
            batches = evaluation_batches(self.val, transform, max(count, 1), labels=False, reading=reading)
            batch = next(iter(batches)).to(self.accelerator.device)
            self._first = single_view(to_model_input(batch))[:count]
        return self._first

    def evaluate(self, encoder: Encoder) -> dict[str, float]:
        """Return `knn_top1`, 0 to 1. The mode of the encoder and the random states stay as they are."""
        training = encoder.training
        encoder.eval()
        extraction = Extraction(
            image_size=self.image_size, batch_size=self.config.batch_size, progress=False, source=self.source
        )
        with torch.random.fork_rng(devices=[]):
            train, val = (extract(encoder, shards, self.accelerator, extraction) for shards in (self.bank, self.val))
        encoder.train(training)
        accuracy = knn_accuracy(train, val, KNNProtocol(k=(self.config.k,)), self.accelerator)
        return {"knn_top1": accuracy[self.config.k][0]}

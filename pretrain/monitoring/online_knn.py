"""Online k-NN and linear probe: accuracies of the encoder's features during pretraining."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from tessera.data.augment import to_model_input
from tessera.data.crops import CenterCrop
from tessera.data.loader import Reading, evaluation_batches
from tessera.data.shards import DEFAULT, SourceConfig
from tessera.encoders.base import Encoder, Preprocessing
from tessera.evaluation import logistic
from tessera.evaluation.classes import open_labelled_pair
from tessera.evaluation.features import (
    Extraction,
    LabelledFeatures,
    check_labels,
    extract,
    pooled,
    resize_size,
    single_view,
)
from tessera.evaluation.knn import KNNProtocol, knn_accuracy
from tessera.evaluation.labelled import subtract_mean
from tessera.pretrain.config import EvaluationConfig
from tessera.runtime.collectives import all_gather, all_reduce_sum

PIXEL_SIDE = 32
"""Side in pixels to which larger images are shrunk before the k-NN accuracy of the raw pixels is computed."""


class OnlineKNN:
    """k-NN and linear probe of an encoder on labelled shards, with the same features.

    All processes must create the object and call `evaluate`.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        bank: str | list[str],
        image_size: int,
        accelerator: Accelerator,
        source: SourceConfig = DEFAULT,
    ) -> None:
        """Open the shards of the bank and of the queries, and match their classes by name.

        Args:
            config: settings of the evaluation. `config.val` names the labelled SHARDS of the query images.
            bank: labelled SHARDS in which neighbours are searched, and on which the linear probe is fitted.
            image_size: side of the images in pixels.
            accelerator: accelerator of the run, which knows the processes and the device.
            source: options for reading remote shards.

        Raises:
            ShardError: a shard cannot be used, or a sample has no label.
            EvaluationError: a shard is both in the bank and in `config.val`, or the classes cannot be matched.
        """
        assert config.val is not None
        self.config = config
        self.bank, self.val = open_labelled_pair(bank, config.val, source, accelerator)
        self.image_size, self.accelerator, self.source = image_size, accelerator, source
        self.queries = 0
        """Number of scored images; known after the first evaluation."""
        self._first: Tensor | None = None

    def first_images(self, preprocessing: Preprocessing) -> Tensor:
        """Return the first `config.pictures` images of `config.val` as normalised model input: (N, C, S, S)."""
        if self._first is None:
            transform = CenterCrop(self.image_size, resize=resize_size(self.image_size, None))
            count = self.config.pictures
            reading = Reading(source=self.source, preprocessing=preprocessing)
            batches = evaluation_batches(self.val, transform, max(count, 1), labels=False, reading=reading)
            batch = next(iter(batches)).to(self.accelerator.device)
            self._first = single_view(to_model_input(batch))[:count]
        return self._first

    def evaluate(self, encoder: Encoder, *, pixels: bool = False) -> dict[str, float]:
        """Return the top-1 accuracies, 0 to 1: of k-NN as `knn_top1`, and of the linear probe as `linear_top1`.

        The linear probe is left out if `config.linear_iterations` is 0.
        The encoder's mode (train or eval) and the random states are the same afterwards.

        Args:
            encoder: encoder to evaluate.
            pixels: also return the accuracy of the raw pixels, as `knn_pixels`. The images are shrunk to `PIXEL_SIDE`
                pixels, and the mean image of the bank is subtracted.

        Raises:
            EvaluationError: at the first evaluation, if `check_labels` refuses the labels.
        """
        training = encoder.training
        encoder.eval()
        extraction = Extraction(
            image_size=self.image_size,
            batch_size=self.config.batch_size,
            progress=False,
            source=self.source,
            feature=pooled_and_pixels if pixels else pooled,
        )
        with torch.random.fork_rng(devices=[]):
            train, val = (extract(encoder, shards, self.accelerator, extraction) for shards in (self.bank, self.val))
        encoder.train(training)
        if not self.queries:  # later evaluations read the same labels
            bank, queries = (torch.cat(all_gather(part.labels)) for part in (train, val))
            check_labels(bank, queries, self.bank.classes)
        self.queries = int(all_reduce_sum(torch.tensor(len(val.labels))))
        scores = {"knn_top1": self._accuracy(train, val, slice(encoder.dim))}
        if self.config.linear_iterations:
            scores["linear_top1"] = self._linear(train, val, slice(encoder.dim))
        if pixels:
            scores["knn_pixels"] = self._accuracy(train, val, slice(encoder.dim, None), centred=True)
        return scores

    def _accuracy(
        self, train: LabelledFeatures, val: LabelledFeatures, columns: slice, *, centred: bool = False
    ) -> float:
        """Return the k-NN accuracy of some columns of the features. If `centred`, first subtract the mean of the
        bank."""
        bank, queries = train.features[:, columns], val.features[:, columns]
        if centred:
            bank, queries = subtract_mean(bank, queries)
        bank, queries = train._replace(features=bank), val._replace(features=queries)
        return knn_accuracy(bank, queries, KNNProtocol(k=(self.config.k,)), self.accelerator)[self.config.k][0]

    def _linear(self, train: LabelledFeatures, val: LabelledFeatures, columns: slice) -> float:
        """Return the accuracy of the linear probe on some columns of the features."""
        train, val = (part._replace(features=part.features[:, columns]) for part in (train, val))
        return logistic.probe(train, val, self.config.linear_iterations, self.accelerator.device)


def pooled_and_pixels(encoder: Encoder, images: Tensor) -> Tensor:
    """Return the encoder's pooled output, concatenated with the pixels of the shrunk images.

    (B, C, S, S) -> (B, D + C * s * s), where s is the smaller of S and `PIXEL_SIDE`.
    """
    side = min(images.shape[-1], PIXEL_SIDE)
    return torch.cat([pooled(encoder, images), F.adaptive_avg_pool2d(images, side).flatten(1)], 1)

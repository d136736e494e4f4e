"""Score of the patch tokens during a run: the mean IoU of a k-NN segmentation (`patch_knn`)."""

from accelerate import Accelerator

from tessera.data.loader import Reading
from tessera.data.maps import IGNORED
from tessera.data.shards import Access
from tessera.data.workers import free_cores
from tessera.encoders.base import Encoder
from tessera.evaluation.splits import open_splits
from tessera.extras.dense.frozen import Frozen, whole_tokens
from tessera.extras.dense.patch_knn import PatchKNNSettings, segment
from tessera.extras.dense.segmentation import class_numbers, count_values, scores
from tessera.pretrain.config import EvaluationConfig
from tessera.pretrain.monitoring.online import OnlineEvaluation, eval_mode
from tessera.runtime.settings import SettingsError

K = 10
"""Number of nearest tokens."""
BANK = 50_000
"""Number of tokens in the bank, on average."""


class OnlineSegmentation(OnlineEvaluation):
    """k-NN segmentation of the images of a run's evaluation. Collective."""

    name = "mean IoU of a k-NN segmentation"

    def __init__(self, config: EvaluationConfig, image_size: int, accelerator: Accelerator, source: Access) -> None:
        """Open the images, and read their maps.

        Args:
            config: settings of the evaluation.
            image_size: side in pixels to which images are resized, rounded down to a whole number of tokens.
            accelerator: accelerator of the run.
            source: options for reading remote shards.

        Raises:
            SettingsError: only one of `maps_train` and `maps_val` is set.
            ShardError: an image or a map is missing or damaged.
            EvaluationError: an image is in both sets, or a map has an unknown class.
        """
        flags = ("--evaluation.maps_train", "--evaluation.maps_val")
        if config.maps_train is None or config.maps_val is None:
            given, missing = flags if config.maps_val is None else flags[::-1]
            raise SettingsError(f"{given} needs {missing}, which also names images with maps. Give both, or neither.")
        self.train, self.val = open_splits(config.maps_train, config.maps_val, source, accelerator, flags)
        self.values = count_values(self.train, self.val, None, accelerator)
        self.numbers = class_numbers(self.values, config.maps_ignore).to(accelerator.device)
        self.config, self.image_size, self.accelerator, self.source = config, image_size, accelerator, source
        given = {"checkpoint": "", "train": config.maps_train, "val": config.maps_val}
        self.settings = PatchKNNSettings(**given, precision=self.options["precision"], k=[K], bank=BANK)

    def evaluate(self, encoder: Encoder) -> dict[str, float]:
        """Return the mean IoU, 0 to 1, as `patch_miou`. Mode and random states stay unchanged. Collective."""
        workers = free_cores(self.accelerator.num_processes)
        reading = Reading(workers, source=self.source, preprocessing=encoder.preprocessing, maps=self.values)
        with eval_mode(encoder):
            size = whole_tokens(encoder, self.image_size) or encoder.stride
            frozen, opened = Frozen(encoder, size, reading), (self.train, self.val)
            (matrix,), _, _ = segment(frozen, opened, self.numbers, self.settings, self.accelerator)
        kept = (self.numbers != IGNORED).nonzero().squeeze(1).tolist()
        return {"patch_miou": scores(matrix, kept)["mean_iou"]}

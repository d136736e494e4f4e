"""Measure how well scores without labels agree with the accuracy of a linear probe, over the checkpoints of many runs.

    python benchmarks/label_free.py RUNS... --data TRAIN_SHARDS --output scores.jsonl

Each run was evaluated with `--evaluation.val` at the steps of its checkpoints (`--checkpoint_every` equal to
`--evaluate_every`, and `--checkpoint.keep_every`). The scores of each checkpoint are appended to the output, and a
command that was stopped goes on where it ended. The printed table holds the rank correlation (Spearman) of each score
with the accuracy of the linear probe in metrics.jsonl: the mean over the runs, and over all checkpoints of a method or
of all methods together.

Scores, for 6 crops of each image, drawn alike for all runs:

- view retrieval: `evaluation/view_retrieval.py`
- RankMe (2210.02885): exponential of the entropy of the singular values of the features
- LiDAR (2312.04000): the same of the eigenvalues of a linear discriminant analysis whose classes are the images
- alpha (alpha-ReQ, NeurIPS 2022): slope of the spectrum of the covariance, as -|slope - 1|
- clusters: adjusted mutual information of two k-means clusterings (k = 10), each on other crops of the images
- neighbours: share of the 10 nearest neighbours of an image that two of its crops have in common
- loss: minus the loss of the run
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from scipy.stats import rankdata
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score
from torch import Tensor

from tessera import encoders
from tessera.data.batch import ViewParameters
from tessera.data.collate import ViewShape
from tessera.data.colors import color_operations, draw_colors
from tessera.data.crops import MultiCropConfig, RandomCropConfig, random_boxes
from tessera.data.shards import Source, open_shards
from tessera.encoders.base import Encoder
from tessera.evaluation.features import extract, input_size
from tessera.evaluation.view_retrieval import crop_features, view_retrieval
from tessera.pretrain.monitoring.collapse import effective_rank
from tessera.runtime.processes import exit_on_user_error
from tessera.runtime.settings import Positional, Settings, parse, read_yaml

CROPS = 6
SPECTRUM = slice(3, 100)
"""Eigenvalues through which the slope of the spectrum is fitted."""


class LabelFreeBenchmark(Settings):
    """Compare scores without labels with the linear probe, over the checkpoints of runs. RUNS: run folders."""

    runs: Positional[list[str]] = Field(min_length=1)
    """run folders"""
    data: str
    """SHARDS of the images whose crops are scored"""
    output: Path
    """JSON lines file to which the scores of each checkpoint are appended"""
    images: int = 1000
    """number of images"""


def lidar(features: Tensor) -> float:
    """Return LiDAR of the features of the crops of each image, (N, q, D) float64."""
    count, crops, dim = features.shape
    means = features.mean(1)  # (N, D)
    between = (means - means.mean(0)).T @ (means - means.mean(0)) / (count - 1)
    rest = (features - means[:, None]).flatten(0, 1)
    within = rest.T @ rest / (count * (crops - 1)) + 1e-4 * torch.eye(dim, dtype=rest.dtype)
    values, vectors = torch.linalg.eigh(within)
    whiten = vectors * values.rsqrt() @ vectors.T
    return _entropy_rank(torch.linalg.eigvalsh(whiten @ between @ whiten).clamp(min=0))


def _entropy_rank(values: Tensor) -> float:
    share = values / values.sum()
    return torch.special.entr(share).sum().exp().item()


def alpha(features: Tensor) -> float:
    """Return -|slope - 1| of the logarithmic spectrum of the covariance of features (N, D) float64."""
    spectrum = torch.linalg.eigvalsh(features.T.cov()).flip(0).clamp(min=1e-30)
    places = np.arange(1, len(spectrum) + 1)
    slope = np.polyfit(np.log(places[SPECTRUM]), spectrum.log().numpy()[SPECTRUM], 1)[0]
    return -abs(-slope - 1)


def clusters(features: Tensor) -> float:
    """Return the agreement of two clusterings of the images, each on half of the crops (N, q, D)."""
    halves = [F.normalize(half.mean(1), dim=1).numpy() for half in features.chunk(2, 1)]
    options: dict[str, Any] = {"n_clusters": 10, "n_init": 3}
    found = [KMeans(**options, random_state=seed).fit_predict(half) for seed, half in enumerate(halves)]
    return float(adjusted_mutual_info_score(*found))


def neighbours(features: Tensor) -> float:
    """Return the overlap of the 10 nearest neighbours among the first and among the second crops (N, q, D)."""
    near = []
    for crops in F.normalize(features[:, :2], dim=2).unbind(1):
        similarity = (crops @ crops.T).fill_diagonal_(-2)
        near.append(torch.zeros_like(similarity).scatter_(1, similarity.topk(10).indices, 1.0))
    return (near[0] * near[1]).sum(1).mean().item() / 10


SCORES: dict[str, Callable[[Tensor], float]] = {
    "RankMe": lambda features: effective_rank(features[:, 0]),
    "LiDAR": lidar,
    "alpha": lambda features: alpha(features[:, 0]),
    "clusters": clusters,
    "neighbours": neighbours,
}


class Crops:
    """Draws `CROPS` crops with colour changes of each image."""

    packing = None

    def __init__(self, size: int) -> None:
        config = MultiCropConfig(global_size=size)
        self.views = (ViewShape(CROPS, size),)
        self._boxes = RandomCropConfig(size=size, scale=config.global_scale)
        halves = ((0.5,) * CROPS, (0.1,) * CROPS)
        self._colors = color_operations(config, *halves, blur_sigma=config.blur_sigma)

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        view = random_boxes(size, rng, CROPS, self._boxes)
        return [replace(view, colors=draw_colors(rng, self._colors, CROPS))]


def score(encoder: Encoder, shards: Source, images: int) -> dict[str, float]:
    """Return all scores of an encoder without labels."""
    accelerator = Accelerator()
    pairs = crop_features(encoder, shards, accelerator, progress=False, workers=0)

    def rows(encoder: Encoder, crops: Tensor) -> Tensor:
        """Return the features of all crops of an image in one row: (CROPS * B, C, S, S) -> (B, CROPS * D)."""
        return torch.cat(encoder(crops).pooled.chunk(CROPS), 1)

    options = {"transform": Crops(input_size(encoder, None)), "feature": rows, "images": images, "labels": False}
    found = extract(encoder, shards, accelerator, **options, batch_size=64, progress=False, workers=0)
    features = found.features.double().unflatten(1, (CROPS, -1))
    features -= features.mean((0, 1))
    return {"view retrieval": view_retrieval(pairs)[0]} | {name: one(features) for name, one in SCORES.items()}


def table(lines: Sequence[dict[str, Any]]) -> None:
    """Print the rank correlations of all scores with the linear probe."""
    methods = sorted({line["method"] for line in lines})
    runs = {run: [line for line in lines if line["run"] == run] for run in dict.fromkeys(x["run"] for x in lines)}
    print("| score |", " | ".join(["within a run, mean", "lowest", *methods, "all"]), "|")
    print("|---|" + "--:|" * (len(methods) + 3))
    for name in ["view retrieval", *SCORES, "loss"]:
        within = [correlation(found, name) for found in runs.values() if len(found) > 2]
        groups = [[line for line in lines if line["method"] == method] for method in methods]
        across = [correlation(group, name) for group in [*groups, lines]]
        cells = [float(np.mean(within)), min(within, default=math.nan), *across]
        print(f"| {name} |", " | ".join(f"{cell:.2f}" for cell in cells), "|")


def correlation(lines: Sequence[dict[str, Any]], name: str) -> float:
    """Return the rank correlation of a score with the linear probe over checkpoints."""
    pairs = [(line[name], line["probe"]) for line in lines if not math.isnan(line[name])]
    if len(pairs) < 3:
        return math.nan
    ranks = rankdata(np.array(pairs), axis=0)
    return float(np.corrcoef(ranks.T)[0, 1])


def run(settings: LabelFreeBenchmark) -> None:
    """Score the checkpoints that the output does not have yet, and print the table."""
    lines = [json.loads(line) for line in settings.output.read_text().splitlines()] if settings.output.exists() else []
    done = {(line["run"], line["step"]) for line in lines}
    names = {Path(folder).name for folder in settings.runs}
    shards = open_shards(settings.data)
    for folder in map(Path, settings.runs):
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        for step, record in {one["step"]: one for one in records if "linear_top1" in one}.items():
            file = folder / "checkpoints" / f"step-{step:08d}" / "encoder.safetensors"
            if (folder.name, step) in done or not file.exists():
                continue
            found = score(encoders.load(file), shards, settings.images)
            method = str(read_yaml(folder / "config.yaml")["method"])
            own = {"run": folder.name, "method": method, "step": step, "knn": record["knn_top1"]}
            lines.append(own | {"probe": record["linear_top1"], "loss": -record.get("loss", math.nan)} | found)
            with settings.output.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(lines[-1], flush=True)
    table([line for line in lines if line["run"] in names])


if __name__ == "__main__":
    with exit_on_user_error():
        run(parse(LabelFreeBenchmark))

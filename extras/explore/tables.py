"""Findings as Parquet files, and as printed text."""

from pathlib import Path

import numpy as np

from tessera.evaluation.embed import pyarrow
from tessera.extras.explore.findings import DATA, VAL, Findings
from tessera.runtime.files import atomic_write

SETS = ("data", "val")
KINDS_OF_PAIRS = ("data", "data-val", "val")


def write_tables(findings: Findings, output: Path) -> None:
    """Write OUTPUT/findings.parquet with a row for each image of the data set, val.parquet for the validation set, and
    pairs.parquet with a row for each near-copy.

    A run leaves out images by their keys (`data.exclude`), and both sets may have the same keys.
    """
    keys, names = np.array(findings.keys, dtype=object), np.array(findings.class_names, dtype=object)
    medoid = np.zeros(len(keys), bool)
    medoid[findings.medoids] = True
    images = {"key": keys, "set": np.array(SETS, dtype=object)[findings.sets], "label": findings.labels}
    if len(names):
        images["class"] = np.where(findings.labels >= 0, names[findings.labels], np.array(None, dtype=object))
    images |= findings.flags | {f"{name}_score": values for name, values in findings.scores.items()}
    images |= {"cluster": findings.cluster, "medoid": medoid}
    for part, name in ((DATA, "findings"), (VAL, "val")):
        rows = findings.sets == part
        if rows.any():
            _write(output / f"{name}.parquet", {column: values[rows] for column, values in images.items()})
    first, second = findings.pairs.T
    pairs = {
        "key": keys[first],
        "set": images["set"][first],
        "other_key": keys[second],
        "other_set": images["set"][second],
    }
    pairs |= {"similarity": findings.pair_similarity, "margin": findings.pair_margin}
    _write(output / "pairs.parquet", pairs)


def _write(path: Path, columns: dict[str, np.ndarray]) -> None:
    module, parquet = pyarrow()
    with atomic_write(path) as temporary:
        parquet.write_table(module.table({name: module.array(values) for name, values in columns.items()}), temporary)


def summary(findings: Findings) -> str:
    """Return the findings in lines of text."""
    notes = findings.notes
    lines = [f"{notes['data']:,} images in --data, {notes['val']:,} in --val, {notes['unreadable']:,} cannot be read"]
    if notes["neighbours_recall"] < 1:
        lines.append(f"neighbours by inverted lists: recall {notes['neighbours_recall']:.1%} of the exact neighbours")
    recall = ", ".join(f"{kind} {share:.1%}" for kind, share in notes["recall"].items())
    lines += [
        f"near-copies: margin of at least {notes['threshold']:.3f}",
        f"  recall on copies planted in {notes['planted_images']:,} of your images: {recall}",
        f"  expected false finds: at most {notes['expected_false_images']:,.0f} images "
        f"({notes['expected_false_share']:.1%})",
        "  pairs: " + ", ".join(f"{count:,} in {kind}" for kind, count in notes["pairs"].items()),
    ]
    for name, mask in findings.flags.items():
        counts = [f"{int(mask[findings.sets == part].sum()):,} in --{SETS[part]}" for part in (DATA, VAL)]
        lines.append(f"{name}: {', '.join(counts if notes['val'] else counts[:1])}")
    if findings.flags["label_doubt"].sum() > (findings.labels >= 0).sum() / 2:
        lines[-1] += ". Ignore them: this encoder does not see these classes"
    if notes["knn"]:
        knn = notes["knn"]
        lines.append(
            f"{knn['k']}-NN accuracy of --val: {knn['all']:.1%} of all images, {knn['without_leaks']:.1%} of those "
            "without copies in --data"
        )
    worst = sorted(notes["class_agreement"].items(), key=lambda one: one[1])[:5]
    if worst:
        lines.append("classes whose neighbours agree least: " + ", ".join(f"{n} {share:.1%}" for n, share in worst))
    return "\n".join([*lines, f"{notes['clusters']:,} clusters"])

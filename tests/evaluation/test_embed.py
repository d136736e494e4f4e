import subprocess
import sys

import numpy as np
import pytest

from tessera import encoders
from tessera.evaluation.embed import EmbedSettings, run
from tessera.evaluation.features import EvaluationError, extract
from tessera.runtime.processes import make_accelerator
from tests.launched import ROOT


@pytest.mark.medium
def test_the_command_writes_features_keys_and_labels(shards, tmp_path):
    encoder = encoders.build("vit_micro", depth=1).eval()
    encoders.save(encoder, tmp_path / "vit.safetensors")
    command = [sys.executable, "evaluation/embed.py", "--checkpoint", tmp_path / "vit.safetensors", "--workers", "1"]
    command += ["--data", shards / "val-0.tar", "--output", tmp_path / "new" / "val.npz", "--batch_size", "4"]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["val.npz"]
    found = np.load(tmp_path / "new" / "val.npz")
    features, labels, _ = extract(encoder, str(shards / "val-0.tar"), make_accelerator())
    np.testing.assert_allclose(found["features"], features.numpy(), atol=1e-5)
    np.testing.assert_array_equal(found["labels"], labels.numpy())
    assert found["keys"].tolist() == [f"val-0.tar/val-0-{i:04d}" for i in range(13)]


def test_images_without_labels_are_embedded(shards, tmp_path):
    settings = {"checkpoint": "pixels", "image_size": 16, "data": str(shards / "bare-0.tar"), "workers": 0}
    run(EmbedSettings(output=str(tmp_path / "bare.npz"), **settings))
    found = np.load(tmp_path / "bare.npz")
    assert set(found) == {"features", "keys"}
    with pytest.raises(EvaluationError, match=r"\.npz"):
        run(EmbedSettings(output=str(tmp_path / "bare.csv"), **settings))
    with pytest.raises(EvaluationError, match="Cannot write --output"):
        run(EmbedSettings(output=str(tmp_path / "bare.npz" / "in a file.npz"), **settings))

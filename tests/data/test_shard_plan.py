"""Which image goes where."""

import numpy as np

from tessera.data.make_shards import split
from tessera.data.shards.listing import list_folder


def test_split_covers_everything_in_order(photos, tmp_path):
    folder = photos({f"{n:03d}.jpg": bytes(1 + 997 * n % 5000) for n in range(300)})
    listing = list_folder(folder, labels="none", links="inside", besides=tmp_path)
    order = np.random.default_rng(0).permutation(300)
    cut = split(listing, order, 50_000, 1.0)
    assert np.concatenate([cut.entries(n) for n in range(len(cut))]).tolist() == order.tolist()
    padded = 512 + -(-listing.sizes // 512) * 512
    assert [int(padded[cut.entries(n)].sum()) for n in range(len(cut))] == cut.bytes.tolist()
    listing.labels = np.where(np.arange(300) < 150, 7, -1)  # 1,024 bytes for each label
    labelled = split(listing, order, 50_000, 1.0)
    assert int(labelled.bytes.sum()) == int(padded.sum()) + 150 * 1024
    assert cut.bytes.max() < 50_000 + 6000
    assert cut.bytes.min() > 30_000

"""Which image goes where."""

import numpy as np

from tessera.data.make_shards import split
from tessera.data.shards.listing import list_folder


def test_split_covers_everything_in_order(photos, tmp_path):
    folder = photos({f"{n:03d}.jpg": bytes(1 + 997 * n % 5000) for n in range(300)})
    listing = list_folder(folder, labels="none", besides=tmp_path)
    order = np.random.default_rng(0).permutation(300)
    cut = split(listing, order, 50_000, 1.0)
    assert np.concatenate(cut).tolist() == order.tolist()
    padded = 512 + -(-listing.sizes // 512) * 512
    sizes = [int(padded[entries].sum()) for entries in cut]
    assert max(sizes) < 50_000 + 6000
    assert min(sizes) > 30_000
    listing.labels = np.where(np.arange(300) < 150, 7, -1)  # 1,024 bytes for each label
    assert len(split(listing, order, 50_000, 1.0)) == len(cut) + 3

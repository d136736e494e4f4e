"""Weights of a NaViT."""

from functools import partial

import pytest
import torch

from tessera.encoders import load_weights
from tessera.extras.formats import navit as formats
from tests.encoders import helpers

small = partial(helpers.small, "navit_small")


def test_weights_do_not_describe_the_encoder():
    with pytest.raises(ValueError, match="do not tell their settings"):
        formats.describe(small().state_dict())


def test_position_tables_are_resized_along_their_length():
    model, encoder = small(), small(image_size=(32, 24))
    report = load_weights(encoder, model.state_dict())
    assert report.resized == ["pos_embed_rows resized from 4 to 8 by linear interpolation"]
    table = model.pos_embed_rows.detach()
    # entry i of 8 lies at (i + 0.5) / 2 - 0.5 of 4, and at the ends at the first and the last
    places = [max(0.0, min(3.0, (i + 0.5) / 2 - 0.5)) for i in range(8)]
    expected = [table[int(p)] * (1 - p % 1) + table[min(int(p) + 1, 3)] * (p % 1) for p in places]
    torch.testing.assert_close(encoder.pos_embed_rows, torch.stack(expected))
    assert torch.equal(encoder.pos_embed_columns, model.pos_embed_columns)
    assert load_weights(small(image_size=8), model.state_dict()).resized == [
        "pos_embed_rows resized from 4 to 2 by linear interpolation",
        "pos_embed_columns resized from 6 to 2 by linear interpolation",
    ]


def test_weights_without_a_pool_are_refused():
    report = load_weights(small(pool="mean"), small().state_dict())
    assert {"attn_pool.query", "attn_pool.attn.q.weight", "attn_pool.norm.weight"} <= set(report.left_out)
    with pytest.raises(ValueError, match=r"Missing from the checkpoint: attn_pool.* encoder settings: .*pool"):
        load_weights(small(), small(pool="mean").state_dict())


def test_missing_and_unknown_weights_are_named():
    state = small().state_dict() | {"extra": torch.zeros(1)}
    del state["blocks.1.mlp.fc2.weight"]
    with pytest.raises(ValueError, match=r"Missing .*blocks.1.mlp.fc2.weight. Unknown to the encoder: extra"):
        load_weights(small(), state)

"""A narrow transformer on the features of an encoder: MAE's decoder (2111.06377), or a predictor of features.

Letters in shapes: B images; T tokens of a batch; V visible tokens; N tokens of an image; D width of the encoder; E
width of the narrow transformer; P predicted values of a token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tessera.encoders.blocks import Block
from tessera.encoders.checks import check_counts, check_heads
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import Mask
from tessera.encoders.layers import LayerNorm, in_bf16, init_linear, sincos_table
from tessera.encoders.segments import Segments, insert_prefix, split_prefix, token_positions

LONGEST_SIDE = 512
"""Largest number of token rows or token columns of an image. The table of positions has this number of entries."""


class NarrowTransformer(nn.Module):
    """Linear embedding, fixed sine-cosine positions, transformer blocks, a norm and a linear prediction layer.

    With `depth` 0, there is only the prediction layer, which predicts the values of each token from its own features.

    Args:
        features: width D of the features.
        dim: width E of the blocks, a multiple of 4.
        depth: number of blocks.
        heads: number of attention heads of a block.
        predicted: number of values P to predict for each token.
        mask_token: add a learned token for hidden tokens, for which the encoder returns no features.
        bf16_residuals: under autocast to bf16, keep the tokens between blocks in bf16.

    Raises:
        EncoderError: the width does not fit the number of heads.
    """

    def __init__(
        self,
        features: int,
        dim: int,
        depth: int,
        heads: int,
        predicted: int,
        *,
        mask_token: bool,
        bf16_residuals: bool = False,
    ) -> None:
        super().__init__()
        check_counts(features=features, predicted=predicted)
        if depth:
            check_heads(dim, heads)
        self.embed = nn.Linear(features, dim) if depth else nn.Identity()
        self.mask_token = nn.Parameter(nn.init.normal_(torch.empty(1, dim), std=0.02)) if mask_token else None
        block: dict[str, Any] = {
            "mlp_ratio": 4.0,
            "qkv_bias": True,
            "norm_eps": 1e-6,
            "layer_scale": None,
            "drop_path": 0.0,
        }
        block["bf16_residuals"] = self.bf16_residuals = bf16_residuals
        self.blocks = nn.ModuleList(Block(dim, heads, **block) for _ in range(depth))
        self.norm = LayerNorm(dim, eps=1e-6) if depth else nn.Identity()
        self.pred = nn.Linear(dim if depth else features, predicted)
        self.waves: Tensor
        if depth:  # rows and columns share one table of sine-cosine positions
            self.register_buffer("waves", sincos_table(1, LONGEST_SIDE, dim)[:, : dim // 2], persistent=False)
        self.apply(lambda layer: init_linear(layer, "xavier"))

    def forward(
        self,
        tokens: Tensor,
        grids: Tensor,
        mask: Mask | None = None,
        *,
        pooled: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted values (T, P) of all tokens, image after image and row by row.

        Args:
            tokens: features of the tokens, (V, D) in the order of `mask.visible`, or (T, D) without `mask`.
            grids: number of token rows and of token columns of each image, (B, 2) on the CPU.
            mask: hidden tokens. Each hidden token is represented by the mask token and its position.
            pooled: features (B, D) of one additional token per image, or None. This token has no position. It has no
                effect if `depth` is 0.
            sequences: `PackedImages.sequences`, or None for images of one size.

        Raises:
            EncoderError: an image has too many rows or columns of tokens.
        """
        x = self.embed(tokens)  # (V, E) or (T, E)
        if mask is not None:
            assert self.mask_token is not None
            x = self.mask_token.to(x.dtype).repeat(len(mask.hidden), 1).index_copy(0, mask.visible, x)  # (T, E)
        if not self.blocks:
            return self.pred(x)
        lengths = grids.prod(1)
        segments = Segments(lengths, x.device, sequences=sequences)
        x = x + self._positions(grids, segments)
        first = None if pooled is None else self.embed(pooled)[:, None]  # (B, 1, E)
        if segments.uniform:
            x = x.unflatten(0, (len(lengths), -1))  # (B, N, E)
            x = x if first is None else torch.cat([first, x], 1)
        elif first is not None:
            x = insert_prefix(x, first, lengths)
            segments = Segments(lengths + 1, x.device, sequences=sequences)
        x = in_bf16(x) if self.bf16_residuals else x
        for block in self.blocks:
            x = block(x, None if segments.uniform else segments)
        x = self.pred(self.norm(x.float() if self.bf16_residuals else x))
        if segments.uniform:
            return x[:, 0 if first is None else 1 :].flatten(0, 1)
        return x if first is None else split_prefix(x, 1, lengths)[1]

    def _positions(self, grids: Tensor, segments: Segments) -> Tensor:
        """Return fixed sine-cosine positions of all tokens: grids (B, 2) -> (T, E). The first half of each position
        vector encodes the column, and the second half encodes the row."""
        if int(grids.max()) > LONGEST_SIDE:
            raise EncoderError(
                f"An image has a side of {int(grids.max())} tokens. The limit is {LONGEST_SIDE}. Use smaller images."
            )
        (row, column), _ = token_positions(grids, segments)  # (T,) each
        return torch.cat([self.waves[column], self.waves[row]], 1)

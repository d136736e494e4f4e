"""Methods by the name of `--method`."""

from pretrain.methods.dino import DINO
from pretrain.methods.mae import MAE

METHODS = {"dino": DINO, "mae": MAE}

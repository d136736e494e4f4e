"""Methods by the name of `--method`."""

from pretrain.methods.dino import DINO

METHODS = {"dino": DINO}

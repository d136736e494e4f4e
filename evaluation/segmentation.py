"""`accelerate launch evaluation/segmentation.py` starts `tessera segmentation`, as in earlier versions."""

import sys

from tessera.__main__ import run

if __name__ == "__main__":
    run(["segmentation", *sys.argv[1:]])

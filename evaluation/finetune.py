"""Fine-tune with labels: `accelerate launch evaluation/finetune.py` is `tessera finetune`."""

import sys

from tessera.__main__ import run

if __name__ == "__main__":
    run(["finetune", *sys.argv[1:]])

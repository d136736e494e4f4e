"""`python -m encoders.weights SOURCE OUTPUT` starts `tessera export`, as in earlier versions."""

import sys

from tessera.__main__ import run

if __name__ == "__main__":
    run(["export", *sys.argv[1:]])

"""`python -m data.preview` starts `tessera preview`, as in earlier versions."""

import sys

from tessera.__main__ import run

if __name__ == "__main__":
    run(["preview", *sys.argv[1:]])

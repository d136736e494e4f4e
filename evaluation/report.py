"""Compare runs on one page: `python -m evaluation.report` is `tessera report`."""

import sys

from tessera.__main__ import run

if __name__ == "__main__":
    run(["report", *sys.argv[1:]])

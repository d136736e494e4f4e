"""Command that checks shards. The code of the command is in `data/tools/check.py`.

python -m data.check_shards SHARDS [options]
"""

import sys

from data.tools.check import main
from runtime import streams

if __name__ == "__main__":
    streams.protect()
    sys.exit(main())

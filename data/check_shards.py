"""Command that checks shards. The code of the command is in `data/tools/check.py`.

tessera check_shards SHARDS [options]
"""

import sys

from tessera.data.tools.check import main
from tessera.runtime import streams

if __name__ == "__main__":
    streams.protect()
    sys.exit(main())

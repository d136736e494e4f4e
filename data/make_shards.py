"""Command that makes shards from images. The code of the command is in `data/tools/make.py`.

tessera make_shards IMAGES SHARDS [options]
"""

import sys

from tessera.data.tools.make import main
from tessera.runtime import streams

if __name__ == "__main__":
    streams.protect()
    sys.exit(main())

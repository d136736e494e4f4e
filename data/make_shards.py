"""Command that makes shards from images. The code of the command is in `data/tools/make.py`.

python -m data.make_shards IMAGES SHARDS [options]
"""

import sys

from data.tools.make import main
from runtime import streams

if __name__ == "__main__":
    streams.protect()
    sys.exit(main())

"""Make shards of images; the code is in `data/tools/make.py`.

python -m data.make_shards IMAGES SHARDS [options]
"""

import sys

from data.tools.make import main

if __name__ == "__main__":
    sys.exit(main())

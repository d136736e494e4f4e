"""runs_in_turn.py with the toy method and the toy encoder: python toy_runs.py FILE.json"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.pretrain.toy import ENTRIES

for entries, name, value in ENTRIES:
    entries[name] = value
runpy.run_path(str(Path(__file__).with_name("runs_in_turn.py")), run_name="__main__")

"""Several pretraining runs in one process, one after the other: starting a process takes longer than a small run.

python runs_in_turn.py FILE.json, which holds the list of their command lines. Before a run that resumes, the newest
checkpoint in its folder and all that came after the one before are taken away, as if it had been killed between them.
"""

import json
import shutil
import sys
from pathlib import Path

from tessera.pretrain.run import main

for arguments in json.loads(Path(sys.argv[1]).read_text()):
    if "--resume" in arguments:
        output = Path(arguments[arguments.index("--output") + 1])
        shutil.copy(output / "metrics.jsonl", output / "uninterrupted.jsonl")
        shutil.move(output / "encoder.safetensors", output / "uninterrupted.safetensors")
        shutil.rmtree(max((output / "checkpoints").glob("step-*")))
    code = main(arguments)
    if code:
        sys.exit(code)

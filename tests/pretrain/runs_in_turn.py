"""Several pretraining runs in one process, one after the other: starting a process takes longer than a small run.

python runs_in_turn.py FILE.json, which holds the list of their command lines. Before a run that resumes, the newest
checkpoint in its folder is taken away, as if it had been killed before it, and what the run has written is moved to
its folder `uninterrupted`.
"""

import json
import shutil
import sys
from pathlib import Path

from tessera.pretrain import job
from tessera.pretrain.run import main

job.count_work = lambda *_: None  # a third of such a run; tests/pretrain/test_flop.py tests what it counts
for arguments in json.loads(Path(sys.argv[1]).read_text()):
    if "--resume" in arguments:
        output = Path(arguments[arguments.index("--output") + 1])
        (output / "uninterrupted").mkdir()
        shutil.copy(output / "metrics.jsonl", output / "uninterrupted")
        for file in output.glob("encoder*"):
            shutil.move(file, output / "uninterrupted")
        shutil.rmtree(max((output / "checkpoints").glob("step-*")))
    code = main(arguments)
    if code:
        sys.exit(code)

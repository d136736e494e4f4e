"""Tables of measurements in Markdown, and the machine on which they were measured."""

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tessera.runtime.files import atomic_write
from tessera.runtime.machine import processor


def machine() -> str:
    """Return the GPU or the processor, and the versions of Python and torch."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{processor()}, {os.cpu_count()} cores"
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


def typed_command() -> str:
    """Return the command of this process as Markdown, as it is typed in a shell."""
    return f"`{shlex.join(['python', f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]])}`"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """Return a table in Markdown. The first `text` columns are text, and the others are numbers."""
    rules = ["---"] * text + ["--:"] * (len(headings) - text)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows))


def publish(parts: Sequence[str], output: Path | None) -> None:
    """Print paragraphs and tables, and write them to a Markdown file if `output` is given."""
    document = "\n\n".join(parts) + "\n"
    print(document)
    if output:
        with atomic_write(output) as part:
            part.write_text(document)

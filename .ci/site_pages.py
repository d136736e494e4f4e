"""Hook of mkdocs.yml: the pages of the site that are made from other files, and links to files outside of docs/."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

SETTING = re.compile(r"  (--\S+(?: (?:\{str: .*?\}\}|\S*\{str: .*?\}\}|\S+))?) +(.+)$")
"""A line of `--help`: a flag, its type, and its meaning."""
HEADER = ["| setting | meaning |", "|---|---|"]
ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
GENERATED = ["index.md", "commands.md", "python.md", *(f"{notebook.stem}.md" for notebook in NOTEBOOKS)]
PYTHON = """# Python interface

::: tessera.interface

::: encoders.registry

::: encoders.saving

::: encoders.base
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, which is the README, the notebooks, and the reference of commands and of Python."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    for name, text in (("index.md", readme), ("commands.md", commands()), ("python.md", PYTHON)):
        files.append(File.generated(config, name, content=text))
    for notebook in NOTEBOOKS:
        for name, content in converted(notebook).items():
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside of docs/ by the paths of these files, because the site does not contain them."""

    def plain(match: re.Match[str]) -> str:
        text, path = match.groups()
        target = path.partition("#")[0]
        inside = ROOT / "docs" / target
        if "://" in path or not target or (inside.exists() and inside.resolve().is_relative_to(ROOT / "docs")):
            return match[0]
        if target in GENERATED:
            return match[0]
        found = next(p for p in (inside.resolve(), ROOT / target) if p.exists())
        name = f"`{found.relative_to(ROOT)}`"
        return name if text.strip("`") in name else f"{text} ({name})"

    markdown = markdown.replace("](../README.md", "](index.md")
    markdown = re.sub(r"\]\((\.\./)?examples/(\w+)\.ipynb\)", r"](\2.md)", markdown)
    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", plain, markdown)


def converted(notebook: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook with its outputs, and the pictures of the page: {path in the site: content}."""
    resources = {"unique_key": notebook.stem, "output_files_dir": "pictures"}
    exporter = MarkdownExporter(preprocessors=[CoalesceStreamsPreprocessor])  # else, a blank line follows each line
    text, found = exporter.from_filename(str(notebook), resources=resources)
    return {f"{notebook.stem}.md": text.replace("](../docs/", "](")} | found["outputs"]


def commands() -> str:
    """Return a page with the help of each command."""
    sys.path.insert(0, str(ROOT))
    from tessera.__main__ import COMMANDS, installed_commands

    known, parts = COMMANDS | installed_commands(), ["# Commands\n"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shown = list(pool.map(help_of, known))
    for (name, (_, purpose)), text in zip(known.items(), shown, strict=True):
        parts.append(f"## {name}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n{tables(text)}\n")
    return "\n".join(parts)


def help_of(name: str) -> str:
    """Return the help of a command, with all of its settings."""
    words = [sys.executable, "-m", "tessera", name, "--help", *(["all"] if name == "pretrain" else [])]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    shown = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout.strip()
    return shown.partition("\nusage: ")[0]  # the help of `adapt` and of `finetune` also contains that of `pretrain`


def tables(text: str) -> str:
    """Return help text in Markdown, with one table for each group of settings."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if SETTING.match(line)), len(lines))
    described = "\n".join(lines[:first]).removesuffix("settings:").strip()
    if first == len(lines):
        return f"```text\n{described}\n```"
    usage, _, prose = described.partition("\n\n")
    parts = ["```text", usage, "```", "", prose.strip(), "", *HEADER]
    for line in lines[first:]:
        if row := SETTING.match(line):
            meaning = row[2].strip().replace("|", "\\|").replace("<", "&lt;")
            parts.append(f"| `{row[1].strip()}` | {meaning} |")
        elif line.strip():
            parts += ["", f"**{line.strip().removesuffix(':')}**", "", *HEADER]
    return "\n".join(parts)

"""The command `tessera`, which works in any folder.

    tessera COMMAND [--SETTING VALUE ...]
    tessera FLAGS_OF_ACCELERATE_LAUNCH COMMAND [--SETTING VALUE ...]

The second form starts several processes, for example `tessera --num_processes 8 pretrain --data SHARDS`. The launcher
forwards SIGTERM to the processes, and prints nothing after the last message of the command. The launcher's flag
`--config_file zero2` selects the training engine for ZeRO stage 2.
"""

import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tessera.runtime import stdio
from tessera.runtime.machine import set_environment
from tessera.runtime.plugins import entry_points
from tessera.runtime.synonyms import LAUNCHER
from tessera.runtime.user_error import printable

COMMANDS = {
    "pretrain": ("tessera.pretrain.run", "pretrain an encoder"),
    "knn": ("tessera.evaluation.knn", "k-NN accuracy"),
    "linear_probe": ("tessera.evaluation.linear_probe", "linear probe"),
    "view_retrieval": ("tessera.evaluation.view_retrieval", "score of an encoder without labels"),
    "embed": ("tessera.evaluation.embed", "write the features of images to a file"),
    "summary": ("tessera.encoders.summary", "print the size and cost of encoders"),
    "make_shards": ("tessera.data.make_shards", "make shards from a folder of images"),
    "check_shards": ("tessera.data.check_shards", "verify shards"),
    "slurm": ("tessera.launch.slurm", "submit SLURM jobs"),
    "completion": ("tessera.completion", "print a script that completes commands and flags in bash and zsh"),
}
"""Maps the name of each command to its module and its purpose."""
ONE_PROCESS = ("summary", "make_shards", "check_shards", "slurm", "completion")
"""Commands of the core that run in one process."""
GROUPS = ("tessera.evaluations", "tessera.commands", "tessera.launchers")
"""Entry points of commands in installed packages. NAME = "MODULE" becomes the command `tessera NAME`, which calls
`MODULE.main()`. Commands of the second group run in one process. Those of the third group start training processes
themselves, with the flags of the launcher: `MODULE.main(flags)`."""


def main() -> None:
    """Run the command that the command line names. Exit with code 130 after Ctrl-C, also while modules are imported."""
    try:
        stdio.protect()
        set_environment()  # before a command loads torch
        run(sys.argv[1:])
    except KeyboardInterrupt:
        print("\ntessera: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def run(words: list[str]) -> None:
    """Run the command that the words of a command line name."""
    if words[:1] == ["--version"]:
        print(f"tessera {importlib.metadata.version('tessera-ssl')}")
        return
    commands = COMMANDS
    place = next((i for i, word in enumerate(words) if word in commands), None)
    if place != 0:  # only now, because the metadata of installed packages takes time to read
        commands = COMMANDS | installed_commands()
        place = next((i for i, word in enumerate(words) if word in commands), None)
    if place is None:
        asked_for_help = not words or words[0] in ("-h", "--help")
        print(help_text(commands), file=sys.stdout if asked_for_help else sys.stderr)
        if not words:
            print(f"\n{next_step(Path(), commands)}")
        if not asked_for_help:
            print(f"\ntessera: {unknown(words, commands)}", file=sys.stderr)
        raise SystemExit(0 if asked_for_help else 2)
    launcher = words[:place]
    for word in launcher:
        flag = word.partition("=")[0]
        ours = LAUNCHER.get(flag.lstrip("-").replace("-", "_"), flag).split()[0]
        if flag.startswith("--") and ours.replace("_", "-") != flag.replace("_", "-"):
            print(f"tessera: unknown flag {flag}. Did you mean {ours}?", file=sys.stderr)
            raise SystemExit(2)
    if commands is not COMMANDS and any(point.name == words[place] for point in entry_points(GROUPS[2])):
        sys.argv = [f"tessera {words[place]}", *words[place + 1 :]]
        sys.exit(importlib.import_module(commands[words[place]][0]).main(launcher))
    if place == 0 or runs_in_one_process(words[place]):
        for word, following in itertools.pairwise([*launcher, ""]):
            flag, _, value = word.replace("-", "_").partition("=")
            if flag in ("__num_processes", "__num_machines") and (value or following) != "1":
                print(f"tessera: {words[place]} runs in one process. Remove {word} before it.", file=sys.stderr)
                raise SystemExit(2)
        sys.argv = [f"tessera {words[place]}", *words[place + 1 :]]
        sys.exit(importlib.import_module(commands[words[place]][0]).main())
    flags = [word.partition("=")[0].replace("-", "_") for word in launcher]
    if "__config_file" not in flags:  # without these flags, accelerate prints a warning about its defaults
        launcher = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", *launcher]
    from tessera.launch import accelerate_launch  # imported here, because the import takes seconds

    sys.argv = ["tessera", *launcher, "--module", "tessera", *words[place:]]
    accelerate_launch.main()


def installed_commands() -> dict[str, tuple[str, str]]:
    """Return the commands of extras and of other packages, in the form of `COMMANDS`, without those in `COMMANDS`."""
    points = [point for group in GROUPS for point in entry_points(group)]
    found = {point.name: (point.value, purpose(point.value)) for point in points}
    return {name: found[name] for name in sorted(found.keys() - COMMANDS.keys())}


def purpose(module: str) -> str:
    """Return the first line of the docstring of a module, without importing the module."""
    try:
        spec = importlib.util.find_spec(module)
        text = Path(spec.origin).read_text() if spec and spec.origin else ""
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].rstrip(".")
        return first[:1].lower() + first[1:]
    except Exception as error:  # a broken package hides no other command
        return f"cannot be imported: {type(error).__name__}"


def runs_in_one_process(command: str) -> bool:
    """Return True for a command of which each process of a launcher would do all of the work."""
    return command in ONE_PROCESS or any(point.name == command for point in entry_points(GROUPS[1]))


def unknown(words: list[str], commands: Iterable[str]) -> str:
    """Return an error message for a command line that contains no command.

    The message suggests a command if one of the words is similar to its name.
    """
    if words[0].startswith("--"):
        return f"no command follows {printable(' '.join(words))}. Example: tessera --num_processes 2 pretrain."
    for word in words:
        if close := difflib.get_close_matches(word, commands, n=1):
            return f"{word!r} is not a command. Did you mean {close[0]!r}?"
    return f"{words[0]!r} is not a command."


def help_text(commands: Mapping[str, tuple[str, str]]) -> str:
    """Return the list of commands."""
    lines = [
        "usage: tessera [FLAGS OF accelerate launch] COMMAND [--SETTING VALUE ...]",
        "       tessera --version",
        "",
        "commands:",
    ]
    lines += [f"  {name:<17}{purpose}" for name, (_, purpose) in commands.items()]
    return "\n".join([*lines, "", "`tessera COMMAND --help` lists the settings of a command."])


def next_step(folder: Path, commands: Iterable[str]) -> str:
    """Return a sentence that says what a user can do next in a folder."""
    runs = len(list(folder.glob("runs/*/config.yaml")))
    if runs and "report" in commands:
        return f"Runs here: {runs}. `tessera runs` lists them, and `tessera report runs` compares them."
    return "To begin, `tessera pretrain` trains on embedded digits, and `tessera pretrain --data IMAGES` on a folder."


if __name__ == "__main__":
    main()

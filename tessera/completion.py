"""Completion of commands and flags in bash and zsh.

    eval "$(tessera completion)"     # in ~/.bashrc; in ~/.zshrc, after: autoload -U bashcompinit && bashcompinit

The flags of a command are those of its `--help all`, which the shell reads when they are first needed.
"""

import argparse

from tessera.__main__ import COMMANDS, installed_commands

SCRIPT = """\
_tessera_commands="{commands}"
typeset -A _tessera_flags
_tessera() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command= number
    for ((number = 1; number < COMP_CWORD; number++)); do
        case " $_tessera_commands " in
            *" ${{COMP_WORDS[number]}} "*) command=${{COMP_WORDS[number]}} && break ;;
        esac
    done
    [ "$command" = slurm ] && command="slurm ${{COMP_WORDS[number + 1]}}"
    COMPREPLY=()
    if [ -z "$command" ]; then
        COMPREPLY=($(compgen -W "$_tessera_commands" -- "$current"))
    elif [ "${{current#-}}" != "$current" ]; then
        if [ -z "${{_tessera_flags[$command]:-}}" ]; then
            _tessera_flags[$command]=$(tessera $command --help all 2>/dev/null |
                grep -oE -e '^ *(-h, )?--[a-zA-Z][a-zA-Z0-9_.-]*' | grep -oE -e '--.*' | sort -u)
        fi
        COMPREPLY=($(compgen -W "${{_tessera_flags[$command]}}" -- "$current"))
    fi
}}
complete -o default -F _tessera tessera"""


def main() -> None:
    """Print the script that a shell evaluates, or the help."""
    argparse.ArgumentParser(
        "tessera completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(SCRIPT.format(commands=" ".join(COMMANDS | installed_commands())))


if __name__ == "__main__":
    main()

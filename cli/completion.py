"""Print what makes a shell complete verbs, options and files.

Put its output where your shell reads it:

    eval "$(rollout-log completion bash)"        # in ~/.bashrc
    eval "$(rollout-log completion zsh)"         # in ~/.zshrc
    rollout-log completion fish | source         # in ~/.config/fish/config.fish
"""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_log import cli

_BASH = """\
_rollout_log() {
    local IFS=$'\\n'
    COMPREPLY=($(rollout-log completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _rollout_log rollout-log
"""
SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -Uz bashcompinit && bashcompinit\n{_BASH}",
    "fish": (
        "complete -c rollout-log -a "
        "'(rollout-log completion words -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'\n"
    ),
}


def run(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help=f"One of {', '.join(SCRIPTS)}.")],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    if shell == "words":
        print("\n".join(candidates(words or [""])))
    elif shell in SCRIPTS:
        print(SCRIPTS[shell], end="")
    else:
        raise typer.BadParameter(f"{shell!r} is no shell this knows: there are {', '.join(SCRIPTS)}")


def candidates(words: list[str]) -> list[str]:
    """Return what the last of the words may become; nothing where that is a file's or a sample's name."""
    *before, current = words
    if not before:
        return [verb for verb in cli.VERBS if verb.startswith(current)]
    if before[0] not in cli.VERBS or not current.startswith("-"):
        return []
    options = [option for parameter in cli.load(before[0]).params for option in parameter.opts]
    return sorted(option for option in [*options, "--help"] if option.startswith(current))

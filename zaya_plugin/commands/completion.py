# SPDX-License-Identifier: Apache-2.0
"""`zaya --completion SHELL`: the script by which a shell completes commands, options and the words of a recipe. The
package shtab writes it from the parsers.
"""

import argparse

from zaya_plugin.commands.table import COMMANDS, parser_of
from zaya_plugin.config.messages import schema
from zaya_plugin.config.train_help import GROUPS, options
from zaya_plugin.ground.errors import mistake

# bash makes three words of key=value; the function puts them together, and returns the part behind the "=".
BASH = """\
_zaya_recipe() {{
  local key="" value="$1"
  if [[ $1 == "=" ]]; then key="${{COMP_WORDS[COMP_CWORD-1]}}=" value=""
  elif [[ ${{COMP_WORDS[COMP_CWORD-1]}} == "=" ]]; then key="${{COMP_WORDS[COMP_CWORD-2]}}="; fi
  compgen -W "{words}" -- "$key$value" | sed "s/^$key//"
}}"""


def completion(shell: str = "bash", *more: str) -> str:
    """Return the script for `shell`. Raises ValueError if shtab cannot write one for it."""
    import shtab

    if more or shell not in shtab.SUPPORTED_SHELLS:
        raise mistake(
            "--completion", " ".join((shell, *more)), problem="not a shell", allowed=", ".join(shtab.SUPPORTED_SHELLS)
        )
    words = [f"{group}={name}" for group in GROUPS for name in options(group)] + [f"{key}=" for key in schema()]
    root = argparse.ArgumentParser("zaya")
    root.add_argument("--version", action="store_true", help="print the version")
    groups = {"": root.add_subparsers()}
    for command, (function, purpose) in COMMANDS.items():
        above, _, name = command.rpartition(" ")
        parents = [parser_of(command)] if function else []
        parser = groups[above].add_parser(name, help=purpose, parents=parents, add_help=False)
        if not function:
            groups[command] = parser.add_subparsers()
        for action in parser._actions:
            if action.dest == "overrides":
                action.complete = {"bash": "_zaya_recipe", "zsh": f"({' '.join(words)})"}
    return shtab.complete(parser=root, shell=shell, preamble={"bash": BASH.format(words=" ".join(words))})

# SPDX-License-Identifier: Apache-2.0
"""The console script `zaya`: finds the command in the table, and ends with one message on stderr for a mistake.

Every module is imported where it is needed; neither `--help` nor composing a recipe imports torch. A user's mistake has
exit code 2; ZAYA_TRACEBACK=1 (or Hydra's HYDRA_FULL_ERROR=1) shows the traceback.
"""

from zaya_plugin.commands import process

process.end_on_interrupt(during_imports=True)  # before the other imports

# ruff: noqa: E402
import os
import sys

from zaya_plugin import __version__
from zaya_plugin.commands import table
from zaya_plugin.ground.errors import message, of_the_machine, replace_unprintable
from zaya_plugin.ground.exit_codes import INTERRUPTED, STOPPED, USER_ERROR


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    if argv is None:
        process.restart_in_utf8_mode()
    argv = sys.argv[1:] if argv is None else argv
    replace_unprintable()
    try:
        return _dispatch(argv)
    except ValueError as error:
        if process.shows_traceback():
            raise
        rank = os.environ.get("RANK", "0")
        print(f"zaya: {error}" if rank == "0" else f"zaya: rank {rank}: {error}", file=sys.stderr)
        return USER_ERROR
    except (OSError, MemoryError, RuntimeError) as error:  # torch's errors of memory are RuntimeErrors
        if isinstance(error, BrokenPipeError):  # `zaya train --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        text = of_the_machine(error, ".", offline=argv[0] not in ("train", "curriculum"))
        if text is None or process.shows_traceback():
            raise
        print(f"zaya: {text}", file=sys.stderr)
        return USER_ERROR
    except ModuleNotFoundError as error:
        package = error.name or ""
        # A part of a package, or of this one, is missing where an import is wrong: a bug, which needs its traceback.
        if "." in package or package in ("", "zaya_plugin", "hip_ops") or process.shows_traceback():
            raise
        problem = f"requires the package {package}, which is not installed"
        fix = f"an environment with it: pip install 'zaya_plugin[cpu]', or pip install {package}"
        print(f"zaya: {message(f'zaya {argv[0]}', problem=problem, fix=fix)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED
    finally:
        process.ignore_interrupts()


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in (*table.HELP, "help"):
        print(table.overview())
        return 0 if argv else USER_ERROR
    if argv[0] in ("-V", "--version"):
        print(f"zaya_plugin {__version__}")
        return 0
    if argv[0] == "--completion":
        from zaya_plugin.commands.completion import completion

        print(completion(*argv[1:]))
        return 0
    command, words = table.split(argv)
    process.require_directory()
    if not table.COMMANDS[command][0]:
        print(table.help_of(command))
        return 0 if words else USER_ERROR
    if command not in ("train", "curriculum"):  # which may become a rank, whose log has the warnings
        from zaya_plugin.ground import phases

        phases.quiet_hosts()
        phases.show(sys.stderr)
    parser = table.parser_of(command)
    if not parser.imports_large_packages:
        process.end_on_interrupt(during_imports=False)
    return parser.run(parser.read(words)) or 0


if __name__ == "__main__":
    sys.exit(main())

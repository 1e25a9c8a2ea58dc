# SPDX-License-Identifier: Apache-2.0
"""The console script `zaya`: the table of commands, and `zaya train`.

Every module is imported where it is needed; neither `--help` nor composing a recipe imports torch. A user's mistake
ends with one message on stderr and exit code 2; ZAYA_TRACEBACK=1 (or Hydra's HYDRA_FULL_ERROR=1) shows the traceback.
"""

import os
import signal
import sys

# Whether this process is `zaya`: not a test, nor a process that multiprocessing starts from it.
PROGRAM = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "") in ("zaya", "cli.py")
INTERRUPTED = 128 + signal.SIGINT
STOPPED = "zaya: stopped by SIGINT"


def _leave(number, frame) -> None:
    """End the process at once. During imports KeyboardInterrupt would not do: raised in a destructor or a callback it is
    printed and ignored, and libraries turn it into errors of their own.
    """
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def _leave_on_interrupt(during_imports: bool) -> None:
    """Set how Ctrl-C ends this process: by `_leave`, or later, when there is something to clean up, by KeyboardInterrupt.
    A signal that the caller ignores stays ignored.
    """
    if PROGRAM and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _leave if during_imports else signal.default_int_handler)


_leave_on_interrupt(during_imports=True)  # before the other imports

# ruff: noqa: E402
import contextlib
import importlib
import tempfile
from collections.abc import Iterable

from zaya_plugin import __version__
from zaya_plugin.ground.errors import ENDED_EARLY, message, mistake, nearest_name, of_the_machine, replace_unprintable

# Command -> module and function, and what the command does. Each function takes the words after the command and returns
# the exit code.
COMMANDS = {
    "train": ("zaya_plugin.cli:train", "train a recipe: compose it, check it, start or join the ranks"),
    "curriculum": ("zaya_plugin.run.recipe_commands:curriculum", "run the stages of a curriculum one after the other"),
    "slurm": ("zaya_plugin.run.recipe_commands:slurm", "print a batch script for SLURM, or submit it"),
    "export": (
        "zaya_plugin.run.recipe_commands:export",
        "write a recipe for Megatron-LM's pretrain_gpt.py or for Primus",
    ),
    "bench": (
        "zaya_plugin.bench.step_command:main",
        "measure a recipe's speed by part of the step, or predict it elsewhere",
    ),
    "checkpoint": (
        "zaya_plugin.run.checkpoint_commands:main",
        "list, verify, warm, prune, adopt and reshape a run's checkpoints",
    ),
    "convert": (
        "zaya_plugin.cli:convert",
        "import published weights, export a checkpoint to transformers, vLLM, SGLang",
    ),
    "generate": ("zaya_plugin.cli:generate", "continue prompts with a checkpoint or a published model"),
    "eval": ("zaya_plugin.cli:evaluate", "run evaluation tasks, compute perplexity by domain"),
    "aegis": ("zaya_plugin.cli:aegis", "supervise a long run: watch, restart, exchange nodes, report"),
    "data": ("zaya_plugin.cli:data", "make, pack, inspect and warm corpora"),
    "verify": (
        "zaya_plugin.machines.command:verify",
        "examine a machine or several nodes: environment, kernels, rates, a short training",
    ),
    "doctor": (
        "zaya_plugin.machines.command:doctor",
        "report installed packages, devices, known problems and host changes",
    ),
}
# Command of `zaya data` -> what it does; each is a module zaya_plugin.corpus.<name> with a main().
DATA_COMMANDS = {
    "prepare": "make a dataset from text, JSON lines or Python's standard library",
    "pack": "put whole documents into bins of one length, with long chains of thought trimmed",
    "check": "compare every byte of datasets with their checksums",
    "inspect": "print decoded samples with source, length and loss mask",
    "bundle": "join many small datasets, and report the random reads of a planned run",
    "warm": "read the data that a run needs next into the page cache",
    "mixture": "print tokens and epochs of each source that a blend draws, for one stage or several",
}
# Command of `zaya aegis` -> what it does; each is a module zaya_plugin.aegis.<name> with a main().
AEGIS_COMMANDS = {
    "run": "start the ranks of a command on this node, watch them, and restart, exchange or stop",
    "status": "show a supervised run in the terminal, once or live",
    "report": "effective training time, failures and their cost, in the terminal and as one HTML page",
    "explain": "read a folder of logs and say what happened and what would have been done",
}
# Command -> its commands.
BELOW = {
    "data": [*DATA_COMMANDS],
    "aegis": [*AEGIS_COMMANDS],
    "bench": ["step", "expect"],
    "checkpoint": ["list", "show", "verify", "warm", "prune", "adopt", "reshape"],
    "convert": ["import", "export", "roundtrip"],
    "export": ["megatron", "primus"],
}
# Old name -> the new one.
MOVED = {
    "zaya aegis lab": "make lab, in a checkout of the repository",
    "zaya aegis preflight": "zaya verify --nodes, with the same options; --output is the record's file",
}
USAGE = (
    "zaya: ZAYA1 pretraining as a Megatron-core plugin\n\n  zaya train experiment=cpu_demo    train a small ZAYA "
    "on this machine's CPU\n"
)
USER_ERROR = 2


def usage(command: str, purposes: dict[str, str]) -> str:
    """Return one line for each command under `command`."""
    lines = [f"  {command} {name:10}  {purpose}" for name, purpose in purposes.items()]
    return "\n".join([*lines, "", f"{command} COMMAND --help explains a command's options, with examples.", ""])


def unknown(command: str, name: str, known: Iterable[str]) -> ValueError:
    """Return the error of a command that does not exist, with the one that was probably meant, of this level or
    another.
    """
    from zaya_plugin.config import train_help

    known = [*known]
    elsewhere = {below: f"zaya {above} {below}" for above, names in BELOW.items() for below in names}
    elsewhere |= {top: f"zaya {top}" for top in COMMANDS}
    fix = f"{command} --help"
    if new := MOVED.get(f"{command} {name}"):
        return mistake(f"{command} {name}", problem="has another name", fix=new)
    if name in elsewhere:
        fix = elsewhere[name]
    elif close := nearest_name(name, known):
        fix = f"{command} {close}"
    elif command == "zaya export":
        fix = "zaya convert export CKPT --output DIR, for transformers, vLLM or SGLang"
    elif "=" in name:
        fix = f"zaya train {name}"
    elif name in train_help.options("experiment"):
        fix = f"zaya train experiment={name}"
    elif close := nearest_name(name, elsewhere):
        fix = elsewhere[close]
    return mistake(f"{command} {name}", problem="no such command", allowed=f"{', '.join(known)}, --help", fix=fix)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    if argv is None:
        _in_utf8_mode()
    argv = sys.argv[1:] if argv is None else argv
    replace_unprintable()
    try:
        return _dispatch(argv)
    except ValueError as error:
        if _shows_traceback():
            raise
        rank = os.environ.get("RANK", "0")
        print(f"zaya: {error}" if rank == "0" else f"zaya: rank {rank}: {error}", file=sys.stderr)
        return USER_ERROR
    except (OSError, MemoryError, RuntimeError) as error:  # torch's errors of memory are RuntimeErrors
        if isinstance(error, BrokenPipeError):  # `zaya train --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        text = of_the_machine(error, ".", offline=argv[0] not in ("train", "curriculum"))
        if text is None or _shows_traceback():
            raise
        print(f"zaya: {text}", file=sys.stderr)
        return USER_ERROR
    except ModuleNotFoundError as error:
        package = error.name or ""
        # A part of a package, or of this one, is missing where an import is wrong: that is no mistake of the user's.
        if "." in package or package in ("", "zaya_plugin", "hip_ops") or _shows_traceback():
            raise
        problem = f"needs the package {package}, which is not installed"
        fix = f"an environment with it: pip install 'zaya_plugin[cpu]', or pip install {package}"
        print(f"zaya: {message(f'zaya {argv[0]}', problem=problem, fix=fix)}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED
    finally:
        if PROGRAM:  # a further Ctrl-C would be a traceback of Python's own end
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _dispatch(argv: list[str]) -> int:
    purposes = {name: purpose for name, (_, purpose) in COMMANDS.items()}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE + "\n" + usage("zaya", purposes) + "zaya --version prints the version.")
        return 0 if argv else USER_ERROR
    if argv[0] in ("-V", "--version"):
        print(f"zaya_plugin {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        raise unknown("zaya", argv[0], purposes)
    _require_directory()
    from zaya_plugin.config.paths import expanded_words

    argv = expanded_words(argv)
    if argv[0] in BELOW and argv[1:] and argv[1] not in (*BELOW[argv[0]], "-h", "--help", "--explain"):
        raise unknown(f"zaya {argv[0]}", argv[1], BELOW[argv[0]])
    if argv[0] not in ("train", "curriculum"):  # which may become a rank, whose log has the warnings
        from zaya_plugin.ground import phases

        phases.quiet_hosts()
        phases.show(sys.stderr)
    name, _, function = COMMANDS[argv[0]][0].partition(":")
    module = importlib.import_module(name)
    if name != "zaya_plugin.cli":  # those below import further modules first
        _leave_on_interrupt(during_imports=False)
    return getattr(module, function)(argv[1:])


def _require_directory() -> None:
    """Raise ValueError if the current directory was removed: paths have no meaning then, and torch does not load."""
    try:
        os.getcwd()
    except OSError as error:
        raise mistake(
            "current directory",
            os.environ.get("PWD", ""),
            problem=f"cannot be read ({error.strerror}); it was removed, or is no longer mounted",
            allowed="a directory that exists",
            fix="cd to another one (`cd .` where it was made again)",
        ) from None


def data(argv: list[str]) -> int:
    """Run `zaya data COMMAND ...`."""
    return _run_below("data", "corpora for training", DATA_COMMANDS, "zaya_plugin.corpus", argv)


def aegis(argv: list[str]) -> int:
    """Run `zaya aegis COMMAND ...`; `--explain DIR` is `explain DIR`."""
    argv = ["explain", *argv[1:]] if argv[:1] == ["--explain"] else argv
    return _run_below("aegis", "keep a long run alive", AEGIS_COMMANDS, "zaya_plugin.aegis", argv)


def _run_below(name: str, purpose: str, commands: dict[str, str], package: str, argv: list[str]) -> int:
    """Run `zaya <name> COMMAND ...`, the main() of `<package>.<command>`, or print the commands."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"zaya {name}: {purpose}\n\n" + usage(f"zaya {name}", commands), end="")
        return 0 if argv else USER_ERROR
    module = importlib.import_module(f"{package}.{argv[0]}")
    _leave_on_interrupt(during_imports=False)
    return module.main(argv[1:]) or 0


def convert(argv: list[str]) -> int:
    """Run `zaya convert COMMAND ...`."""
    from zaya_plugin.run.convert_commands import main

    return main(argv, _prepare_torch)


def generate(argv: list[str]) -> int:
    """Run `zaya generate MODEL ...`."""
    from zaya_plugin.inference.generate_command import main

    return main(argv, _prepare_torch)


def evaluate(argv: list[str]) -> int:
    """Run `zaya eval MODEL ...`."""
    from zaya_plugin.inference.eval_command import main

    return main(argv, _prepare_torch)


def _prepare_torch() -> None:
    """Let a command that builds models run on machines without a device too."""
    from zaya_plugin import patches
    from zaya_plugin.ground import phases

    phases.begin("loading torch and Megatron")
    patches.apply_torch()
    _leave_on_interrupt(during_imports=False)


def train(argv: list[str]) -> int:
    """Run `zaya train`: Hydra's command line (overrides, --cfg, --info, --config-dir, -m) over the recipes."""
    from zaya_plugin.config.config_dir import with_search_path

    verbose = "--verbose" in argv
    argv = [item for item in with_search_path(argv) if item != "--verbose"]
    argv = ["dry_run=true" if item == "--dry-run" else item for item in argv]
    if any(flag in argv for flag in ("-h", "--help")):
        from zaya_plugin.config.train_help import train_help

        print(train_help(), end="")
        return 0
    from zaya_plugin.ground import phases

    phases.show(sys.stderr if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0" else None)
    phases.begin("composing the recipe")
    import hydra

    from zaya_plugin.config import compose
    from zaya_plugin.config.words import overrides_of

    overrides, rest = overrides_of(argv)
    compose.register()
    shows_traceback = _shows_traceback()
    outcomes: list[int | ValueError] = []

    def job(config) -> None:
        # A job's error is kept, not raised: Hydra would add lines to the message.
        try:
            outcomes.append(_run_job(config, overrides, verbose))
        except ValueError as error:
            if shows_traceback:
                raise
            outcomes.append(error)
        except BrokenPipeError:  # `zaya train dry_run=true | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            outcomes.append(0)
        except (OSError, MemoryError, RuntimeError) as error:
            text = of_the_machine(error, ".")
            if text is None or shows_traceback:
                raise
            outcomes.append(ValueError(text))
        code = outcomes[-1]
        if isinstance(code, int) and (code > 128 or code == ENDED_EARLY):  # stopped by a signal: no further jobs
            raise SystemExit(code)

    application = hydra.main(config_path=f"pkg://{compose.RECIPES}", config_name=compose.PRIMARY, version_base="1.3")(
        job
    )
    # Hydra's parser requires all overrides next to each other.
    compose.say_repeated(overrides)
    if {"-m", "--multirun"} & {*rest}:
        compose.check_sweep(overrides)
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises in place of printing and leaving
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(compose.readable_errors(overrides))
            sys.argv = ["zaya train", *compose.open_overrides(overrides)]
            if "-m" in rest or "--multirun" in rest:  # Hydra always writes multirun.yaml
                sys.argv.append(f"hydra.sweep.dir={stack.enter_context(tempfile.TemporaryDirectory())}")
            sys.argv += rest + ["--resolve"] * any(word.partition("=")[0] in ("--cfg", "-c") for word in rest)
            application()
    except SystemExit as end:
        if not outcomes:
            raise
        return int(end.code)
    finally:
        sys.argv = arguments
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    errors = [str(outcome) for outcome in outcomes if isinstance(outcome, ValueError)]
    if errors:
        raise ValueError(compose.with_experiment("\n".join(dict.fromkeys(errors)), overrides))
    return next((outcome for outcome in outcomes if outcome), 0)


def _in_utf8_mode() -> None:
    """Start this program again in Python's UTF-8 mode where the locale has another encoding: our files and those of
    packages are UTF-8, and Python reads them by the locale. Once: options of Python may leave the mode off.
    """
    import locale

    other = locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8")
    if other and not sys.flags.utf8_mode and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _shows_traceback() -> bool:
    return os.environ.get("ZAYA_TRACEBACK") == "1" or os.environ.get("HYDRA_FULL_ERROR") == "1"


def _run_job(config, overrides: list[str], verbose: bool) -> int:
    """Run one job of `zaya train`; each job of a multirun runs in <run_dir>/<job number>."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from zaya_plugin.config.compose import to_recipe
    from zaya_plugin.run.launch import launch

    _leave_on_interrupt(during_imports=False)
    recipe = to_recipe(config, overrides)
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        recipe.run_dir = os.path.join(recipe.run_dir, str(hydra_config.job.num))
        print(
            f"zaya: job {hydra_config.job.num}: {' '.join(hydra_config.overrides.task)} -> {recipe.run_dir}", flush=True
        )
    return launch(recipe, verbose)


if __name__ == "__main__":
    sys.exit(main())

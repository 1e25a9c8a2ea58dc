# SPDX-License-Identifier: Apache-2.0
"""The process of a command: its reaction to Ctrl-C, the encoding, the directory, and torch before it is imported."""

import os
import signal
import sys

from zaya_plugin.ground.exit_codes import INTERRUPTED, STOPPED

# Whether this process is `zaya`: not a test, nor a process that multiprocessing starts from it.
PROGRAM = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "") in ("zaya", "cli.py")


def _leave(number, frame) -> None:
    """End the process at once. During imports KeyboardInterrupt would not do: raised in a destructor or a callback it
    is printed and ignored, and libraries turn it into errors of their own.
    """
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def end_on_interrupt(during_imports: bool) -> None:
    """Set how Ctrl-C ends this process: at once during imports, later by KeyboardInterrupt, so that `finally` runs.
    A signal that the caller ignores stays ignored.
    """
    if PROGRAM and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _leave if during_imports else signal.default_int_handler)


def ignore_interrupts() -> None:
    """Ignore a further Ctrl-C at the end of this process, where Python itself would print a traceback."""
    if PROGRAM:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def restart_in_utf8_mode() -> None:
    """Restart this program in Python's UTF-8 mode where the locale has another encoding: our files and those of
    packages are UTF-8, and Python reads them by the locale. Once: options of Python may leave the mode off.
    """
    import locale

    other = locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8")
    if other and not sys.flags.utf8_mode and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def shows_traceback() -> bool:
    return os.environ.get("ZAYA_TRACEBACK") == "1" or os.environ.get("HYDRA_FULL_ERROR") == "1"


def require_directory() -> None:
    """Raise ValueError if the current directory cannot be used: it was removed, so that paths have no meaning and torch
    does not load; or it is a checkout whose zaya_plugin/ the programs that a command starts (`python -m
    zaya_plugin...`) would import in place of the installed one, which alone has zaya_plugin.patches.
    """
    import importlib.util

    from zaya_plugin.ground.errors import mistake

    try:
        folder = os.getcwd()
    except OSError as error:
        raise mistake(
            "current directory",
            os.environ.get("PWD", ""),
            problem=f"cannot be read ({error.strerror}); it was removed, or is no longer mounted",
            allowed="a directory that exists",
            fix="cd to another one (`cd .` if it was created again)",
        ) from None
    other, ours = os.path.join(folder, "zaya_plugin"), os.path.dirname(os.path.dirname(__file__))
    if not os.path.isfile(os.path.join(other, "__init__.py")) or getattr(sys.flags, "safe_path", False):
        return
    if not os.path.samefile(other, ours) or importlib.util.find_spec("zaya_plugin.patches") is None:
        raise mistake(
            "current directory",
            folder,
            problem="its zaya_plugin/ would be imported, and not the installed zaya_plugin",
            allowed="a directory without zaya_plugin/, or a checkout that is installed as editable",
            fix=f"cd to another one, or `pip install -e {folder}`",
        )


def prepare_torch() -> None:
    """Let a command that builds models run on machines without a device too."""
    from zaya_plugin import patches
    from zaya_plugin.ground import phases

    phases.begin("loading torch and Megatron")
    patches.apply_torch()
    end_on_interrupt(during_imports=False)

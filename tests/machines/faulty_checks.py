# SPDX-License-Identifier: Apache-2.0
"""Checks that fail in every way that a check can, for test_check_process.py."""

import os
import signal
import subprocess
import sys
import time

from zaya_plugin.machines.checks import Outcome, Setting


def good(setting: Setting, text: str) -> Outcome:
    print("what a library prints must not reach the channel")
    setting.say("half way")
    return Outcome("pass", f"{text} on {setting.device}", {"pid": os.getpid()})


def raises(setting: Setting) -> Outcome:
    raise RuntimeError("an illegal memory access\nwas encountered")


def crashes(setting: Setting) -> Outcome:
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(setting: Setting) -> Outcome:
    os._exit(7)


SLEEPS = "import time; time.sleep(600)"
# As torchrun and its ranks: each in a session of its own.
STARTS = f"""import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "{SLEEPS}"], start_new_session=True)
print(rank.pid, flush=True)
"""


def hangs(setting: Setting) -> Outcome:
    child = subprocess.Popen([sys.executable, "-c", SLEEPS])
    setting.say(str(child.pid))
    time.sleep(600)


def launched(setting: Setting, code: str) -> None:
    """Start a launcher with a rank and say their process ids."""
    words = [sys.executable, "-c", code]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    setting.say(f"{launcher.pid} {launcher.stdout.readline()}")


def hangs_in_ranks(setting: Setting) -> Outcome:
    launched(setting, STARTS + "time.sleep(600)")
    time.sleep(600)


def hangs_without_its_launcher(setting: Setting) -> Outcome:
    launched(setting, STARTS)
    time.sleep(600)


def crashes_beside_ranks(setting: Setting) -> Outcome:
    launched(setting, STARTS + "time.sleep(600)")
    os.kill(os.getpid(), signal.SIGKILL)

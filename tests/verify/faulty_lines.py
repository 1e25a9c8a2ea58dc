# SPDX-License-Identifier: Apache-2.0
"""Lines that fail in every way that a line can, for test_worker.py."""

import os
import signal
import subprocess
import sys
import time

from zaya_plugin.verify.line import Outcome, Setting


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


def hangs(setting: Setting) -> Outcome:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    setting.say(str(child.pid))
    time.sleep(600)

# SPDX-License-Identifier: Apache-2.0
"""Exit codes of a command. They stand alone, so that the first line of `zaya` can use them before any other import."""

import signal

USER_ERROR, INTERRUPTED = 2, 128 + signal.SIGINT
STOPPED = "zaya: stopped by SIGINT"

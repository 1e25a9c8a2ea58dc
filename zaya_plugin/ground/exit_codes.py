# SPDX-License-Identifier: Apache-2.0
"""Exit codes of a command and of a run. They stand alone, so that the first line of `zaya` can use them before any
other import.
"""

import signal

USER_ERROR, INTERRUPTED = 2, 128 + signal.SIGINT
# Of a run that was asked to end by a signal, and has saved and left before its last step: EX_TEMPFAIL of sysexits.h,
# "try again later". 16, 17, 93, 100 and 128 + n have a meaning in other launchers.
ENDED_EARLY = 75
# Of a run that a guard inside it has ended (loss spike, infinite or NaN values): it is to go back to a checkpoint from
# before.
ROLL_BACK = 76
STOPPED = "zaya: stopped by SIGINT"

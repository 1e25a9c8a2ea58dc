# SPDX-License-Identifier: Apache-2.0
"""The lock of an output, by processes."""

import signal
import subprocess
import sys

import pytest

from zaya_plugin.ground.output_lock import locked

HOLDER = """
import sys, time
from zaya_plugin.ground.output_lock import locked
with locked(sys.argv[1], "writing"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_it_names_its_holder_and_ends_with_it(tmp_path):
    output = tmp_path / "below" / "output"
    with subprocess.Popen([sys.executable, "-c", HOLDER, output], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"--output={output}: .*is writing .*process {holder.pid} on"):
            with locked(output, "writing"):
                pass
        holder.send_signal(signal.SIGKILL)
    left = tmp_path / "below" / "output.lock"
    assert left.exists()
    with locked(output, "writing"):
        pass
    assert not left.exists()

# SPDX-License-Identifier: Apache-2.0
"""A rank of the check `demo_losses` that crashes after its last step, as in a destructor of the device's library."""

import json
import os
import signal
import sys
from pathlib import Path

from zaya_plugin.config.compose import load_recipe
from zaya_plugin.machines.short_training import DEMO_LOSSES

rows = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(DEMO_LOSSES, 1))
Path(load_recipe(sys.argv[1]).run_dir, "metrics.jsonl").write_text("\n".join(rows))
os.kill(os.getpid(), signal.SIGSEGV)

# SPDX-License-Identifier: Apache-2.0
"""Test that patches for the CPU change nothing on an accelerator."""

import json
import os
import subprocess
import sys

REPORT = """
import json, torch
from zaya_plugin import patches
from zaya_plugin.patches import registry
before = {name: value for name, value in vars(torch.cuda).items() if callable(value) and not name.startswith("_")}
said_to_apply = [p.symbol for p in patches.describe() if p.applies]
patches.apply_torch()
patches.apply()
print(json.dumps({
    "applied": sorted(registry._installed),
    "of_the_cpu": [p.symbol for p in patches.describe() if p.scope == "cpu"],
    "said_to_apply": said_to_apply,
    "changed_in_torch": [name for name, value in before.items() if getattr(torch.cuda, name) is not value],
}))
"""


def test_no_patch_for_the_cpu_is_applied():
    done = subprocess.run([sys.executable, "-c", REPORT], env=os.environ, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["of_the_cpu"]) >= 10
    assert not set(report["applied"]) & set(report["of_the_cpu"])
    assert report["applied"] == sorted(report["said_to_apply"])
    assert not report["changed_in_torch"]

# SPDX-License-Identifier: Apache-2.0
"""The check `verified_code` of `zaya doctor`: which code runs in a step on AMD devices, its share of the predicted
step, and which of it ships as verified bytes.
"""

import contextlib
from typing import Any

import torch

from hip_ops.runtime import build, code_objects, launchers, operator
from hip_ops.versions import VERSIONS
from zaya_plugin.bench import step_code
from zaya_plugin.machines.checks import MI300X_TARGET, Outcome, Setting

EXPLANATION = (
    "verified: the package holds its bytes, which were scanned for hazards and run in an emulator of the device.",
    "unverified: compiled at the site, or of the container; `zaya verify` tests it on this machine.",
)


def verified_code(setting: Setting) -> Outcome:
    """List the code of the predicted step; on another machine than an AMD one as an MI300X would run it."""
    prediction, (target, versions) = step_code.stored(), running_versions(setting)
    rows = step_code.by_code(
        prediction["ms"], versions, build.shipped(target)[0] is not None, shipped_operators(target)
    )
    share = sum(row["share"] for row in rows if row["verified"])
    on = prediction["on"]
    text = (
        f"{percent(share)} of a step in verified code (PREDICTION for {on['devices']} devices, {on['cluster']}, "
        f"{prediction['step_ms']:,.0f} ms)"
    )
    details = [
        f"{'verified' if row['verified'] else 'unverified':11}{percent(row['share']):>7}  "
        f"{row['code']}{operators_of(row)}"
        for row in rows
    ]
    figures: dict[str, Any] = {"prediction": True, "target": target, "verified_share": share, "rows": rows}
    return Outcome("pass", text, figures | {"from": prediction["from"], "on": on}, details=[*details, *EXPLANATION])


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def operators_of(row: dict[str, Any]) -> str:
    names = [source for source in row["of"] if source in VERSIONS]
    return f": {', '.join(names)}" if names else ""


def running_versions(setting: Setting) -> tuple[str, dict[str, str]]:
    """Return the AMD target and the version of each operator that gets a call first: on the first device where it is
    AMD's, and otherwise what `auto` takes on a gfx942. An operator without a version has none."""
    if not setting.on_rocm:
        auto = {folder: [name for name in names if name in ("hip", "triton")] for folder, names in VERSIONS.items()}
        return MI300X_TARGET, {folder: names[0] for folder, names in auto.items() if names}
    device, versions = torch.device("cuda", 0), {}
    for one in operator.all_operators():
        with contextlib.suppress(ValueError):  # the check `kernels` says why
            versions.setdefault(one.folder, one.first(device))
    return launchers.target_of(device), versions


def shipped_operators(target: str) -> frozenset[str]:
    """Return the operators whose Triton kernels run from shipped objects on an AMD target."""
    objects, _ = code_objects.shipped_objects(target)
    return frozenset(objects.operators if objects else ())

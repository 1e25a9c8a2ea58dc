# SPDX-License-Identifier: Apache-2.0
"""Says which code of a step ships as verified bytes: the shipped library or objects, what Triton and inductor compile
at the site, or a library of the container.

`mi300x_step.json` has the time of a predicted step on 8 MI300X by source (tools/step_sources.py computes it); `zaya
doctor` prints it, because records are not in the package.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

STORED = Path(__file__).parent / "mi300x_step.json"
TORCH, UNLISTED = "torch", "unlisted"  # torch's own kernels; kernels that were too short for the record
# The code of a source that is no operator, on ROCm.
LIBRARIES = {
    "matrix products": "hipBLASLt (head, projections)",
    "attention": "torch's attention (AOTriton), or AITER",
    "collectives": "RCCL",
    "formulas": "inductor, compiled at the site",
    TORCH: "torch's own kernels",
    UNLISTED: "kernels too short to be listed",
}
LIBRARY, OBJECTS = "shipped library (HIP)", "shipped objects (Triton)"  # the verified ones
# The code of an operator by the version that runs, where it is not one of these two.
AT_THE_SITE = {
    "hip": "HIP, built at the site",
    "triton": "Triton, compiled at the site",
    "compiled": LIBRARIES["formulas"],
    "reference": LIBRARIES[TORCH],
}


def by_code(
    times: Mapping[str, float], versions: Mapping[str, str], library: bool, objects: Collection[str]
) -> list[dict]:
    """Return rows of the table, the verified ones first, then by time: code, verified, ms, share, and the sources.

    Args:
        times: milliseconds by source. versions: the version that runs, by operator (a folder of hip_ops/ops).
        library: whether the HIP library is the shipped one. objects: the operators whose Triton kernels are shipped.
    """
    whole = sum(times.values())
    rows: dict[str, dict] = {}
    for source, ms in times.items():
        version = versions.get(source, "")
        if version == "hip" and library:
            code = LIBRARY
        elif version == "triton" and source in objects:
            code = OBJECTS
        else:
            code = LIBRARIES.get(source) or AT_THE_SITE.get(version) or version or "not available"
        row = rows.setdefault(
            code, {"code": code, "verified": code in (LIBRARY, OBJECTS), "ms": 0.0, "share": 0.0, "of": []}
        )
        row["ms"] += ms
        row["share"] += ms / whole
        row["of"].append(source)
    return sorted(rows.values(), key=lambda row: (not row["verified"], -row["ms"]))


def stored() -> dict:
    """Return the stored prediction: from, on, step_ms, and `ms` by source."""
    return json.loads(STORED.read_text())

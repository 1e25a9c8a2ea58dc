# SPDX-License-Identifier: Apache-2.0
"""The lines of `zaya verify`, in the order in which they run. No torch import."""

from hip_ops.versions import VERSIONS
from zaya_plugin.verify.line import Line

HERE = "zaya_plugin.verify."
BASE = "shapes of ZAYA1-base, 16,384 tokens"

LINES = {
    line.name: line
    for line in (
        Line(
            "environment",
            "versions, firmware, mapped HIP runtimes, and the hash of the kernels' library",
            "the same",
            "the same",
            HERE + "environment:environment",
            120,
        ),
        Line(
            "known_problems",
            "the rules of `zaya doctor`",
            "the same",
            "the same",
            HERE + "environment:known_problems",
            120,
        ),
        Line(
            "rates",
            "a copy and a large matrix product on every device",
            "32 MiB, 512 x 512 in fp32",
            "1 GiB, 8192 x 8192 in bf16",
            HERE + "rates:rates",
            120,
        ),
        *(
            Line(
                folder,
                f"every version of the kernels of {folder}: error in ULP against fp64, and speed beside a copy or a "
                "matrix product",
                "the reference, small shapes",
                BASE,
                HERE + "operators:operators",
                240,
                folder,
            )
            for folder in VERSIONS
        ),
        Line(
            "demo_losses",
            "10 steps of the demo in fp32 against stored losses, within 1e-5",
            "one process",
            "the same numbers, on one device",
            HERE + "training:losses",
            240,
        ),
        Line(
            "zaya1_base",
            "a short step by `zaya bench step`: losses, and the share of the matrix-product rate",
            "a small ZAYA, one process",
            "as many of the 40 layers as fit, all devices, 16,384 random tokens on each",
            HERE + "training:step",
            420,
        ),
        Line(
            "hazards",
            "missing wait states in the shipped library and in the gfx942 objects of Triton's cache",
            "the same",
            "the same",
            HERE + "environment:scan",
            240,
        ),
    )
}

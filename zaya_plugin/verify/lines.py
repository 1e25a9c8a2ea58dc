# SPDX-License-Identifier: Apache-2.0
"""The lines of `zaya verify`, in the order in which they run. No torch import."""

from hip_ops.versions import VERSIONS
from zaya_plugin.verify.line import Line

PACKAGE = "zaya_plugin.verify."
BASE = "shapes of ZAYA1-base, 16,384 tokens"

LINES = {
    line.name: line
    for line in (
        Line(
            "environment",
            "versions, firmware, number of devices, mapped HIP runtimes, and the hash of the kernels' library",
            "the same",
            "the same",
            PACKAGE + "environment:environment",
            120,
        ),
        Line(
            "known_problems",
            "the rules of `zaya doctor`",
            "the same",
            "the same",
            PACKAGE + "environment:known_problems",
            120,
        ),
        Line(
            "rates",
            "a copy and a large matrix product on every device",
            "32 MiB, 512 x 512 in fp32",
            "1 GiB, 8192 x 8192 in bf16",
            PACKAGE + "rates:rates",
            120,
        ),
        *(
            Line(
                folder,
                f"every version of the kernels of {folder}: error in ULP against fp64, and speed beside a copy or a "
                "matrix product",
                "the reference, small shapes",
                BASE,
                PACKAGE + "operators:operators",
                240,
                folder,
            )
            for folder in VERSIONS
        ),
        Line(
            "conditions",
            "the kernels that run, on two streams, in a captured graph and on a full device, twice with equal bits",
            "a plain call of the versions that a CPU has",
            "the self-check's examples on the first device",
            PACKAGE + "operators:conditions",
            420,
        ),
        Line(
            "all_reduce",
            "a sweep of all-reduces: exact sums, and the links' rate",
            "two processes over gloo, 1 KiB to 4 MiB",
            "all devices, 4 KiB to 1 GiB",
            PACKAGE + "collectives:all_reduce",
            240,
        ),
        Line(
            "graph_capture",
            "a graph with a collective in it, captured and replayed; where it fails cluster.graphs=none is needed",
            "two processes, without a graph",
            "one or two devices, 30 s",
            PACKAGE + "collectives:graph_capture",
            120,
        ),
        Line(
            "demo_losses",
            "10 steps of the demo in fp32 against stored losses, within 1e-5",
            "one process",
            "the same numbers, on one device",
            PACKAGE + "training:losses",
            240,
        ),
        Line(
            "zaya1_base",
            "a short step by `zaya bench step`: losses, and the share of the matrix-product rate",
            "a small ZAYA, one process",
            "as many of the 40 layers as fit, all devices, 16,384 random tokens on each",
            PACKAGE + "training:step",
            420,
        ),
        Line(
            "hazards",
            "missing wait states in the shipped library and in the gfx942 objects of Triton's cache",
            "the same",
            "the same",
            PACKAGE + "environment:scan",
            240,
        ),
    )
}

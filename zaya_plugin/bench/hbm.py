# SPDX-License-Identifier: Apache-2.0
"""`zaya bench hbm`: bandwidth of a device's memory by size of the arrays."""

import itertools

from zaya_plugin.bench.probes import STREAM, stream
from zaya_plugin.bench.results import (
    BYTES,
    WRONG,
    Column,
    Line,
    any_wrong,
    device_name,
    finish,
    free_bytes,
    only_device,
)
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan.known_machine import DATA_SHEET_TB_PER_S, machine_of

LEAST, FACTOR = 2**16, 4  # bytes of the smallest arrays, and the step between sizes
MOST = {"cpu": 2**26, "cuda": 2**32}  # bytes of the largest ones
CALLS = {"cpu": 5, "cuda": 40}


def run(options) -> int:
    """Measure every kernel at every size; return 1 where a result is wrong. options: output, commit, command and
    max_bytes, None for the default of the device.
    """
    device = only_device()
    most, name = options.max_bytes or MOST[device.type], device_name(device)
    if not LEAST <= most <= free_bytes(device) // 4:  # three arrays, and the pieces of a check
        problem = "three arrays of this size are needed" if most > LEAST else "below the smallest arrays"
        allowed = f"{LEAST} to {free_bytes(device) // 4} on this device"
        raise mistake("--max-bytes", most, problem=problem, allowed=allowed, fix=f"--max-bytes {MOST[device.type]}")
    sizes = [size for size in (LEAST * FACTOR**step for step in range(20)) if size <= most]
    machine, rows = None if device.type == "cpu" else machine_of(name), []  # a CPU's recipe is a floor for verify
    sheet = next((rate for part, rate in DATA_SHEET_TB_PER_S.items() if part in name), None)
    for kernel, size in itertools.product(STREAM, sizes):
        result = stream(kernel, size, device, CALLS[device.type])
        rate = result.rate / 1e12
        row = {"kernel": kernel, "bytes": size, "counted_bytes": int(result.work), "ms": 1e3 * result.seconds}
        row |= {"tb_per_s": rate, "share_of_copy": machine and rate / machine.copy_tb_per_s}
        rows.append({**row, "share_of_data_sheet": sheet and rate / sheet, "wrong": result.wrong})
    finish(
        "hbm",
        options,
        device,
        rows,
        [
            Column("kernel", "kernel"),
            Column("bytes", "array", BYTES),
            Column("ms", "ms", ".4f"),
            Column("tb_per_s", "TB/s", ".3f"),
            Column("share_of_copy", "of the recipe's copy rate", ".0%"),
            Column("share_of_data_sheet", "of the data sheet", ".0%"),
            WRONG,
        ],
        title=f"Memory bandwidth, {name}",
        lines=[Line(kernel, sizes, [row["tb_per_s"] for row in rows if row["kernel"] == kernel]) for kernel in STREAM],
        x="bytes of an array",
        y="TB/s",
        limit=("data sheet", sheet) if sheet else machine and ("the recipe's copy rate", machine.copy_tb_per_s),
    )
    return any_wrong(rows)

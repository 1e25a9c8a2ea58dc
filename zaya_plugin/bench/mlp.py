# SPDX-License-Identifier: Apache-2.0
"""`zaya bench mlp`: a chain of bf16 MLPs, compared with the published 750 PFLOP/s of 1,024 MI300X.

No public text gives the sizes of that workload. The defaults make every product of an accelerator 4.4 TFLOP, 20 times the
200 GFLOP that an MI300X needs for its highest rate (AMD's figure as others quote it), with powers of two as sides. The
MLPs have no activation: it would measure memory.
"""

import functools
import itertools

from zaya_plugin.bench.probes import seconds
from zaya_plugin.bench.results import WRONG, Column, Line, any_wrong, device_name, finish, free_bytes, only_device
from zaya_plugin.ground.errors import mistake

YARDSTICK = 750e3 / 1024  # TFLOP/s a device: AMD's ROCm blog, November 2025
SIZES = {"cpu": (128, 256, 128, 2), "cuda": (8192, 32768, 8192, 4)}  # hidden, ffn, tokens, layers
PARTS = (1, 2, 4, 8, 16)  # of the tokens, that are measured
CALLS = {"cpu": 2, "cuda": 10}
TOLERANCE = 2.0**-5  # of bf16 numbers that every layer rounds


def forward(weights, x):
    """Return the output [tokens, hidden] of the chain."""
    import torch

    return functools.reduce(torch.nn.functional.linear, weights, x)


def step(weights, x):
    """Return the gradients of x [tokens, hidden] and of every matrix, for an output gradient equal to the output."""
    import torch

    y = forward(weights, x)
    return torch.autograd.grad(y, (x, *weights), y.detach())


def wrong_elements(weights, x) -> tuple[int, int]:
    """Return the number of wrong elements of the output, and of the gradients of x and of every matrix.

    With matrices s_j t_k / inputs of signs s and t every layer is the identity, forward and backward, for the rows
    u_i s_k that overwrite x. Overwrites the weights too.
    """
    import torch

    ffn, hidden = weights[0].shape
    s, t = (1.0 - 2.0 * (torch.arange(size, device=x.device) % 3 == 0) for size in (hidden, ffn))
    u = torch.arange(len(x), device=x.device) % 3 + 1.0
    with torch.no_grad():
        x.copy_(u[:, None] * s)
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            up.copy_(t[:, None] * s / hidden)
            down.copy_(s[:, None] * t / ffn)
        output = forward(weights, x)
    of_up, of_down = t[:, None] * s * (u @ u) * hidden / ffn, s[:, None] * t * (u @ u)
    expected = u[:, None] * s, u[:, None] * s, *[of_up, of_down] * (len(weights) // 2)
    results = zip((output, *step(weights, x)), expected, strict=True)
    wrong = [int((~((a - b).abs() <= TOLERANCE * b.abs())).sum()) for a, b in results]  # a NaN is wrong
    return wrong[0], sum(wrong[1:])


def run(options) -> int:
    """Measure; return 1 where a result is wrong. options: hidden, ffn, tokens, layers (None: the device's default),
    output, commit and command.
    """
    device = only_device()
    chosen = (options.hidden, options.ffn, options.tokens, options.layers)
    hidden, ffn, tokens, layers = (size or default for size, default in zip(chosen, SIZES[device.type], strict=True))
    needed = 2 * layers * (4 * hidden * ffn + tokens * (hidden + ffn)) + 8 * tokens * (hidden + ffn)
    needed += 24 * hidden * ffn  # of the check: two expected gradients and their differences, fp32
    if needed > free_bytes(device):
        problem = f"with --ffn={ffn}, --tokens={tokens}, --layers={layers} it needs {needed / 2**30:.1f} GiB"
        allowed = f"what fits into {free_bytes(device) / 2**30:.1f} GiB of free memory"
        raise mistake("--hidden", hidden, problem=problem, allowed=allowed, fix="smaller sizes")
    import torch

    rows, counts = [], sorted({max(1, tokens // part) for part in PARTS})
    pairs = [((ffn, hidden), (hidden, ffn))] * layers
    weights = [torch.randn(shape, device=device) / shape[1] ** 0.5 for pair in pairs for shape in pair]
    weights = [weight.bfloat16().requires_grad_() for weight in weights]
    inputs = [torch.randn(count, hidden, device=device, dtype=torch.bfloat16, requires_grad=True) for count in counts]
    for count, x in zip(counts, inputs, strict=True):
        for name, call, passes in (("forward", forward, 1), ("forward and backward", step, 3)):
            time = seconds(functools.partial(call, weights, x), device, CALLS[device.type])
            flops = passes * 4.0 * layers * count * hidden * ffn
            row = {"pass": name, "tokens": count, "gflop": flops / 1e9, "ms": 1e3 * time, "tflops": flops / time / 1e12}
            rows.append({**row, "share": row["tflops"] / YARDSTICK})
    # after all times: known numbers take less power than random ones
    for row, wrong in zip(rows, itertools.chain(*(wrong_elements(weights, x) for x in inputs)), strict=True):
        row["wrong"] = wrong
    finish(
        "mlp",
        options,
        device,
        rows,
        [
            Column("pass", "pass"),
            Column("tokens", "tokens", ","),
            Column("gflop", "GFLOP", ".4g"),
            Column("ms", "ms", ".3f"),
            Column("tflops", "TFLOP/s", ".4g"),
            Column("share", f"of {YARDSTICK:.0f}", ".1%"),
            WRONG,
        ],
        title=f"{layers} bf16 MLPs of {hidden:,} x {ffn:,}, {device_name(device)}",
        lines=[
            Line(name, counts, [row["tflops"] for row in rows if row["pass"] == name])
            for name in dict.fromkeys(row["pass"] for row in rows)
        ],
        x="tokens",
        y="TFLOP/s",
        limit=("750 PFLOP/s of 1,024 MI300X", YARDSTICK),
        more={"hidden": hidden, "ffn": ffn, "layers": layers},
    )
    return any_wrong(rows)

# SPDX-License-Identifier: Apache-2.0
"""`zaya bench gemm`: rates of a recipe's matrix products, of better sizes, and of square products up to saturation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zaya_plugin.bench.options import with_data_path
from zaya_plugin.bench.probes import ON_ACCELERATOR, ON_CPU, product
from zaya_plugin.bench.results import WRONG, Column, Line, any_wrong, device_name, dtype_of, finish, only_device
from zaya_plugin.plan.products import DIRECTIONS, Product, square_product

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe

MULTIPLES = (64, 128, 256)  # of the sizes that are measured next to a recipe's own
SATURATED = 0.95  # share of the highest rate of a square product
SQUARES = {"cpu": (64, 128, 256, 512), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
CALLS = {"cpu": 3, "cuda": 20}
MOST_REPEATED = {"cpu": 1e9, "cuda": 1e14}  # operations of a call that is measured more than once


def products_of(overrides: list[str]) -> tuple[list[Product], Recipe]:
    """Return the products of a recipe's step and the recipe. Raises ValueError for one that cannot run.

    The head has the vocabulary of the recipe's data where that can be read, else ZAYA1's.
    """
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.plan import products, recipe_plan
    from zaya_plugin.run.rank_plan import planned_ranks

    try:
        recipe = compose(overrides)
    except ValueError:  # of data.path, or one that the second attempt raises too
        recipe = compose(with_data_path(overrides))
    world = planned_ranks(recipe)
    validate(recipe, world)
    shape, layout, optim = recipe_plan.shape_of(recipe), recipe_plan.layout_of(recipe, world), recipe.optim
    listed = products.products(shape, layout, recipe_plan.batch_of(recipe, world))
    if optim.name == "muon":
        dtype_bytes = 4 if optim.muon_dtype == "fp32" else 2
        listed += products.update_products(shape, layout, dtype_bytes, optim.muon_split_gate_up, optim.muon_steps)
    return listed, recipe


def line_of(name: str, rows: list[dict], joined: bool = True) -> Line:
    """Return the line of rates over operations."""
    return Line(name, [row["gflop"] for row in rows], [row["tflops"] for row in rows], joined)


def run(options) -> int:
    """Measure; return 1 where a result is wrong. options: overrides of the recipe, output, commit and command."""
    listed, recipe = products_of(options.overrides)
    device, dtype, rows = only_device(recipe.cluster.device), dtype_of(recipe), []
    calls = CALLS[device.type]
    extent = (ON_CPU if device.type == "cpu" else ON_ACCELERATOR)[0]
    large = product(square_product(extent), device, dtype, calls).rate / 1e12
    sizes = [(square_product(extent), None) for extent in SQUARES[device.type]]
    for own in listed:
        others = {own.rounded(multiple): multiple for multiple in reversed(MULTIPLES)}
        sizes += [(own, None), *((other, others[other]) for other in reversed(others) if other != own)]
    for sized, multiple in sizes:
        measured = product(sized, device, dtype, 1 if sized.flops > MOST_REPEATED[device.type] else calls)
        rows.append(
            {
                "name": sized.name,
                "direction": sized.direction,
                "multiple": multiple,
                **{key: getattr(sized, key) for key in ("m", "n", "k", "batch", "calls")},
                "gflop": sized.flops / 1e9,
                "ms": 1e3 * measured.seconds,
                "tflops": measured.rate / 1e12,
                "share": measured.rate / 1e12 / large,
                "wrong": measured.wrong,
            }
        )
    squares = rows[: len(SQUARES[device.type])]
    best = max(row["tflops"] for row in squares)
    saturated = next(row["gflop"] for row in squares if row["tflops"] >= SATURATED * best)
    own_rows = [row for row in rows[len(squares) :] if row["multiple"] is None]
    lines = [line_of("square products", squares)]
    for direction in dict.fromkeys(row["direction"] for row in own_rows):
        name = direction if direction in DIRECTIONS else f"Newton-Schulz, {direction}"
        lines.append(line_of(name, [row for row in own_rows if row["direction"] == direction], joined=False))
    finish(
        "gemm",
        rows,
        [
            Column("name", "product"),
            Column("direction", "direction"),
            Column("multiple", "rounded up to"),
            *(Column(key, key, ",") for key in ("m", "n", "k", "batch", "calls")),
            Column("gflop", "GFLOP", ".4g"),
            Column("ms", "ms", ".4f"),
            Column("tflops", "TFLOP/s", ".4g"),
            Column("share", f"of {extent:,} cubed", ".0%"),
            WRONG,
        ],
        device=device,
        command=options.command,
        commit=options.commit,
        output=options.output,
        title=f"Matrix products of {recipe.name}, {recipe.cluster.dtype}, {device_name(device)}",
        lines=lines,
        x="GFLOP of a call",
        y="TFLOP/s",
        limit=(f"{extent:,} cubed", large),
        more={"large_tflops": large, "saturation_gflop": saturated},
    )
    rising = "; the rate still rises at the largest size" if saturated == squares[-1]["gflop"] else ""
    print(
        f"square products reach {SATURATED:.0%} of their highest rate, {best:.4g} TFLOP/s, at {saturated:,.4g} GFLOP"
        + rising
    )
    return any_wrong(rows)

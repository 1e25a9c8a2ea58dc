# SPDX-License-Identifier: Apache-2.0
"""The speed of each part of a step, from which predictions start: of one measured step, or fitted to several.

The speed of a part is the share of its roofline that it reaches: the larger of its operations over the matrix-product
rate and its bytes over the copy rate, divided by its time. The matrix-product rate is the device's, times what whole
tiles of the part's largest product leave of it (zaya_plugin.plan.products). The time that kernels lose to
collectives that run during them is left out. No torch import.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.expected_step import SLOWED
from zaya_plugin.plan.known_machine import recipe_of
from zaya_plugin.plan.memory import Recompute, tokens_of_rank
from zaya_plugin.plan.products import rates_of_parts
from zaya_plugin.plan.step_work import work_of

SCHEMA = "zaya bench step/1"  # of the records of `zaya bench step`
FIT = Path(__file__).parent / "fitted_step.json"
NOT_COMPUTING = ("communication", "idle")
PARTS_WITHOUT_COLLECTIVES = ("optimizer", "gradients")  # parts during which no collective runs


@dataclass(frozen=True)
class PartSpeed:
    """A part of the step.

    Attributes:
        share: of the roofline that it reaches; 0 for a part without work of its own.
        forward: share of its time outside the backward pass.
        layer_token_seconds: time of a part without work of its own, for a token and layer.
        layer_pass_seconds: time of a layer and micro-batch on top of the roofline's, whatever its tokens: kernels
            start and end with idle units. weight_share: of the experts in its place: the share of the copy rate at
            which weights and gradients are moved (Work.weights). Steps that differ in the micro-batch give them; from
            a single record they are 0.
    """

    title: str
    share: float
    forward: float
    layer_token_seconds: float = 0.0
    layer_pass_seconds: float = 0.0
    weight_share: float = 0.0


@dataclass(frozen=True)
class Source:
    """Speeds of the parts of a step.

    Attributes:
        what: device, date, commit, command and world_size of the record, or of the fit's records.
        gemm, copy: FLOP/s and bytes/s of the record's device; None for a fit, which is relative to the recipe's rates.
        attention_length: tokens of a sequence of the steps that gave the share of attention.
        attention: shares of the roofline by the value of cluster.core_attention, where they are known.
        gap: seconds between the kernels of a layer and micro-batch, where a step is a graph.
        slowed: share of the hidden collectives' expected time by which kernels take longer.
        recompute: recomputation whose time is among the parts.
        idle: seconds of the record in which no kernel ran, which are not predicted.
        optimizer: whether an optimizer's step is among the parts.
        vocabulary: rows of the record's embedding, for recipes whose data is not available.
    """

    what: Mapping[str, object]
    parts: Mapping[str, PartSpeed]
    gemm: float | None = None
    copy: float | None = None
    attention_length: int | None = None
    attention: Mapping[str, float] = field(default_factory=dict)
    gap: float = 0.0
    slowed: float = SLOWED
    recompute: Recompute = Recompute()
    idle: float = 0.0
    optimizer: bool = True
    vocabulary: int | None = None

    @property
    def device(self) -> str:
        """Its name in torch."""
        return self.what["device"]


def load(path: Path) -> dict:
    """Return the record in a step.json; raises ValueError for any other file."""
    problem = "not a step.json of `zaya bench step` on an accelerator with the traced step's parts"
    try:
        record = json.loads(path.read_text())
        if record["schema"] == SCHEMA and record["parts"] and record["traced"]["source"] == "kernels":
            return record
    except (OSError, KeyError, TypeError, ValueError) as error:
        problem += f" ({type(error).__name__}: {error})"
    raise mistake(str(path), problem=problem, fix="zaya bench step RECIPE... on an accelerator writes one")


def recorded_recipe(record: dict) -> Recipe:
    """Return the recipe that ran. Keys that are newer than the record have their defaults; removed keys are ignored.

    The machine's rates are those of today's recipe of the record's device.
    """

    def filled(target, values: dict):
        for name in values.keys() & {item.name for item in fields(target)}:
            value = getattr(target, name)
            setattr(target, name, filled(value, values[name]) if is_dataclass(value) else values[name])
        return target

    recipe = filled(Recipe(), record["recipe"])
    recipe.nproc = record["world_size"]
    recipe.machine = recipe_of(record["device"]).machine
    return recipe


def hidden_behind_kernels(record: dict) -> float:
    """Return milliseconds of the record's collectives that ran during kernels on the same processors; copy engines are
    not among them.
    """
    kernels = (kernel for row in record["parts"] if row["part"] == "communication" for kernel in row["longest"])
    copies = sum(kernel["ms"] for kernel in kernels if kernel["name"].startswith("Memcpy"))
    return max(record.get("hidden_communication_ms", 0.0) - copies, 0.0)


def source_of(record: dict, *, links: bool = True, rates: tuple[float, float] | None = None) -> Source:
    """Return the speeds of a record of `zaya bench step`.

    links: the collectives of the prediction come from formulas, so those of the record are taken out of its kernels.
    rates: FLOP/s and bytes/s to which shares are relative, in place of those that were measured on the machine.
    """
    recipe, world, vocabulary = recorded_recipe(record), record["world_size"], record["model"]["vocab_size"]
    sizes = shape, layout, batch = recipe_plan.sizes_of(recipe, world, vocabulary)
    gemm, copy = rates or (record["rates"]["gemm_tflops"] * 1e12, record["rates"]["copy_tb_per_s"] * 1e12)
    written = frozenset(record.get("written_first", ()))  # older records have no such key; all gradients were zeroed
    work = work_of(recipe, world, vocabulary, record["step"]["optimizer"], written)
    tiles = rates_of_parts(record["device"], *sizes)
    rows = [row for row in record["parts"] if row["part"] not in NOT_COMPUTING]
    hidden = hidden_behind_kernels(record) if links else 0.0
    alone = 1 - SLOWED * hidden / sum(row["ms"] for row in rows if row["part"] not in PARTS_WITHOUT_COLLECTIVES)
    layer_tokens = batch.micro_batches * tokens_of_rank(layout, batch) * shape.num_layers
    speeds = {}
    for row in rows:
        part, forward = row["part"], row["forward_ms"] / row["ms"] if row["ms"] else 0.0
        seconds = row["ms"] / 1e3 * (1.0 if part in PARTS_WITHOUT_COLLECTIVES else alone)
        share = work[part].seconds(gemm * tiles.get(part, 1.0), copy) / seconds if part in work and seconds else 0.0
        # without work of its own, proportional to tokens and layers
        speeds[part] = PartSpeed(row["title"], share, forward, 0.0 if share else seconds / layer_tokens)
    return Source(
        {name: record[name] for name in ("device", "date", "commit", "command", "world_size")},
        speeds,
        gemm=gemm,
        copy=copy,
        attention_length=recipe.stage.seq_length,
        recompute=recipe_plan.recompute_of(recipe),
        idle=next((row["ms"] / 1e3 for row in record["parts"] if row["part"] == "idle"), 0.0),
        optimizer=record["step"]["optimizer"],
        vocabulary=vocabulary,
    )


def fitted(values: dict | None = None) -> Source:
    """Return the speeds in the values of a fit, default those that benchmarks/prediction_errors.py has fitted to
    committed records.
    """
    values = values or json.loads(FIT.read_text())
    return Source(**{**values, "parts": {part: PartSpeed(**speed) for part, speed in values["parts"].items()}})

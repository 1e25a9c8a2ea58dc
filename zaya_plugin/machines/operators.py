# SPDX-License-Identifier: Apache-2.0
"""The checks of hip_ops' operators: every version that the machine has, at the shapes of ZAYA1-base.

Errors are in ULP of the result's dtype, against the reference in fp64 on the same (rounded) arguments. The unit is an
ULP at the element's size, or at the root mean square of the result where the element is smaller: sums of many terms
err by the size of the terms. Speed is compared with a copy that moves as many bytes, or with torch's matrix product
of as many operations (hipBLASLt, cuBLAS).
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hip_ops import use_kernels
from hip_ops.ops.router_mlp import Routed
from hip_ops.runtime import choice
from hip_ops.runtime import conditions as self_check_conditions
from hip_ops.runtime.operator import Operator, all_operators
from hip_ops.runtime.self_check import SEED, TOLERANCES, copied, tensors_of
from hip_ops.versions import NOT_RUN
from zaya_plugin.bench import probes
from zaya_plugin.machines.checks import Outcome, Setting
from zaya_plugin.machines.operator_cases import BF16, SMALL, ZAYA1_BASE, Case, Sizes, cases_of
from zaya_plugin.plan.products import square_product

WRONG_NUMBERS = re.compile(r"call \d+: ")  # the difference of a comparison; otherwise it is the error of a call
CALLS = {"cpu": 3, "cuda": 20}  # timed
LARGEST_ELEMENT = 4  # times the root mean square: about the largest of many normal numbers
CLEAR = 2.0**-6  # of probability, by which a router's best class may be missed
CLASSES = 9  # router_mlp's argument with one row for each class; the next are the biases
FASTER = 1.1  # an override is proposed for a version that is faster than auto's choice by this factor
# Least share of the speed of that copy or product. About half of the speed of Triton on an H100 or H200
# (docs/kernels.md); operators of a few microseconds have none.
SHARES = {"rms_norm": 0.4, "cca_prologue": 0.15, "weighted_swiglu": 0.4, "muon": 0.4, "grouped_product": 0.35}
SHARES |= {"dense_product": 0.4, "newton_schulz": 0.25, "linear_cross_entropy": 0.35}


def operators(setting: Setting, folder: str, sizes: Sizes | None = None) -> Outcome:
    """Measure the operators of one folder."""
    device = device_of(setting)
    sizes = sizes or (SMALL if setting.on_cpu else ZAYA1_BASE)
    mine = [candidate for candidate in all_operators() if candidate.folder == folder]
    figures: dict[str, Any] = {}
    for operator in mine:
        for name, case in cases_of(operator.name).items():
            figures[name] = measured(operator, case, sizes, device, setting.say)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return judged(folder, figures, setting.on_cpu)


def device_of(setting: Setting) -> torch.device:
    return torch.device("cpu") if setting.on_cpu else torch.device("cuda", 0)


def conditions(setting: Setting) -> Outcome:
    """Compare the versions that run with their references under the conditions of the self-check.

    On a GPU those that `auto` takes; on a CPU, where that is the reference, every other version that it has. A version
    behind another one that takes every call of a training step (grouped_mm behind triton, which waits for the host in a
    capture on ROCm) is unsupported where its capture raises an error. Its other errors and wrong numbers are wrong.
    """
    device = device_of(setting)
    compared, wrong, unused, skipped = [], [], [], []
    for operator in all_operators():
        setting.say(operator.name)
        present = [v for v, missing in versions_of(operator, device).items() if missing is None]
        present = [v for v in present if v not in ("auto", "reference")] if setting.on_cpu else None
        comparisons = self_check_conditions.check(operator, device, present)
        for comparison in comparisons:
            compared.append(f"{comparison.operator}, {comparison.version}, {comparison.condition}")
            if comparison.difference:
                refused = comparison.condition == self_check_conditions.CAPTURE_CONDITION
                refused &= WRONG_NUMBERS.match(comparison.difference) is None
                called = present is not None or comparison.version in called_versions(operator, device)
                (unused if refused and not called else wrong).append(f"{compared[-1]}: {comparison.difference}")
        skipped += [] if comparisons else [operator.name]
    figures = {"compared": compared, "wrong": wrong, "unsupported": unused, "reference_alone": skipped}
    if unused and not wrong:
        text = f"{unused[0].splitlines()[0]}; no call of a step of ZAYA1-base reaches this version"
        return Outcome("unsupported", f"{text}; {len(compared) - len(unused)} of {len(compared)} agree", figures)
    text = wrong[0].splitlines()[0] if wrong else f"{len(compared)} comparisons"
    return Outcome("wrong" if wrong else "pass", text, figures)


def called_versions(operator: Operator, device: torch.device) -> set[str]:
    """Return the versions of `operator` that take the calls of a training step on `device`."""
    called = set()
    for case in cases_of(operator.name).values():
        arguments = case.make(ZAYA1_BASE, device)
        for version in operator.running(device):
            takes = operator.prefers.get(version, operator.fits.get(version))
            if takes is None or takes(*arguments):
                # a version that is not the fastest for a call is tried again before the reference
                called |= {version, *(operator.prefers if version == "reference" else ())}
                break
    return called


def versions_of(operator: Operator, device: torch.device) -> dict[str, str | None]:
    """Return by version the reason why this machine lacks it, or None; "auto" first, the reference last."""
    versions: dict[str, str | None] = {"auto": None}
    for version in operator.versions:
        if version in NOT_RUN:
            versions[version] = "only by name: this project has not run it on any device"
        else:
            missing = choice.missing(version, device, named=False)
            available = operator.available.get(version, lambda device: None)
            versions[version] = missing or available(device)
    return {**versions, "reference": None}


def measured(operator: Operator, case: Case, sizes: Sizes, device: torch.device, say: Callable) -> dict[str, Any]:
    """Return figures of every version of `operator`."""
    torch.manual_seed(SEED)
    arguments = case.make(sizes, device)
    oracle = called(operator.reference, wide(arguments))
    want = called(operator.reference, copied(arguments))
    moved = case.traffic(sizes) if case.traffic else traffic(arguments, flat(want))
    figures: dict[str, Any] = {"bytes": moved, "flops": case.flops(sizes) if case.flops else None, "versions": {}}
    figures["compared_ms"] = product_or_copy_ms(case, sizes, moved, device)
    for version, missing in versions_of(operator, device).items():
        say(f"{operator.name}, {version}")
        row = {"missing": missing}
        if missing is None:
            try:
                row = one_version(operator, version, case, arguments, oracle, want)
            except ValueError as error:  # not available, or its self-check failed
                row = {"wrong": str(error)}
        if "ms" in row:  # its rate: of operations for an operator that is limited by them, else of bytes
            flops = figures["flops"]
            row |= {"tflops": flops / row["ms"] / 1e9} if flops else {"tb_per_s": moved / row["ms"] / 1e9}
        figures["versions"][version] = row
    return figures


def one_version(operator: Operator, version: str, case: Case, arguments, oracle, want) -> dict[str, Any]:
    """Return error and time of one version; raises ValueError where it is not available."""
    device = next(tensors_of(arguments, ""))[1].device
    with use_kernels("auto", **({} if version == "auto" else {operator.folder: version})):
        row: dict[str, Any] = {"runs": operator.choice(device)}
        takes = operator.fits.get(version)
        if takes is not None and not takes(*arguments):
            return {"missing": "it does not take these arguments"}
        got = called(operator.run, inputs := copied(arguments))
        tolerance = operator.tolerances.get(version, operator.tolerance)
        if case.chooses:
            row["lost"], mine = routed(got, oracle, arguments)
            lost, theirs = routed(want, oracle, arguments)
            exact = routed(oracle, oracle, arguments)[1]
            if row["lost"] > (limit := max(CLEAR, 2 * lost)):
                row["wrong"] = (
                    f"it chooses a class of a probability {row['lost']:.3g} below the best, allowed {limit:.3g}"
                )
        else:
            mine, theirs, exact = flat(got), flat(want), flat(oracle)
        row["ulps"] = errors(mine, exact)
        row["wrong"] = row.get("wrong") or too_large(row["ulps"], errors(theirs, exact), tolerance, mine, theirs)
        if row["wrong"] is None and version == "reference" and in_bf16(row) > case.ulps:
            row["wrong"] = f"it errs by {in_bf16(row):.3g} ULP of bf16 against itself in fp64, allowed {case.ulps:g}"
        row["ms"] = 1e3 * probes.seconds(lambda: operator.run(*inputs), device, CALLS[device.type])
    return row


def judged(folder: str, figures: dict[str, Any], on_cpu: bool) -> Outcome:
    """Return the outcome of a folder's operators."""
    wrong = [
        f"{name}, {version}: {row['wrong']}"
        for name, figure in figures.items()
        for version, row in figure["versions"].items()
        if row.get("wrong")
    ]
    totals = total_ms(figures)
    expected: dict[str, Any] = {"overrides_from": FASTER}
    if wrong:
        return Outcome("wrong", "; ".join(wrong), figures, expected)
    ulps = max(map(in_bf16, rows_of(figures, "auto")))
    chosen = next(rows_of(figures, "auto"))["runs"].split(" ")[0].rstrip(",")
    text = f"{chosen}, {totals['auto']:.3g} ms, error {ulps:.2g} ULP of bf16"
    if on_cpu:
        return Outcome("pass", text, figures, expected)
    share = sum(figure["compared_ms"] for figure in figures.values()) / totals["auto"]
    text += f", {share:.0%} of a {'product' if any(f['flops'] for f in figures.values()) else 'copy'}"
    overrides, slow = {}, []
    best = min(totals, key=totals.get)
    if best not in ("auto", chosen) and totals["auto"] > FASTER * totals[best]:
        overrides[f"cluster.kernel_overrides.{folder}"] = best
        slow.append(f"{best} is {totals['auto'] / totals[best]:.2f} times faster than {chosen}")
    if folder in SHARES:
        expected |= {"share": SHARES[folder], "kind": "half of Triton's on an H100 or H200; elsewhere a PREDICTION"}
        if share < SHARES[folder]:
            slow.append(f"expected {SHARES[folder]:.0%} or more")
    return Outcome("slow" if slow else "pass", "; ".join([text, *slow]), figures, expected, overrides)


def rows_of(figures: dict[str, Any], version: str) -> Iterator[dict[str, Any]]:
    return (figure["versions"][version] for figure in figures.values())


def total_ms(figures: dict[str, Any]) -> dict[str, float]:
    """Return by version the time of all operators of a folder; versions that one of them lacks are left out."""
    names = next(iter(figures.values()))["versions"]
    return {
        version: sum(row["ms"] for row in rows_of(figures, version))
        for version in names
        if all("ms" in row for row in rows_of(figures, version))
    }


def product_or_copy_ms(case: Case, sizes: Sizes, moved: float, device: torch.device) -> float:
    """Return milliseconds of a matrix product of as many operations, or of a copy that moves as many bytes."""
    calls = CALLS[device.type]
    if case.flops is None:
        return 1e3 * moved / probes.stream("copy", int(moved / 2), device, calls).rate
    flops, k = case.flops(sizes), sizes.hidden
    m = max(1, round(flops / (2.0 * k * k)))
    return 1e3 * flops / probes.product(replace(square_product(k), m=m), device, BF16, calls).rate


def called(function: Callable, arguments: tuple) -> list:
    """Call `function`; return [its result, the arguments as they are afterwards]."""
    with torch.no_grad():
        return [function(*arguments), list(arguments)]


def routed(result: list, oracle: list, arguments: tuple) -> tuple[float, list[tuple[str, Tensor]]]:
    """Return of a router's result: by how much probability, in fp64, its worst choice is below the best, and the
    results that do not depend on where two classes are equal within rounding.
    Weights are taken where the choice is the oracle's.
    """
    mine, exact = Routed(*result[0]), Routed(*oracle[0])
    classes = arguments[CLASSES].shape[0]
    biased = exact.logits[:, :classes].softmax(-1) + arguments[CLASSES + 1]
    lost = (biased.amax(-1) - biased.gather(1, mine.ids[:, None])[:, 0]).max().item()
    weights = mine.weights.where(mine.ids == exact.ids, exact.weights.to(mine.weights))
    miscounted = mine.statistics[:-1].long() - torch.bincount(mine.ids, minlength=classes)
    kept = mine.state, mine.hidden1, mine.hidden2, mine.logits, weights, mine.statistics[-1:], miscounted
    return lost, [*tensors_of(kept, "result")]


def flat(result: list) -> list[tuple[str, Tensor]]:
    """Return the tensors of what `called` returned, with names."""
    return [*tensors_of(result[0], "result"), *tensors_of(result[1], "argument")]


def wide(value: Any) -> Any:
    """Copy tensors of floats to fp64, and let fp64 stand for their dtypes."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return type(value)(map(wide, value)) if isinstance(value, (list, tuple)) else value


def traffic(arguments: tuple, after: list[tuple[str, Tensor]]) -> float:
    """Return the bytes that a call must move: arguments once, results once, and changed arguments once more."""
    before = dict(tensors_of(arguments, "argument"))
    changed = (t for name, t in after if name not in before or not torch.equal(before[name], t))
    return float(sum(t.nbytes for t in before.values()) + sum(t.nbytes for t in changed))


def errors(got: list[tuple[str, Tensor]], oracle: list[tuple[str, Tensor]]) -> dict[str, dict[str, Any]]:
    """Return by result its dtype and its largest error in ULP of that; arguments that stay exact are left out."""
    by_result = {}
    first = next(exact for _, exact in oracle if exact.numel())
    for (name, mine), (_, exact) in zip(got, oracle, strict=True):
        if mine.is_floating_point() and mine.numel():
            # of two gradients that differ only by their dtype, the fp64 reference returns one alone
            ulps = worst_ulps(mine, exact if exact.numel() else first)
            if ulps or name.startswith("result"):
                by_result[name] = {"ulps": ulps, "dtype": str(mine.dtype).removeprefix("torch.")}
    return by_result


def in_bf16(row: dict[str, Any]) -> float:
    """Return the largest error of a row's results, those of fp32 included, in ULP of bf16."""
    scales = {"bfloat16": 1.0, "float16": 2.0**-3, "float32": 2.0**-16}
    return max((error["ulps"] * scales[error["dtype"]] for error in row.get("ulps", {}).values()), default=0.0)


def worst_ulps(mine: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    size = exact.abs().clamp_(min=exact.square().mean().sqrt().item()).nan_to_num_(0.0).clamp_(min=1e-300)
    unit = torch.exp2(size.log2_().floor_()).mul_(torch.finfo(mine.dtype).eps)
    error = (mine.double() - exact).abs_().nan_to_num_(math.inf)
    error[(mine == exact) | (mine.isnan() & exact.isnan())] = 0.0
    return (error / unit).max().item()


def too_large(mine: dict, reference: dict, tolerance: float | None, got: list, want: list) -> str | None:
    """Say which error exceeds its limit, or return None. Results that are not floats must be equal.

    The limit is the self-check's tolerance, or twice the reference's own error where that is larger. A tolerance of the
    operator's own is relative to the largest element, about LARGEST_ELEMENT times the root mean square.
    """
    for (name, one), (_, other) in zip(got, want, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return f"{name} differs from the reference's"
            continue
        allowed = TOLERANCES[one.dtype] if tolerance is None else LARGEST_ELEMENT * tolerance
        limit = max(allowed / torch.finfo(one.dtype).eps, 2 * reference.get(name, {"ulps": 0.0})["ulps"])
        if (ulps := mine.get(name, {"ulps": 0.0})["ulps"]) > limit:
            return f"{name} errs by {ulps:.3g} ULP of {one.dtype}, allowed {limit:.3g}"
    return None

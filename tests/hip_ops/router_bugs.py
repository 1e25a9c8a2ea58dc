# SPDX-License-Identifier: Apache-2.0
"""The router's Triton kernels with one mistake each, made from the shipped source by substitution, in Triton's
interpreter.

`python -m tests.hip_ops.router_bugs FOLDER` runs the checks on the right source and on each mistake, and prints the
mistakes that were detected.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from tests.hip_ops.injected_bug import triton_copy
from tests.hip_ops.router_cases import Router, check_backward, check_forward

CASES = (
    Router(37, 32, 5),
    Router(20, 64, 17, averaged=False, forced=False, unweighted=False, uses_state=False),
    Router(1, 32, 16),
    Router(100, 64, 16),
)

# name: (right, wrong)
BUGS = {
    "state_without_bias": ("    wide += tl.load(b_down + channel).to(tl.float32)[None, :]\n", ""),
    "gamma_forgotten": ("before * tl.load(gamma + channel).to(tl.float32)[None, :]", "before"),
    "norm_of_the_last_part": ("squares += tl.sum(wide", "squares = tl.sum(wide"),
    "eps_inside_the_mean": ("axis=1) / R + eps)[:, None]", "axis=1) / R + eps / R)[:, None]"),
    "matrix_transposed": (
        "w1 + first * R + lane[None, :] * R + channel[:, None]",
        "w1 + first + channel[:, None] * R + lane[None, :]",
    ),
    "tanh_gelu": ("tl.where(x > 0.0, 1.0 - side, side)", "tl.sigmoid(1.5957691216 * (x + 0.044715 * x * x * x))"),
    "smaller_side_of_both": ("tl.where(x > 0.0, 1.0 - side, side)", "side"),
    "logits_of_the_last_part": ("scores = tl.dot(gelu(y), matrix, scores,", "scores = tl.dot(gelu(y), matrix,"),
    "unknown_classes_count": (
        'wide = tl.where(known, logits.to(tl.float32), float("-inf"))',
        "wide = logits.to(tl.float32)",
    ),
    "last_of_equals": (
        "tl.min(tl.where(best, column[None, :], CLASSES - 1), axis=1)",
        "tl.max(tl.where(best, column[None, :], 0), axis=1)",
    ),
    "choice_without_bias": (
        "biased = p + tl.load(biases + column, mask=column < CLASSES, other=0.0)[None, :]",
        "biased = p",
    ),
    "weight_with_bias": (
        "tl.where(chosen, p, 0.0), axis=1))\n    tl.store(weights",
        "tl.where(chosen, biased, 0.0), axis=1))\n    tl.store(weights",
    ),
    "skipped_weigh": (
        "weight = tl.where(choice == unweighted, 0.0, tl.sum(tl.where(chosen, p, 0.0), axis=1))",
        "weight = tl.sum(tl.where(chosen, p, 0.0), axis=1)",
    ),
    "rows_behind_the_end_count": ("(chosen & live).to(tl.float32)", "chosen.to(tl.float32)"),
    "entropy_of_rows_behind_the_end": ("tl.where(live, -p *", "tl.where(p >= 0.0, -p *"),
    "skipped_have_gradients": ("mask=inside & (choice != unweighted)", "mask=inside"),
    "gradient_without_probability": ("    upstream *= tl.sum(tl.where(chosen, p, 0.0), axis=1)\n", ""),
    "gradient_of_gelu_without_its_slope": (
        " + wide * (INVERSE_SQRT_2_PI * tl.exp2(wide * wide * MINUS_HALF_LOG2_E))",
        "",
    ),
    "part_ahead_is_the_first": ("hidden + first + PART + to", "hidden + to"),
    "backward_matrix_transposed": (
        "matrix + first + inner * R + lane, mask=inner < KNOWN",
        "matrix + first * R + lane * R + inner, mask=inner < KNOWN",
    ),
    "norm_gradient_without_projection": (" - direction * common)", ")"),
    "projection_without_weight": (
        "products += tl.sum(back.to(grad.dtype).to(tl.float32) * scale * wide",
        "products += tl.sum(back.to(grad.dtype).to(tl.float32) * wide",
    ),
    "state_of_the_next_layer_lost": ("        if HAS_D_STATE:\n", "        if False:\n"),
    "previous_gets_no_gamma": (
        "d_before = wide * tl.load(gamma + first + lane).to(tl.float32)[None, :]",
        "d_before = wide",
    ),
    "gammas_gradient_without_the_state": ("(wide, wide * before, back", "(wide, wide, back"),
    "sums_of_the_first_program": ("total = sums + tl.program_id(0).to(tl.int64) * 3 * R", "total = sums"),
    "sums_of_the_slabs_last_program": ("        total += chain\n", "        total = chain\n"),
    "layers_swapped": ("inputs + matrix.to(tl.int64) * rows * R", "inputs"),
    "rows_behind_the_slab": (
        "range(tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0))",
        "range(tl.program_id(0), tl.cdiv(rows, BLOCK), 1)",
    ),
}


def kernels(folder: Path, name: str | None = None) -> ModuleType:
    """A copy of the host's module, on small tiles, that launches a copy of the kernels with bug `name`."""
    from hip_ops.ops.router_mlp import triton, triton_kernels

    module, with_bug = triton_copy(folder, triton, {}, None), triton_copy(folder, triton_kernels, BUGS, name)
    module.launch = lambda width, warp_size: module.Launch(16, 16, 4, stages=2)
    module.parameters_launch = lambda width, warp_size: module.Launch(16, width // 2, 4, programs=2)
    module.launch_triton_kernel = lambda operator, kernel, grid, *arguments, device, **keywords: (
        getattr(with_bug, kernel)[grid](*arguments, **keywords) if all(grid) else None
    )
    return module


def check(module) -> None:
    for case in CASES:
        check_forward(module, case)
        check_backward(module, case)
    check_ties(module)


def check_ties(module) -> None:
    """Equal probabilities: the first class; numbers that are none: the first of them, which a weight then shows."""
    import torch

    arguments = list(Router(4, forced=False, unweighted=False).arguments())
    arguments[9] = torch.zeros_like(arguments[9])
    arguments[10] = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.5])
    assert module.router_mlp(*arguments)[2].tolist() == [1] * 4, "the choice is wrong among equals"
    arguments[0][1] = float("nan")
    _, weights, ids, *_ = module.router_mlp(*arguments)
    assert ids.tolist() == [1, 0, 1, 1] and weights.isnan().tolist() == [False, True, False, False], (
        "the choice is wrong among what are no numbers"
    )


def main(folder: Path) -> None:
    check(kernels(folder))
    print("right source: right")
    for name in BUGS:
        try:
            check(kernels(folder, name))
        except AssertionError as found:
            if "wrong" in str(found):
                print(f"caught {name}")
                continue
            raise
        print(f"MISSED {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

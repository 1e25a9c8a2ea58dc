# SPDX-License-Identifier: Apache-2.0
"""Test the Gram form against the standard form: results, restarts, scales of half precision, and cost."""

import pytest
import torch

import hip_ops
from hip_ops.newton_schulz_form import default_restarts, multiply_adds, newton_schulz_flops
from hip_ops.ops.newton_schulz.plan import COEFFICIENT_SETS, Plan, coefficient_triples, make_plan
from hip_ops.ops.newton_schulz.reference import TorchProducts, iterate, normalised
from tests.hip_ops.newton_schulz_form import in_form, plan_of

N, M = 96, 192
HALF, BF16 = torch.float16, torch.bfloat16


def spectra() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    gaussian = torch.randn((N, M), generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(torch.randn((N, M), generator=generator, dtype=torch.float64), full_matrices=False)
    decay = torch.logspace(0, -8, N, dtype=torch.float64)
    few = torch.cat([torch.ones(N // 8, dtype=torch.float64), torch.zeros(N - N // 8, dtype=torch.float64)])
    low_rank_and_noise = torch.randn((N, 12), generator=generator, dtype=torch.float64) @ torch.randn(
        (12, M), generator=generator, dtype=torch.float64
    )
    return {
        "gaussian": gaussian,
        "condition 1e4": (u * decay.sqrt()) @ v,
        "condition 1e8": (u * decay) @ v,
        "rank N/8": (u * few) @ v,
        "low rank and noise": low_rank_and_noise + 0.05 * gaussian,
    }


MATRICES = spectra()
SETS = sorted(COEFFICIENT_SETS)


def error(x: torch.Tensor, coefficients: str, form: str, dtype: torch.dtype, restarts=None) -> float:
    x = x.to(BF16)
    exact = hip_ops.newton_schulz(x.double(), 5, coefficients)
    with in_form(form, restarts):
        got = hip_ops.newton_schulz(
            x.double() if dtype == torch.float64 else x.float(), 5, coefficients, dtype=dtype
        ).double()
    return ((got - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("name", MATRICES)
def test_gram_form_is_the_same_map(name, coefficients):
    """In fp64 the two forms differ by rounding alone, with the default restarts; ill-conditioned and singular matrices
    included.
    """
    assert error(MATRICES[name], coefficients, "gram", torch.float64) <= 1e-9
    # fp32 without tensor cores: 2^-24 instead of 2^-53.
    assert error(MATRICES[name], coefficients, "gram", torch.float32) <= 1e-3


@pytest.mark.parametrize("coefficients", SETS)
@pytest.mark.parametrize("name", MATRICES)
def test_gram_form_in_half_precision_beats_the_standard_form_in_bfloat16(name, coefficients):
    """The kernels' requirement: not farther from fp64 than products in bfloat16 on the same input. The margin is a
    factor of 2 or more.
    """
    assert error(MATRICES[name], coefficients, "gram", HALF) <= 0.5 * error(
        MATRICES[name], coefficients, "standard", BF16
    )
    assert error(MATRICES[name], coefficients, "standard", HALF) <= 0.2 * error(
        MATRICES[name], coefficients, "standard", BF16
    )


@pytest.mark.parametrize("coefficients", SETS)
def test_without_restarts_the_gram_form_loses_small_singular_values(coefficients):
    """R is known to 2^-11 of its norm, and five steps multiply that by the fourth powers of a: it replaces what was
    there.
    """
    x = MATRICES["condition 1e8"]
    without, with_restart = (error(x, coefficients, "gram", HALF, restarts) for restarts in ((), None))
    assert without > 0.1 and without > 10 * with_restart
    assert error(x, coefficients, "gram", BF16, ()) > 1  # no digit of the result is right
    assert default_restarts(5) == (3,)


def test_restarts_split_any_number_of_steps_into_stretches_of_at_most_three_and_two():
    assert [default_restarts(steps) for steps in (1, 2, 3, 4, 8)] == [(), (), (1,), (2,), (3, 6)]
    for steps in range(1, 13):
        edges = [0, *default_restarts(steps), steps]
        stretches = [b - a for a, b in zip(edges, edges[1:], strict=False)]
        assert max(stretches) <= 3 and stretches[-1] <= 2
    assert error(MATRICES["condition 1e4"], "polar_express", "gram", HALF) < 0.02


def test_half_precision_needs_its_scales():
    """64 rows of a normalised Gaussian 2048 x 4096: its entries are near 2^-11.5 and those of R off the diagonal near
    2^-17, where half precision has 7 digits of its 11 left. A whole matrix of that size takes minutes on a CPU; its
    Gram matrix shows it.
    """
    norm = (2048 * 4096) ** 0.5
    x = torch.randn((1, 64, 4096), generator=torch.Generator().manual_seed(0))
    exact = x.double() @ x.double().mT / norm**2
    errors = []
    for x_scale, r_scale in ((2.0**8, 2.0**10), (1.0, 1.0)):
        start = (x / norm * x_scale).to(HALF)
        r = TorchProducts(False, torch.float32).gram(start, r_scale / x_scale**2).double() / r_scale
        errors.append(((r - exact).tril(-1).norm() / exact.tril(-1).norm()).item())
    assert errors[0] < 2**-11 and errors[1] > 5 * errors[0]


@pytest.mark.parametrize("coefficients", SETS)
def test_nothing_inside_comes_near_the_largest_half(coefficients):
    """One singular value holds the whole norm, or all are equal: the extremes of the entries of X, R and Q."""
    largest = 0.0

    class Watched(TorchProducts):
        def symmetric(self, *arguments):
            nonlocal largest
            result = super().symmetric(*arguments)
            largest = max(largest, result.abs().max().item(), arguments[0].abs().max().item())
            return result

    single = torch.zeros(8, 16)
    single[2, 3] = 1.0
    for x in (single, torch.ones(8, 16), torch.eye(8, 16)):
        plan = Plan(coefficient_triples(coefficients, 5), "gram", (3,), HALF)
        start = normalised(x[None], None, 1e-7, plan.scales[0], torch.empty(1, 8, 16, dtype=HALF))
        assert iterate(Watched(False, torch.float32), start, plan).isfinite().all()
    assert 1000 < largest < 65504 / 2


def test_form_is_chosen_by_multiply_adds():
    triples = coefficient_triples("simple", 5)

    def form(n, m, dtype=HALF):
        return make_plan(triples, n, m, dtype).form

    assert (
        form(2048, 2048) == form(2048, 2560) == "standard"
        and form(2048, 2624) == form(4096, 2048) == form(1024, 2048) == "gram"
    )
    # launches, not products, take the time there
    assert form(256, 2048) == form(17, 256) == form(128, 2048) == "standard"
    assert form(2048, 4096, BF16) == "standard"
    # The figures of one ZAYA1 expert's fc1, in units of n^3: flops 15 m/n + 5 and 20 + 6 m/n - 6.
    n = 2048
    assert newton_schulz_flops(2 * n, n, bf16=True) == 35 * n**3 and newton_schulz_flops(n, 2 * n) == 26 * n**3
    assert newton_schulz_flops(n, n, 3) == 12 * n**3 and newton_schulz_flops(256, 512) == 35 * 256**3
    assert (
        multiply_adds("standard", n, 2 * n, 5) == 17.5 * n**3 and multiply_adds("gram", n, 2 * n, 5, 1) == 13.0 * n**3
    )


@pytest.mark.parametrize("form, restarts", [("standard", None), ("gram", None), ("gram", (2, 4)), ("gram", ())])
def test_products_executed_are_those_that_the_plan_counts(form, restarts):
    n, m, steps = 8, 24, 5
    done = 0.0

    class Counted(TorchProducts):
        def gram(self, x, alpha):
            nonlocal done
            done += 0.5 * n * n * m
            return super().gram(x, alpha)

        def symmetric(self, *arguments):
            nonlocal done
            done += 0.5 * n**3
            return super().symmetric(*arguments)

        def apply(self, z, x, alpha, beta):
            nonlocal done
            done += n * n * m
            return super().apply(z, x, alpha, beta)

        def apply_last(self, z, x, alpha, beta):
            nonlocal done
            done += n * n * m
            return super().apply_last(z, x, alpha, beta)

    plan = plan_of(form, coefficient_triples("simple", steps), torch.float64, restarts)
    iterate(Counted(False, torch.float64), torch.randn(1, n, m, dtype=torch.float64) / 20, plan)
    assert done == multiply_adds(form, n, m, steps, len(plan.restarts))

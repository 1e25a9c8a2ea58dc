# SPDX-License-Identifier: Apache-2.0
"""The public operators on the CPU, through the torch reference and through the kernels built with g++."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hip_ops
from hip_ops.ops.muon import MatrixBatches, rms_matching_scale
from tests.hip_ops.muon_oracle import check_momentum, check_update, guards_intact, make_lists

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SHAPES = [(64, 96), (17, 33), (1, 1), (0, 8), (3, 5), (40, 256)]
ALIGNED, TOGETHER, APART = None, [0, 1, 3, 0, 5, 2], [(0, 1, 2, 3, 4)] * 6


@pytest.mark.parametrize("offsets", [ALIGNED, TOGETHER, APART], ids=["aligned", "shifted together", "shifted apart"])
@pytest.mark.parametrize("dtypes", list(itertools.product((BF16, FP32), repeat=3)), ids=str)
def test_momentum_against_fp64(chosen, dtypes, offsets):
    lists = make_lists(SHAPES, 1, *dtypes, offsets=offsets)
    before = [b.clone() for b in lists.momenta]
    scale, sums = torch.tensor([0.37]), torch.full((len(SHAPES),), float("nan"))
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, grad_scale=scale, square_sums=sums)
    for i, (g, b, a, o) in enumerate(zip(lists.gradients, before, lists.momenta, lists.outputs, strict=True)):
        check_momentum(g, b, a, o, grad_scale=0.37, what=f"tensor {i}")
        assert guards_intact(a) and guards_intact(o) and guards_intact(g)
    exact = torch.stack([o.double().square().sum() for o in lists.outputs])
    assert ((sums.double() - exact).abs() <= 2e-6 * exact).all()


@pytest.mark.parametrize("momentum, nesterov", list(itertools.product((0.95, 0.5, 0.0, 1.0), (True, False))))
def test_momentum_with_and_without_nesterov(chosen, momentum, nesterov):
    lists = make_lists([(8, 24), (5, 5)], 2)
    before = [b.clone() for b in lists.momenta]
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, momentum=momentum, nesterov=nesterov)
    for g, b, a, o in zip(lists.gradients, before, lists.momenta, lists.outputs, strict=True):
        check_momentum(g, b, a, o, momentum=momentum, nesterov=nesterov)
        if momentum == 0:
            assert torch.equal(a, g.float()) and torch.equal(o, g)


@pytest.mark.parametrize("offsets", [ALIGNED, TOGETHER, APART], ids=["aligned", "shifted together", "shifted apart"])
@pytest.mark.parametrize(
    "update, master, param",
    [
        (BF16, FP32, BF16),
        (FP32, FP32, BF16),
        (BF16, FP32, FP32),
        (FP32, FP32, FP32),
        (BF16, None, BF16),
        (FP32, None, BF16),
        (BF16, None, FP32),
        (FP32, None, FP32),
    ],
)
def test_update_against_fp64(chosen, update, master, param, offsets):
    lists = make_lists(SHAPES, 3, output=update, master=master or FP32, param=param, offsets=offsets)
    weights = lists.masters if master else lists.params
    before = [w.clone() for w in weights]
    hip_ops.muon_update_(lists.outputs, lists.masters if master else None, lists.params, lr=0.02, weight_decay=0.1)
    for i, shape in enumerate(SHAPES):
        check_update(
            lists.outputs[i],
            before[i],
            weights[i],
            lr=0.02,
            weight_decay=0.1,
            scale=0.2 * math.sqrt(max(shape)),
            what=f"tensor {i}",
        )
        assert guards_intact(weights[i]) and guards_intact(lists.params[i])
        if master:
            assert torch.equal(lists.params[i], weights[i].to(param))


def test_scales_and_the_learning_rate_on_the_device(chosen):
    shapes = [(6, 10), (33, 7)]
    results = []
    for lr in (0.03, torch.tensor(0.03)):
        lists = make_lists(shapes, 4)
        before = [w.clone() for w in lists.masters]
        hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=lr, weight_decay=0.5, scales=[1.5, -2.0])
        for u, b, a, scale in zip(lists.outputs, before, lists.masters, (1.5, -2.0), strict=True):
            check_update(u, b, a, lr=0.03, weight_decay=0.5, scale=scale)
        results.append(lists.masters)
    for a, b in zip(*results, strict=True):
        # torch multiplies a number's product in fp64 and a tensor's in fp32; the kernels do the same arithmetic for
        # both.
        assert torch.allclose(a, b, rtol=3e-7, atol=1e-8) if chosen == "reference" else torch.equal(a, b)
    assert rms_matching_scale((16, 4096, 2048)) == 0.2 * 64 and rms_matching_scale((17, 256)) == pytest.approx(3.2)


def test_rms_matching_scale_gives_adamws_rms():
    """The update of an orthogonal matrix of any shape has root mean square 0.2 (arXiv 2502.16982)."""
    for m, n in ((48, 16), (16, 48), (32, 32)):
        q = torch.linalg.qr(torch.randn(max(m, n), min(m, n), generator=torch.Generator().manual_seed(0), dtype=FP64))[
            0
        ]
        update = (q if m >= n else q.T).contiguous()
        param = torch.zeros(m, n, dtype=FP64)
        hip_ops.muon_update_([update], None, [param], lr=1.0)
        assert param.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-12)


@pytest.mark.parametrize("flag", [1.0, float("inf"), float("nan"), -0.5])
def test_an_infinite_gradient_changes_nothing(chosen, flag):
    lists = make_lists(SHAPES, 5)
    lists.gradients[0].fill_(float("nan"))
    sums = torch.full((len(SHAPES),), 3.0)
    changed = [*lists.momenta, *lists.outputs, *lists.masters, *lists.params, sums]
    before = [t.clone() for t in changed]
    found = torch.tensor([flag])
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, found_inf=found, square_sums=sums)
    hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=0.1, found_inf=found)
    hip_ops.muon_update_(lists.outputs, None, lists.params, lr=torch.tensor(0.1), found_inf=found)
    assert all(torch.equal(a, b) for a, b in zip(changed, before, strict=True))
    lists.gradients[0].fill_(1.0)
    found.zero_()  # the same tables, the flag now down
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, found_inf=found, square_sums=sums)
    hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=0.1, found_inf=found)
    assert not any(torch.equal(a, b) for a, b in zip(changed, before, strict=True) if a.numel())


def test_grad_scale_is_read_when_the_kernel_runs(chosen):
    one, two = make_lists([(9, 9)], 6, gradient=FP32, output=FP32), make_lists([(9, 9)], 6, gradient=FP32, output=FP32)
    scale = torch.tensor(1.0)
    for factor in (0.5, 4.0):
        scale.fill_(factor)
        hip_ops.muon_momentum_(one.gradients, one.momenta, one.outputs, grad_scale=scale)
        hip_ops.muon_momentum_([g * factor for g in two.gradients], two.momenta, two.outputs)
        assert torch.equal(one.momenta[0], two.momenta[0]) and torch.equal(one.outputs[0], two.outputs[0])


def test_repeated_calls_and_moved_tensors(chosen):
    lists = make_lists([(30, 50), (4, 4)], 7)
    for call in range(4):
        before = [b.clone() for b in lists.momenta]
        if call == 2:  # new storages, as after zero_grad(set_to_none=True)
            lists.gradients = [(-3 * g).clone() for g in lists.gradients]
        hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs)
        for g, b, a, o in zip(lists.gradients, before, lists.momenta, lists.outputs, strict=True):
            check_momentum(g, b, a, o, what=f"call {call}")


def test_lists_of_mixed_dtypes_keep_their_places(chosen):
    parts = [
        make_lists([shape], 8 + i, *dtypes)
        for i, (shape, dtypes) in enumerate(
            [
                ((4, 9), (BF16, FP32, BF16)),
                ((2, 3), (FP32, FP32, FP32)),
                ((7, 7), (BF16, FP32, BF16)),
                ((5, 2), (BF16, BF16, BF16)),
            ]
        )
    ]
    gradients, momenta, outputs = ([getattr(p, name)[0] for p in parts] for name in ("gradients", "momenta", "outputs"))
    before, sums = [b.clone() for b in momenta], torch.zeros(4)
    hip_ops.muon_momentum_(gradients, momenta, outputs, square_sums=sums)
    for i, (g, b, a, o) in enumerate(zip(gradients, before, momenta, outputs, strict=True)):
        check_momentum(g, b, a, o, what=f"tensor {i}")
        assert sums[i].item() == pytest.approx(o.double().square().sum().item(), rel=1e-6)


shape = st.tuples(st.integers(0, 70), st.integers(0, 70))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(shape, max_size=6),
    dtypes=st.tuples(*[st.sampled_from([BF16, FP32])] * 4),
    seed=st.integers(0, 2**31),
    shifts=st.lists(st.tuples(*[st.integers(0, 9)] * 5), min_size=6, max_size=6),
    nesterov=st.booleans(),
    momentum=st.floats(0, 1),
    with_masters=st.booleans(),
)
def test_any_lists(chosen, shapes, dtypes, seed, shifts, nesterov, momentum, with_masters):
    gradient, buffer, output, param = dtypes
    lists = make_lists(shapes, seed, gradient, buffer, output, FP32, param, offsets=shifts)
    before = [b.clone() for b in lists.momenta]
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, momentum=momentum, nesterov=nesterov)
    for g, b, a, o in zip(lists.gradients, before, lists.momenta, lists.outputs, strict=True):
        check_momentum(g, b, a, o, momentum=momentum, nesterov=nesterov)
    weights = lists.masters if with_masters else lists.params
    before = [w.clone() for w in weights]
    hip_ops.muon_update_(
        lists.outputs, lists.masters if with_masters else None, lists.params, lr=1e-3, weight_decay=0.1
    )
    for u, b, a in zip(lists.outputs, before, weights, strict=True):
        check_update(u, b, a, lr=1e-3, weight_decay=0.1, scale=rms_matching_scale(u.shape))
    for name in ("gradients", "momenta", "outputs", "masters", "params"):
        assert all(guards_intact(t) for t in getattr(lists, name)), name


def test_empty_lists_do_nothing(chosen):
    hip_ops.muon_momentum_([], [], [])
    hip_ops.muon_update_([], [], [], lr=1.0)
    hip_ops.muon_update_([], None, [], lr=1.0)
    sums = torch.full((2,), 5.0)
    empty = [torch.zeros(0, 4), torch.zeros(3, 0)]
    hip_ops.muon_momentum_(empty, empty, empty, square_sums=sums)
    hip_ops.muon_update_(empty, None, empty, lr=1.0)
    assert sums.tolist() == [0.0, 0.0]


def _lists():
    return make_lists([(4, 6), (3, 5)], 9)


WRONG = {
    "one of the lists is shorter": (
        lambda x: x.momenta.pop(),
        r"momenta holds 1 tensors. Allowed: a list of 2, as many as gradients",
    ),
    "the first list is empty": (
        lambda x: x.gradients.clear(),
        r"momenta holds 2 tensors. Allowed: a list of 0, as many as gradients",
    ),
    "a transposed view": (
        lambda x: x.outputs.__setitem__(0, torch.zeros(6, 4, dtype=BF16).T),
        r"outputs\[0\] has shape \(4, 6\), strides \(1, 4\). Allowed: contiguous",
    ),
    "another shape": (
        lambda x: x.momenta.__setitem__(1, torch.zeros(5, 3)),
        r"momenta\[1\] has shape \(5, 3\). Allowed: \(3, 5\) like gradients\[1\]",
    ),
    "half precision": (lambda x: x.gradients.__setitem__(1, x.gradients[1].half()), r"gradients\[1\] is torch.float16"),
    "fp64 among others": (lambda x: x.momenta.__setitem__(0, x.momenta[0].double()), r"momenta\[0\] is torch.float64"),
    "another device": (lambda x: x.outputs.__setitem__(1, x.outputs[1].to("meta")), r"outputs\[1\] is on meta"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_refused(case):
    lists = _lists()
    change, message = WRONG[case]
    change(lists)
    with pytest.raises(ValueError, match=message):
        hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs)


def test_wrong_arguments_are_refused():
    lists = _lists()
    args = (lists.gradients, lists.momenta, lists.outputs)
    for named, message in (
        (dict(momentum=1.5), "momentum is 1.5"),
        (dict(grad_scale=torch.ones(2)), r"grad_scale is torch.float32 of shape \(2,\)"),
        (dict(found_inf=torch.ones(1, dtype=torch.bool)), "found_inf is torch.bool"),
        (dict(square_sums=torch.zeros(3)), r"square_sums .* Allowed: torch.float32 of 2 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            hip_ops.muon_momentum_(*args, **named)
    for call, message in (
        (
            lambda: hip_ops.muon_update_(lists.outputs, [m.bfloat16() for m in lists.masters], lists.params, lr=1.0),
            r"masters\[0\] is torch.bfloat16. Allowed: torch.float32",
        ),
        (
            lambda: hip_ops.muon_update_(lists.outputs, None, lists.params, lr=torch.ones((), dtype=FP64)),
            "lr is torch.float64",
        ),
        (
            lambda: hip_ops.muon_update_(lists.outputs, None, lists.params, lr=1.0, scales=[1.0]),
            "scales holds 1 numbers",
        ),
        (
            lambda: hip_ops.muon_update_([torch.zeros(3)], None, [torch.zeros(3)], lr=1.0),
            r"params\[0\] has shape \(3,\). Allowed: a matrix, or pass scales",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_parameters_that_require_gradients_are_updated_in_place(chosen):
    param = torch.nn.Parameter(torch.ones(4, 4))
    version = param._version
    hip_ops.muon_update_([torch.ones(4, 4)], None, [param], lr=0.1, scales=[1.0])
    assert param._version > version and torch.allclose(param, torch.full((4, 4), 0.9)) and param.grad_fn is None


def test_slots_of_one_shape_lie_in_one_batch(chosen):
    shapes = [(8, 12), (6, 6), (8, 12)]
    batches, lists = MatrixBatches(shapes, "cpu"), make_lists(shapes, 10)
    momenta = [b.clone() for b in lists.momenta]
    hip_ops.muon_momentum_(lists.gradients, momenta, batches.slots, square_sums=batches.square_sums)
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs)
    assert torch.equal(batches.tensors[0], torch.stack([lists.outputs[0], lists.outputs[2]]))
    assert torch.equal(batches.tensors[1][0], lists.outputs[1])
    for batch, sums in zip(batches.tensors, batches.sums(), strict=True):
        assert torch.allclose(sums, batch.float().square().sum((1, 2)))


def test_opcheck():
    lists = _lists()
    torch.library.opcheck(
        torch.ops.hip_ops.muon_momentum_.default,
        (lists.gradients, lists.momenta, lists.outputs, torch.zeros(2), torch.ones(1), None, 0.9, True),
    )
    for masters in (lists.masters, []):
        args = (lists.outputs, masters, lists.params, [1.0, 2.0], 0.1, None, 0.1, torch.zeros(1))
        torch.library.opcheck(torch.ops.hip_ops.muon_update_.default, args)


def test_compiled_step():
    """One graph for the step, with the mutated lists written back."""
    eager, compiled = _lists(), _lists()

    def step(lists):
        hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs)
        hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=0.02, weight_decay=0.1)

    step(eager)
    torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    for name in ("momenta", "outputs", "masters", "params"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(eager, name), getattr(compiled, name), strict=True)), name

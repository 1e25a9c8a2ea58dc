# SPDX-License-Identifier: Apache-2.0
"""Test the CCA prologue as an operator on the CPU: the reference, and the HIP sources built with g++."""

import contextlib
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hip_ops
from hip_ops import saved_bytes
from hip_ops.ops import cca_prologue
from hip_ops.ops.cca_prologue import hip as hip_kernels
from hip_ops.ops.cca_prologue import reference
from tests.hip_ops.cca_prologue_cases import BF16, FP32, FP64, GRADIENTS, Case, check, compare, exact, make
from tests.hip_ops.cca_prologue_steps import StepState, prologue_step
from tests.hip_ops.operators_seen import OperatorsSeen

NAMES = ("query", "key", "value")


def call(case: Case, tensors: dict):
    return hip_ops.cca_prologue(
        *list(tensors.values())[:7],
        query_groups=case.groups,
        delayed_channels=case.late,
        **{name: tensors[name] for name in ("halo", "value_halo", "starts")},
    )


def leaves(case: Case) -> dict:
    return {
        name: t.detach().clone().requires_grad_() if t is not None and name in GRADIENTS else t
        for name, t in make(case).tensors.items()
    }


ANY = [
    Case(9, 2, 4, 2, 16, rotary=8),
    Case(9, 2, 4, 2, 16, 2, True, 3, rotary=8),
    Case(1, 3, 2, 2, 16, 2, True, rotary=0, delayed=5),
    Case(2, 3, 2, 2, 16, document=2, rotary=16, zero=True, pad=3, rope_batch=True),
    Case(12, 1, 3, 1, 10, 3, True, at=(0, 2, 3), rotary=4, zero=True),
]


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("case", ANY, ids=str)
def test_reference_against_fp64(case, dtype):
    check(reference, Case(**{**case.__dict__, "dtype": dtype}))


FAST = [
    Case(70, 1, 2, 1),
    Case(33, 2, 4, 2, halo=True, chunks=2),
    Case(40, 2, 2, 1, document=5, halo=True),
    Case(1, 40, 2, 1, halo=True, document=3),
    Case(2, 9, 2, 2, rotary=128, delayed=20),
    Case(37, 1, 5, 1, rotary=0, pad=8),
    Case(37, 1, 3, 3, rotary=16, pad=3, rope_batch=True, at=(15, 31, 32)),
    Case(45, 1, 2, 1, halo=True, document=6, zero=True),
    Case(65, 1, 8, 2),
    Case(35, 1, 16, 2, halo=True, document=9),  # ZAYA1-74B's heads
]


@pytest.mark.first_cases(9)
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:11"])
@pytest.mark.parametrize("case", FAST, ids=str)
def test_cpu_build_against_fp64(monkeypatch, case, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    check(hip_kernels, case)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 34),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    per=st.integers(1, 3),
    chunks=st.integers(1, 2),
    halo=st.booleans(),
    document=st.sampled_from([0, 2, 9]),
    rotary=st.sampled_from([0, 8, 64, 128]),
    delayed=st.sampled_from([None, 0, 4]),
    pad=st.sampled_from([0, 1, 8]),
    zero=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_shapes(rows, batch, groups, per, chunks, halo, document, rotary, delayed, pad, zero, seed):
    chunks = chunks if halo or document else 1
    case = Case(
        rows,
        batch,
        groups * per,
        groups,
        128,
        chunks,
        halo,
        document,
        rotary=rotary,
        delayed=delayed,
        pad=pad,
        zero=zero,
        seed=seed,
    )
    for module in (reference, hip_kernels):
        check(module, case)


def test_gradcheck():
    """Compares all arguments' gradients in fp64 with finite differences: halos, a document's border, both kinds of
    value channels.
    """
    case = Case(4, 1, 2, 1, 4, 2, True, at=(2,), rotary=2, dtype=FP64)
    given = leaves(case)
    wanted = [name for name in GRADIENTS if given[name] is not None]
    assert torch.autograd.gradcheck(
        lambda *values: call(case, {**given, **dict(zip(wanted, values, strict=True))}),
        [given[name] for name in wanted],
    )


def test_transformers_with_its_cache():
    """Compares results and states with ZayaAttention's own modules for a prompt and single tokens."""
    zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya")
    from transformers import DynamicCache, ZayaConfig

    torch.manual_seed(0)
    batch, d, hidden = 3, 16, 24
    config = ZayaConfig(
        hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2, head_dim=d, num_hidden_layers=2
    )
    projection, norm = zaya.ZayaCCAProjection(config, 0), zaya.ZayaQKNorm(config)
    for parameter in (*projection.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    matrix = torch.cat([getattr(projection, name).weight for name in names])
    channels, late = 6 * d, d
    parameters = (
        projection.conv_qk_depthwise.weight,
        projection.conv_qk_depthwise.bias,
        projection.conv_qk_grouped.weight,
        projection.conv_qk_grouped.bias,
        norm.temp,
    )
    state = StepState.empty(batch, channels, late, dtype=FP32, device="cpu")
    cache, angles = DynamicCache(config=config), torch.rand(9, 1, 1, 4) * 6.0
    angles = torch.cat((angles, angles), dim=-1)
    tokens = torch.randn(batch, 9, hidden)
    with torch.no_grad():
        for part in (slice(0, 6), slice(6, 7), slice(7, 8), slice(8, 9)):
            query, key, value = projection(tokens[:, part], cache)
            turns = angles[part, :, 0].transpose(0, 1)
            query, key = zaya.apply_rotary_pos_emb(*norm(query, key), turns.cos(), turns.sin(), unsqueeze_dim=2)
            projected = torch.nn.functional.linear(tokens[:, part].transpose(0, 1), matrix)
            got = prologue_step(projected, *parameters, hip_ops.rope_table(angles[part]), query_groups=2, state=state)
            for ours, theirs in zip(got, (query, key, value), strict=True):
                torch.testing.assert_close(ours, theirs.transpose(0, 1), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(state.conv, cache.get_conv_state(0, state_idx=0).permute(2, 0, 1))
            torch.testing.assert_close(state.value, cache.get_recurrent_state(0, state_idx=0))


def test_chunks_with_halos_give_what_the_whole_sequence_gives(chosen):
    whole = make(Case(24, 2, 2, 1))
    expected = call(whole.case, whole.tensors)
    projected, chunks = whole.tensors["projected"], 3
    # rows -2, -1 of each chunk
    before = torch.cat((torch.zeros_like(projected[:2]), projected)).unfold(0, 2, 8)[:chunks].movedim(-1, 1)
    tensors = {
        **whole.tensors,
        "halo": before[..., :384].contiguous(),
        "value_halo": before[:, 1, :, -64:].contiguous(),
    }
    for name, got, want in zip(NAMES, call(whole.case, tensors), expected, strict=True):
        compare(name, got, want, 128, 2**-8)


def test_documents_see_what_they_would_see_alone(chosen):
    """Packs documents of one and two rows among others; positions restart."""
    lengths = [5, 1, 2, 33, 1]
    positions = [t for length in lengths for t in range(length)]
    starts = torch.tensor([True, *(t == 0 for t in positions)]).view(1, -1, 1)
    inputs = make(Case(len(positions), 1, 2, 1))
    rope = inputs.tensors["rope"]
    packed = call(inputs.case, {**inputs.tensors, "starts": starts, "rope": rope[positions]})
    at = 0
    for length in lengths:
        alone = {**inputs.tensors, "projected": inputs.tensors["projected"][at : at + length], "rope": rope[:length]}
        for name, got, want in zip(NAMES, packed, call(inputs.case, alone), strict=True):
            compare(name, got[at : at + length], want, 128, 2**-8)  # torch's sums depend on the number of rows
        at += length


def test_steps_give_what_the_whole_sequence_gives(chosen):
    case = Case(12, 5, 2, 1)
    tensors = make(case).tensors
    whole = call(case, tensors)
    projected, *parameters, rope = list(tensors.values())[:7]
    state = StepState.empty(case.batch, case.channels, case.late, dtype=BF16, device="cpu")
    for part in (slice(0, 1), slice(1, 2), slice(2, 9), slice(9, 10), slice(10, 12)):
        got = prologue_step(projected[part], *parameters, rope[part], query_groups=1, state=state)
        for name, result, want in zip(NAMES, got, whole, strict=True):
            compare(name, result, want[part], 128, 2**-8)


def test_gradients_of_a_result_that_is_not_used(chosen):
    for used in range(3):
        case = Case(5, 1, 2, 1)
        t = leaves(case)
        call(case, t)[used].float().square().sum().backward()
        if used == 2:
            assert not t["grouped_weight"].grad.any() and not t["projected"].grad[..., : case.channels].any()
        assert all(t[name].grad.isfinite().all() for name in GRADIENTS[:6])


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)], ids=str)
def test_empty(chosen, shape):
    case = Case(3, 2, 2, 1)
    t = leaves(case)
    t["projected"], t["rope"] = torch.zeros(*shape, 512, dtype=BF16, requires_grad=True), None
    results = call(case, t)
    assert [tuple(r.shape) for r in results] == [(*shape, 2, 128), (*shape, 1, 128), (*shape, 1, 128)]
    sum(r.sum() for r in results).backward()
    assert all(not t[name].grad.any() for name in GRADIENTS[1:6])


def test_any_strides_give_the_same(chosen):
    """Tries batch-first tensors, gradients with heads before rows, as attention makes them, and angles before rows."""
    case, found = Case(35, 2, 2, 1), []
    for order in ((0, 1, 2, 3), (1, 2, 0, 3)):
        inputs, t = make(case), leaves(case)
        back = [order.index(i) for i in range(4)]
        by_batch = t["projected"].detach().transpose(0, 1).contiguous().transpose(0, 1)
        t["projected"] = (by_batch if order[0] else by_batch.contiguous()).requires_grad_()
        t["rope"] = t["rope"].mT.contiguous().mT if order[0] else t["rope"]
        torch.autograd.backward(call(case, t), [u.permute(order).contiguous().permute(back) for u in inputs.upstream])
        found.append([t[name].grad for name in GRADIENTS if t[name] is not None])
    assert all(map(torch.equal, *found))


ERRORS = [
    (
        {"projected": lambda t: t[..., 1:]},
        "projected has shape (3, 2, 511). Allowed: (3, 2, 512), [s, b, C+query_groups*d]",
    ),
    ({"grouped_weight": lambda t: t[:, :, 0]}, "grouped_weight has shape (384, 128). Allowed: [C, d>0, 2]"),
    ({"grouped_weight": lambda t: t[:130]}, "grouped_weight has shape (130, 128, 2). Allowed: [C, d>0, 2]"),
    ({"grouped_bias": lambda t: t[1:]}, "grouped_bias has shape (383,). Allowed: (384,), [C]"),
    ({"temperature": lambda t: t.repeat(2)}, "temperature has shape (2,). Allowed: (1,), [query_groups]"),
    ({"rope": lambda t: t[:, :, :63]}, "rope has shape (3, 1, 63). Allowed: [3, 1 or 2, r] with an even r up to 128"),
    ({"rope": lambda t: t.repeat(1, 3, 1)}, "rope has shape (3, 3, 64). Allowed: [3, 1 or 2, r]"),
    ({"rope": lambda t: t[1:]}, "rope has shape (2, 1, 64). Allowed: [s, turns, r]"),
    ({"rope": lambda t: t.bfloat16()}, "rope is torch.bfloat16. Allowed: torch.float32"),
    ({"projected": lambda t: t.half()}, "projected is torch.float16. Allowed: torch.bfloat16 like depthwise_bias"),
    (
        {"depthwise_bias": lambda t: t.half()},
        "depthwise_bias is torch.float16. Allowed: torch.bfloat16 or torch.float32 (or all tensors torch.float64)",
    ),
    ({"grouped_bias": lambda t: t.float()}, "grouped_bias is torch.float32. Allowed: torch.bfloat16"),
    ({"temperature": lambda t: t.to("meta")}, "temperature is on meta. Allowed: on cpu like depthwise_bias"),
    (
        {"halo": lambda _: torch.zeros(1, 2, 2, 384, dtype=BF16)},
        "one of halo and value_halo is None. Allowed: both or neither",
    ),
    (
        {"starts": lambda _: torch.zeros(2, 2, 2, dtype=torch.bool)},
        "halo, value_halo and starts have 2 chunks. Allowed: a divisor of the 3 rows of projected",
    ),
    (
        {"starts": lambda _: torch.zeros(1, 3, 2, dtype=torch.bool)},
        "starts has shape (1, 3, 2). Allowed: [k>0, s//k+1, b]",
    ),
    ({"starts": lambda _: torch.zeros(0, 4, 2, dtype=torch.bool)}, "starts has shape (0, 4, 2). Allowed:"),
    ({"starts": lambda _: torch.zeros(1, 4, 2)}, "starts is torch.float32. Allowed: torch.bool"),
]


@pytest.mark.parametrize("changes, message", ERRORS, ids=[message[:30] for _, message in ERRORS])
def test_wrong_arguments_are_named(changes, message):
    case = Case(3, 2, 2, 1)
    tensors = make(case).tensors
    tensors |= {name: change(tensors[name]) for name, change in changes.items()}
    with pytest.raises(ValueError, match="^" + re.escape(f"hip_ops.cca_prologue: {message}")):
        call(case, tensors)


def test_wrong_numbers_are_named():
    tensors = make(Case(3, 2, 2, 1)).tensors
    half, two = tensors["projected"][..., :384], torch.cat((tensors["projected"], tensors["projected"][..., :128]), -1)
    for changes, options, message in (
        (
            {"projected": half, "temperature": torch.ones(0)},
            {"query_groups": 0},
            "query_groups is 0. Allowed: a divisor",
        ),
        (
            {"projected": two, "temperature": torch.ones(2)},
            {"query_groups": 2},
            "query_groups is 2. Allowed: a divisor",
        ),
        ({}, {"query_groups": 2}, "projected has shape (3, 2, 512). Allowed: (3, 2, 640), [s, b, C+query_groups*d]"),
        ({}, {"query_groups": 1, "delayed_channels": 129}, "delayed_channels is 129. Allowed: from 0 to 128"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            hip_ops.cca_prologue(*list((tensors | changes).values())[:7], **options)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("case", [Case(4, 1, 2, 1, 16, 2, True, 3, rotary=8, dtype=FP32), Case(3, 2, 2, 1)], ids=str)
def test_opcheck(case):
    """Runs torch's own checks of schema, fake tensors, autograd registration and AOT dispatch."""
    t = leaves(case)
    torch.library.opcheck(torch.ops.hip_ops.cca_prologue, (*t.values(), case.groups, case.late))
    torch.library.opcheck(
        torch.ops.hip_ops.cca_prologue_backward, backward_arguments(case), test_utils=("test_schema", "test_faketensor")
    )


def test_compiles_whole(chosen):
    case, results = Case(4, 2, 2, 1, halo=True, document=3), []

    def function(t):
        query, key, value = call(case, t)
        return torch.tanh(query.float()).sum() + (key.float() * value.float()).sum()

    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        t = leaves(case)
        loss = run(t)
        loss.backward()
        results.append([loss, *(t[name].grad for name in GRADIENTS)])
    assert all(map(torch.equal, *results))


def test_without_dispatch_and_with_it(no_function_modes):
    """Plain tensors bypass torch's dispatcher; a mode sees the operators by their names; both give the same results."""
    case, found = Case(5, 2, 2, 1, halo=True, document=3), []
    for mode in (contextlib.nullcontext(), OperatorsSeen()):
        t = leaves(case)
        with mode:
            results = call(case, t)
            torch.autograd.backward(results, make(case).upstream)
        assert (type(results[0].grad_fn).__name__ == "hip_ops_cca_prologueBackward") == (
            not isinstance(mode, OperatorsSeen)
        )
        found.append([*results, *(t[name].grad for name in GRADIENTS)])
    assert {"hip_ops::cca_prologue", "hip_ops::cca_prologue_backward"} <= set(mode.names)
    assert all(map(torch.equal, *found))


def test_results_do_not_change_between_runs(monkeypatch):
    """There are no atomics: the bits are the same for every order of blocks and waves."""
    inputs, found = make(Case(70, 1, 2, 1, halo=True, document=9)), []
    for schedule in ("forward", "reverse", "random:3"):
        monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
        query, key, value, inverse_norm = hip_kernels.cca_prologue(*inputs.arguments)
        *tensors, groups, late = inputs.arguments
        found.append(
            [
                query,
                key,
                value,
                inverse_norm,
                *hip_kernels.cca_prologue_backward(*inputs.upstream, *tensors, query, key, inverse_norm, groups, late),
            ]
        )
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def backward_arguments(case: Case) -> tuple:
    """Return the arguments of the backward operator, from the reference's forward."""
    inputs = make(case)
    query, key, _, inverse_norm = reference.cca_prologue(*inputs.arguments)
    return *inputs.upstream, *inputs.tensors.values(), query, key, inverse_norm, case.groups, case.late


@pytest.mark.parametrize(
    "case, takes",
    [
        (Case(5), {"hip": True, "triton": True}),
        (Case(5, rotary=0, delayed=20), {"hip": True, "triton": True}),
        (Case(5, d=64), {"hip": False, "triton": True}),
        (Case(5, dtype=FP32), {"hip": False, "triton": True}),
        (Case(5, delayed=5), {"hip": False, "triton": True}),
        (Case(5, rotary=4), {"hip": False, "triton": True}),
        (Case(5, d=48, rotary=16), {"hip": False, "triton": False}),
    ],
    ids=str,
)
def test_calls_that_kernels_do_not_take_go_to_the_next_version(case, takes):
    for operator, arguments in (
        (cca_prologue._prologue, make(case).arguments),
        (cca_prologue._prologue_backward, backward_arguments(case)),
    ):
        assert {version: fits(*arguments) for version, fits in operator.fits.items()} == takes
        with hip_ops.use_kernels("hip"):
            got = operator(*arguments)
        if not takes["hip"]:
            assert all(map(torch.equal, got, operator.reference(*arguments)))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "case",
    [Case(4, 2, 4, 2, 16, 2, True, 3, rotary=8, dtype=FP32), Case(3, 1, 2, 1, 16, rotary=0, dtype=FP32)],
    ids=str,
)
def test_the_reference_compiles(case):
    for function, arguments in (
        (reference.cca_prologue, make(case).arguments),
        (reference.cca_prologue_backward, backward_arguments(case)),
    ):
        compiled = torch.compile(function, dynamic=False, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(*arguments), function(*arguments), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_temperature_in_fp32_and_rope_in_fp32_against_fp64(chosen):
    for dtype, name in ((BF16, "temperature"), (FP64, "rope")):
        tensors = make(Case(5, 1, 2, 1, rotary=8, dtype=dtype)).tensors
        found = []
        for as_fp32 in (False, True):
            values = {key: t.float() if key == name else t for key, t in tensors.items()} if as_fp32 else tensors
            found.append(call(Case(5, 1, 2, 1, dtype=dtype), values))
        for mine, theirs in zip(*found, strict=True):
            assert mine.dtype == theirs.dtype == dtype
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_saved_bytes():
    """Compares with the bytes that autograd keeps besides the parameters and the rope table."""
    case, kept = Case(7, 3, 4, 2, 16, rotary=8), []
    given = leaves(case)
    known = {t.data_ptr() for name, t in given.items() if t is not None and name != "projected"}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call(case, given)
    found = sorted(t.nbytes for t in kept if t.data_ptr() not in known)
    assert found == sorted(saved_bytes.cca_prologue(7 * 3, 4, 2, 16, 2).values())


def test_the_comparison_knows_one_wrong_row():
    case = Case(9, 1, 2, 1)
    inputs = make(case)
    results, _ = exact(inputs)
    query = inputs and reference.cca_prologue(*inputs.arguments)[0].clone()
    compare("right", query, results["query"], case.d, 6e-3)
    query[4, 0, 1, :8] *= 1.05
    with pytest.raises(AssertionError, match="1 vectors are wrong; the worst, 9,|1 of 18 vectors are wrong"):
        compare("wrong", query, results["query"], case.d, 6e-3)

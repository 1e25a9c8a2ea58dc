# SPDX-License-Identifier: Apache-2.0
"""Test that the self-check of the HIP versions launches every variant of a kernel that the training of ZAYA1-base and of
ZAYA1-74B launches.

The sources are built for the CPU with launches that are recorded and not run, and the host counts an MI300X's compute
units: the launchers themselves choose kernel and grid, for the examples and for the sizes of training.
"""

import ctypes
import dataclasses
import functools
import importlib
import sys

import pytest
import torch

from hip_ops.ops.linear_cross_entropy import passes
from hip_ops.ops.newton_schulz import LARGE_TILES, _example_of_large_tiles
from hip_ops.runtime import launchers
from hip_ops.runtime.build import kernel_sources
from hip_ops.runtime.launchers import load
from hip_ops.runtime.model_sizes import ModelSizes, model_sizes, set_model_sizes
from hip_ops.runtime.operator import OPERATORS, all_operators
from hip_ops.saved_bytes import chunk_for
from tests.hip_ops.cpu_kernels import KERNELS, build_cpu_library
from tests.hip_ops.training_calls import ZAYA1_74B, Sizes, training_calls
from zaya_plugin.config.compose import compose

CPU, MI300X_UNITS = torch.device("cpu"), 304
STATISTICS_PARTS = 4  # of a row of logits, on AMD
WAVES, TILE = 4, 32  # of a block of the row kernels; rows of a tile of the CCA prologue


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: str
    pointers: str
    grid: tuple[int, int]
    numbers: tuple[int, ...]

    @property
    def variant(self) -> tuple:
        """What decides the code that runs: the kernel, which pointers are null, and the way through its loops."""
        return self.kernel, self.pointers, WAY[_family(self.kernel)](self.grid, *self.numbers)


def _family(kernel: str) -> str:
    return max((name for name in WAY if kernel.startswith(name)), key=len)


def _more_than(rows_a_block: int):
    return lambda grid, rows, *_: rows > rows_a_block * grid[0]


def _roles(of_a_group: int) -> int:
    """Blocks of a run of tiles: the query heads, and of each group its key head alone or its value head too."""
    return model_sizes().num_attention_heads + of_a_group * model_sizes().num_query_groups


# Kernels by the start of their names -> (grid, integer arguments) -> the way through the loops.
WAY = {
    "ho_symmetric": lambda grid, n, k: k // 32 >= 5,  # the pipelined loop needs five whole slabs (product_tile.h)
    "ho_symmetric_fp16_any": lambda grid, *_: None,  # without the pipelined loop
    "ho_general_fp16_any": lambda grid, m, n, k, to_bf16: to_bf16,
    "ho_general": lambda grid, m, n, k, to_bf16: (k // 32 >= 5, to_bf16),
    "ho_start": lambda grid, *_: None,
    "ho_rms_norm": _more_than(1),  # the generic kernels
    # hidden 2048 and 4096: a row a block
    **{
        f"ho_{merge}_{norm}": _more_than(1)
        for merge in ("add", "scaled_residual")
        for norm in ("rms_norm", "layer_norm")
    },
    **{f"ho_{norm}_sum": lambda grid, blocks, *_: blocks > 32 for norm in ("rms_norm", "layer_norm")},  # slices
    "ho_gather_rows": _more_than(WAVES),
    "ho_weighted_swiglu": _more_than(WAVES),
    "ho_row_statistics": lambda grid, rows, *_: (rows > WAVES * grid[0], grid[1] > 1),
    "ho_overwrite_with": lambda grid, rows, *_: (rows > WAVES * grid[0], grid[1] > 1),
    "ho_finish_gradient": lambda grid, rows, classes, stride, first, size, parts, *_: (
        rows > WAVES * grid[0],
        parts > 64,  # lanes
    ),
    "ho_cca_prologue_forward": lambda grid, *numbers: -(-numbers[4] // TILE) > grid[0] // _roles(2),
    "ho_cca_prologue_backward_weights": lambda grid, *numbers: numbers[10] > grid[0] // _roles(1),
    "ho_cca_prologue_backward_input": lambda grid, *numbers: numbers[3] > grid[0] // _roles(1),
    "ho_cca_prologue_backward_temperature": lambda grid, *_: True,
    "ho_cca_prologue_backward_sum": lambda grid, runs, *_: runs > 1,
    "ho_expert": lambda grid, wide, tokens, tokens_a_thread, experts: (grid[0] > 1, tokens_a_thread > 1),
    "ho_muon": lambda grid, *_: None,  # a block takes a second chunk from five billion elements on
    "ho_add_runs": lambda grid, *_: grid[0] > 1,
    "ho_join_runs": lambda grid, *_: grid[0] > 1,
    "ho_add_gradient": lambda grid, *_: grid[0] > 1,
}


@pytest.fixture(scope="module")
def recorded():
    """recorded(function, makers of arguments): the launches of its calls, as on an MI300X."""
    loaded = load(build_cpu_library(*kernel_sources(), before=KERNELS / "recorded_launches.h"))
    loaded.take_records.restype = ctypes.c_char_p

    def launches(function, makers) -> list[Launch]:
        loaded.take_records()
        with pytest.MonkeyPatch.context() as patch, torch.no_grad(), torch.random.fork_rng():
            patch.setattr(launchers, "_library", lambda target: loaded)
            for name, module in list(sys.modules.items()):
                if name.startswith("hip_ops.") and hasattr(module, "multiprocessors"):
                    patch.setattr(module, "multiprocessors", lambda device: MI300X_UNITS)
            for make in makers:
                function(*make())
        found = []
        for line in loaded.take_records().decode().splitlines():
            kernel, pointers, x, y, *numbers = line.split()
            found.append(Launch(kernel, pointers, (int(x), int(y)), tuple(map(int, numbers))))
        return found

    return launches


@pytest.fixture(scope="module")
def checked(recorded) -> dict[str, list[Launch]]:
    """The launches of every operator's self-check, of ZAYA1-base."""
    set_model_sizes(ModelSizes())
    return self_check(recorded)


def self_check(recorded) -> dict[str, list[Launch]]:
    found = {}
    for operator in all_operators():
        if "hip" in operator.versions:
            version = operator._function_of("hip")
            examples = (*operator.examples, *operator.more_examples.get("hip", ()))
            found[operator.name] = recorded(version, [functools.partial(each, CPU) for each in examples])
    return found


@pytest.fixture(scope="module")
def recipe():
    return compose(["experiment=zaya1_base", "data.path=x"])


def test_the_sizes_are_those_of_the_recipe(recipe):
    """And the dtypes that the calls assume."""
    groups = (recipe.stage, recipe.model, recipe.optim)
    named = {key: value for group in groups for key, value in dataclasses.asdict(group).items()}
    sizes = dataclasses.asdict(Sizes())
    assert sizes == {name: named[name] for name in sizes}
    assert (recipe.cluster.dtype, recipe.optim.muon_dtype, recipe.optim.muon_momentum_dtype) == ("bf16", "fp16", "fp32")
    assert recipe.model.residual_in_fp32 and recipe.optim.grad_reduce_in_fp32
    logits = torch.empty(
        chunk_for(recipe.stage.seq_length * recipe.stage.micro_batch_size, passes.CLASSES, 2),
        passes.CLASSES,
        device="meta",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.1")
        assert passes.parts_for(logits) == STATISTICS_PARTS


KERNELS_OF = {
    "row_statistics": ["ho_row_statistics_bf16"],
    "overwrite_with_gradient": ["ho_overwrite_with_gradient_bf16"],
    "overwrite_with_exponentials": ["ho_overwrite_with_exponentials_bf16"],
    "finish_gradient": ["ho_finish_gradient_bf16"],
    "newton_schulz": [
        "ho_general_fp16_128",
        "ho_general_fp16_256",
        "ho_general_fp16_64",
        "ho_general_fp16_any",
        "ho_start_any_bf16_to_fp16",
        "ho_start_bf16_to_fp16",
        "ho_symmetric_fp16_128",
        "ho_symmetric_fp16_256",
        "ho_symmetric_fp16_64",
        "ho_symmetric_fp16_any",
    ],
    "merge_norm": [
        "ho_add_layer_norm_2048",
        "ho_add_rms_norm_2048",
        "ho_rms_norm_any",
        "ho_scaled_residual_layer_norm_2048",
        "ho_scaled_residual_rms_norm_2048",
    ],
    "merge_norm_backward": [
        "ho_add_layer_norm_backward_2048",
        "ho_add_rms_norm_backward_2048",
        "ho_layer_norm_sum_vectors",
        "ho_layer_norm_sum_weight",
        "ho_rms_norm_backward_any",
        "ho_rms_norm_sum_vectors",
        "ho_rms_norm_sum_weight",
        "ho_scaled_residual_layer_norm_backward_2048",
        "ho_scaled_residual_rms_norm_backward_2048",
    ],
    "cca_prologue": ["ho_cca_prologue_forward"],
    "cca_prologue_backward": [
        "ho_cca_prologue_backward_input",
        "ho_cca_prologue_backward_sum",
        "ho_cca_prologue_backward_temperature",
        "ho_cca_prologue_backward_weights",
    ],
    "sort_by_expert": ["ho_expert_count_32", "ho_expert_place_32"],
    "gather_rows": ["ho_gather_rows_16"],
    "weighted_swiglu": ["ho_weighted_swiglu_bf16"],
    "weighted_swiglu_backward": ["ho_weighted_swiglu_backward_bf16"],
    "muon_momentum_": [
        "ho_muon_momentum_bf16_fp32_bf16",
        "ho_muon_momentum_fp32_fp32_bf16",
        "ho_muon_square_sums_kernel",
    ],
    "muon_update_": ["ho_muon_update_bf16_fp32", "ho_muon_update_bf16_fp32_bf16"],
    "add_gradient_": ["ho_add_gradient_any_bf16", "ho_add_gradient_bf16"],
    "add_rows_": ["ho_add_runs_any_bf16", "ho_add_runs_bf16", "ho_join_runs", "ho_join_runs_any"],
}


@pytest.fixture
def of_base():
    """Sets ZAYA1-base's sizes again after the test."""
    yield
    set_model_sizes(ModelSizes())


@pytest.mark.slow
@pytest.mark.parametrize("sizes, expert_ranks", [(Sizes(), 1), (ZAYA1_74B, 8)], ids=["base", "74b"])
def test_training_launches_no_variant_that_the_self_check_does_not(recorded, sizes, expert_ranks, of_base):
    set_model_sizes(sizes.of_a_rank(expert_ranks))
    checked = self_check(recorded)
    missing, trained = {}, training_calls(STATISTICS_PARTS, sizes, expert_ranks=expert_ranks)
    assert checked.keys() <= trained.keys(), "every operator with a HIP version has its sizes there"
    for name in checked.keys():
        calls = trained[name]
        version = OPERATORS[name]._function_of("hip")
        launched = recorded(version, [lambda each=each: each for each in calls])
        assert launched, name
        left = {each.variant for each in launched} - {each.variant for each in checked[name]}
        if left:
            missing[name] = sorted(left)
    assert not missing, "\n".join(f"{name}: {each}" for name, left in missing.items() for each in left)


@pytest.mark.slow
def test_the_kernels_that_the_self_check_launches(checked):
    """By operator, so that a change of an example or of a launcher's choice is seen."""
    assert {name: sorted({each.kernel for each in found}) for name, found in checked.items()} == KERNELS_OF


@pytest.mark.parametrize("form", ["gram", "standard"])
@pytest.mark.parametrize("target, place", [(target, place) for target in LARGE_TILES for place in range(3)])
def test_all_products_of_an_example_take_its_tiles(recorded, monkeypatch, target, place, form):
    for module in ("hip_ops.ops.newton_schulz", "hip_ops.ops.newton_schulz.hip"):
        monkeypatch.setattr(importlib.import_module(module), "architecture", lambda device: target)
    version, side = OPERATORS["newton_schulz"]._function_of("hip"), [*LARGE_TILES[target].values()][place]
    kernels = {each.kernel for each in recorded(version, [lambda: _example_of_large_tiles(place, form)(CPU)])}
    assert kernels == {"ho_start_bf16_to_fp16", f"ho_symmetric_fp16_{side}", f"ho_general_fp16_{side}"}

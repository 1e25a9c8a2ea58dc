# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of hip_ops as an MI300X would run them on ZAYA1's shapes, compiled for gfx942: what the budget
table holds of Triton.

Names ending in _74b are of ZAYA1-74B on one of eight expert-parallel ranks: hidden size and width 4096, 16 query heads,
25 classes, three experts. Shapes and tiles are those that the launchers choose: hidden size 2048, bf16 layer output and gradients, fp32 stream,
momentum and weight, and the Gram products of a batch of 2048 x 4096 matrices.
"""

import functools
from collections.abc import Callable

import torch

from hip_ops.runtime.tile_choice import COMPUTE_UNITS
from tests.gfx942.toolchain import ARCH
from tests.gfx942.triton_objects import TritonObject, triton_code_object

HIDDEN, OF_74B = 2048, 4096


def _compile(
    kernel,
    types: dict[str, str],
    constexprs: dict,
    num_warps: int,
    num_stages: int = 2,
    unaligned: tuple[str, ...] = (),
    **options,
) -> TritonObject:
    """`types` of what is neither constexpr nor a pointer to fp32; pointers and sizes are divisible by 16 but for
    `unaligned`. options: as of `triton_code_object`.
    """
    constexprs = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names if name not in constexprs}
    divisible = [name for name, kind in signature.items() if kind != "fp32" and name not in unaligned]
    return triton_code_object(
        kernel, signature, constexprs, num_warps=num_warps, num_stages=num_stages, divisible_by_16=divisible, **options
    )


def _rms_norm(which: str, scaled: bool, centered: bool = False, hidden: int = HIDDEN) -> TritonObject:
    from hip_ops.ops.rms_norm import triton as rms_norm

    sizes = dict.fromkeys(
        ("rows", "hidden", "programs", "x_stride", "residual_stride", "dy_stride", "d_new_residual_stride"), "i32"
    )
    stream = "*fp32" if scaled else "*bf16"
    half = dict.fromkeys(
        ("x", "dy", "y", "d_x", "weight", "output_bias", "output_scale", "residual_bias", "residual_scale", "bias"),
        "*bf16",
    )
    types = (
        sizes
        | half
        | dict.fromkeys(("residual", "new_residual", "d_residual", "d_new_residual"), stream)
        | {"eps": "fp32"}
    )
    form = {"SCALED": scaled, "CENTERED": centered}
    form |= {} if centered else dict.fromkeys(("bias", "mean", "d_bias"))
    if which == "sum":
        return _compile(
            rms_norm.rms_norm_sum_kernel, types, form | {"PROGRAMS": 64, "BLOCK": 32}, 8, unaligned=("programs",)
        )
    backward = which == "backward"
    chosen = rms_norm.launch(hidden, scaled=scaled, backward=backward, warp_size=64)
    constexprs = form | {
        "ROWS": chosen.rows,
        "BLOCK": chosen.columns,
        "STAGES": getattr(chosen, "stages", 1),
        "HAS_D_NEW_RESIDUAL": True,
        "WRITES_D_X": scaled,
    }
    return _compile(
        rms_norm.rms_norm_backward_kernel if backward else rms_norm.rms_norm_forward_kernel,
        types,
        constexprs,
        chosen.num_warps,
    )


def _muon(which: str) -> TritonObject:
    from hip_ops.ops.muon import triton as muon
    from hip_ops.ops.muon.multi_tensor import CHUNK_ELEMENTS

    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    tile = muon.tile_of(dtypes, 64)
    warps = tile.pop("num_warps")
    types = {
        "words": "*i64",
        "chunk_rows": "*i32",
        "chunks": "i32",
        **dict.fromkeys(("momentum", "gradient_weight", "lr", "weight_decay"), "fp32"),
    }
    none = dict.fromkeys(("grad_scale", "found_inf", "lr_pointer", "partials"))
    names = ("GRADIENT", "MOMENTUM", "OUTPUT") if which == "momentum" else ("UPDATE", "WEIGHT", "COPY")
    constexprs = dict(zip(names, (muon.TYPES[dtype] for dtype in dtypes), strict=True)) | tile | none
    constexprs |= {"NESTEROV": True, "CHUNK": CHUNK_ELEMENTS}
    kernel = muon.muon_momentum_kernel if which == "momentum" else muon.muon_update_kernel
    return _compile(kernel, types, constexprs, warps, unaligned=("chunk_rows", "chunks"))


def _product(symmetric: bool) -> TritonObject:
    from hip_ops.ops.newton_schulz.product_configs import choose_config
    from hip_ops.ops.newton_schulz.triton import pointer_product_kernel

    config = choose_config("gram" if symmetric else "general", 16, 2048, 4096, amd=True)
    sizes = ("m", "n", "k", "a_stride", "b_stride", "d_stride", "c_stride", "a_batch", "b_batch", "d_batch", "c_batch")
    types = dict.fromkeys(sizes, "i32") | dict.fromkeys(("alpha", "beta"), "fp32")
    types |= {f"{name}_pointer": "*bf16" for name in "abcd"}
    constexprs = {
        "SYMMETRIC": symmetric,
        "A_BY_COLUMNS": False,
        "B_BY_COLUMNS": not symmetric,
        "HAS_D": True,
        "EVEN_K": True,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": 8,
        "XCDS": 8,
    }
    return _compile(pointer_product_kernel, types, constexprs, config.num_warps, config.num_stages)


def _expert_rows(which: str, hidden: int = HIDDEN, experts: int = 16) -> TritonObject:
    from hip_ops.ops.expert_permutation import triton as kernels

    maps = dict.fromkeys(
        ("index", "inverse", "expert_ids", "counted", "token_of_row", "row_of_token", "counts", "offsets"), "*i32"
    ) | {"expert_ids": "*i64"}
    sizes = dict.fromkeys(
        ("rows", "hidden", "source_stride", "grad_stride", "tokens", "num_experts", "tiles", "programs"), "i32"
    )
    types = maps | sizes | dict.fromkeys(("source", "out", "grad", "d_source"), "*bf16")
    if which in ("count", "place"):
        experts, tile = kernels.sort_tile(experts)
        # a tile a program, as for 32,768 tokens
        constexprs = {"EXPERTS": experts, "TILE": tile, "ROWS": 4096 // experts, "tiles": 1}
        return _compile(
            kernels.expert_count_kernel if which == "count" else kernels.expert_place_kernel, types, constexprs, 4
        )
    chosen = kernels.launch(hidden, 2, warp_size=64)
    constexprs = {"HAS_SIDE": True, "ROWS": chosen.rows, "BLOCK": chosen.columns}
    return _compile(kernels.expert_gather_kernel, types, constexprs, chosen.num_warps)


def _swiglu(backward: bool, width: int = HIDDEN) -> TritonObject:
    from hip_ops.ops.weighted_swiglu import triton as kernels

    chosen = kernels.launch(width, 2, backward=backward, warp_size=64)
    types = dict.fromkeys(("rows", "width", "grad_stride", "gate_up_stride", "experts"), "i32") | {"offsets": "*i32"}
    types |= dict.fromkeys(("gate_up", "grad", "out", "d_gate_up"), "*bf16")
    constexprs = {"HAS_OFFSETS": True, "WITH_OUTPUT": True, "ROWS": chosen.rows, "BLOCK": chosen.columns}
    return _compile(
        kernels.weighted_swiglu_backward_kernel if backward else kernels.weighted_swiglu_forward_kernel,
        types,
        constexprs,
        chosen.num_warps,
    )


def grouped_product(
    kind: str, config=None, small: bool = False, experts: int = 16, hidden: int = HIDDEN
) -> TritonObject:
    """Experts of 1024 rows, 16 of ZAYA1-base's by default, by the configuration that a launch chooses if none is given.

    small: all tensors are below 2 GiB. Otherwise those that are views of Megatron's buffers (matrices, main gradients)
    are not.
    """
    from hip_ops.ops.grouped_product import triton_kernels as kernels
    from hip_ops.ops.grouped_product.configs import choose_config

    config = config or choose_config(
        ARCH, kind, 1024, *((hidden, 2 * hidden) if kind == "rows_t" else (2 * hidden, hidden)), experts
    )
    kernel = kernels.grouped_pointer_outer_kernel if kind == "outer" else kernels.grouped_pointer_rows_kernel
    pointers = {name: "*bf16" for name in kernel.arg_names if name.endswith("_pointer")} | (
        {"out_pointer": "*fp32"} if kind == "outer" else {}
    )
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers | {"offsets": "*i32"}
    constexprs = {
        "TRANSPOSED": kind == "rows_t",
        "EVEN_K": True,
        "ACCUMULATE": True,
        "EXPERTS": 1 << (experts - 1).bit_length(),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "XCDS": 8,
    }
    in_a_buffer = ("out_pointer",) if kind == "outer" else ("w_pointer",)
    ranged = [name for name in (*pointers, "offsets") if small or name not in in_a_buffer]
    return _compile(kernel, types, constexprs, small=ranged, **config.launch_options())


def _vocabulary_rows(gradient: bool) -> TritonObject:
    """A chunk of ZAYA1's 262,272 classes, in which no number is divisible by 16 but those of classes."""
    from hip_ops.ops.linear_cross_entropy import triton as kernels

    chosen = kernels.launch(2, 64)
    sizes = dict.fromkeys(("rows", "classes", "row_stride", "first_class", "size", "normalizer_stride"), "i32")
    types = sizes | {"logits": "*bf16", "labels": "*i64", "z_loss": "fp32"}
    constexprs = {"LANES": chosen.lanes, "WIDTH": chosen.width, "BLOCK": chosen.lanes * chosen.width}
    kernel = kernels.row_gradient_kernel if gradient else kernels.row_statistics_kernel
    return _compile(kernel, types, constexprs, chosen.num_warps, unaligned=("rows", "first_class", "normalizer_stride"))


def _vocabulary_exponentials(finish: bool) -> TritonObject:
    """A chunk of ZAYA1's 262,272 classes, in 129 parts of 2048."""
    from hip_ops.ops.linear_cross_entropy import triton as kernels
    from hip_ops.ops.linear_cross_entropy.reference import EXPONENT_PERIOD, MAX_EXPONENT, MAX_ROUNDED

    sizes = dict.fromkeys(
        ("rows", "classes", "row_stride", "first_class", "size", "all_parts", "first_part", "parts"), "i32"
    )
    types = sizes | {"logits": "*bf16", "exponentials": "*bf16", "labels": "*i64", "z_loss": "fp32"}
    unaligned = ("rows", "first_class", "all_parts", "first_part", "parts")
    if finish:
        return _compile(kernels.finish_gradient_kernel, types, {"PARTS": 256, "BLOCK": 1024}, 2, unaligned=unaligned)
    block, warps = kernels.tile(2048, 2, warp_size=64)
    return _compile(
        kernels.exponentials_kernel,
        types,
        {"MAX_EXPONENT": MAX_EXPONENT, "EXPONENT_PERIOD": EXPONENT_PERIOD, "MAX_ROUNDED": MAX_ROUNDED, "BLOCK": block},
        warps,
        unaligned=unaligned,
    )


def _cca_prologue(which: str, heads: int = 8) -> TritonObject:
    """Two groups of ZAYA1's heads, with halos and documents."""
    from hip_ops.ops.cca_prologue import triton as cca_prologue
    from hip_ops.ops.cca_prologue import triton_backward as cca_prologue_backward
    from hip_ops.ops.cca_prologue import triton_forward as cca_prologue_forward
    from hip_ops.ops.cca_prologue import triton_rows as cca_prologue_rows

    chosen = (
        cca_prologue.HeadLaunch(0, 0, 8)
        if which in ("sum", "taps")
        else cca_prologue.launch(which, 128, heads + 2, 2, processors=COMPUTE_UNITS[ARCH], warp_size=64)
    )
    kernel = getattr(
        cca_prologue_forward if which in ("forward", "taps") else cca_prologue_backward, f"cca_prologue_{which}_kernel"
    )
    fp32 = ("rope", "constant", "inverse_norm", "partial", "partial_bias", "partial_temperature", "partial_zero")
    types = {
        name: "i64" if name.startswith("by_") else "i32"
        for name in kernel.arg_names
        if name in cca_prologue_rows.SIZES or name.endswith("_stride")
    }
    types |= dict.fromkeys(("eps", "inverse_eps"), "fp32") | {"starts": "*u8"} | dict.fromkeys(fp32, "*fp32")
    types = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    constexprs = {
        "HEADS": heads,
        "GROUPS": 2,
        "D": 128,
        "ROTARY": 64,
        "DELAYED": 128,
        "HAS_ROPE": True,
        "HAS_HALO": True,
        "HAS_STARTS": True,
        "BLOCK": chosen.rows,
        "STAGES": chosen.stages,
        "OUT": chosen.columns,
        "ZERO_BLOCK": chosen.zero_rows,
        "INPUTS": chosen.inputs or 128,
        "VALUES": 256 // heads,
        "ROWS": cca_prologue.TAPS_ROWS,
        **cca_prologue.SUM_KEYWORDS,
    }
    return _compile(kernel, types, constexprs, chosen.num_warps, chosen.stages, unaligned=cca_prologue_rows.SIZES)


ROUTER_TYPES = dict.fromkeys(("biases", "weights", "d_weights", "statistics", "sums", "slabs"), "*fp32") | {
    "ids": "*i64",
    "forced": "*i64",
    "rows": "i32",
    "unweighted": "i32",
    "eps": "fp32",
}


NOT_SMALL = ("gamma", "b_down", "w_norm", "w1", "b1", "w2", "b2", "w_out", "rows", "unweighted", "eps")


def router_launch(which: str, width: int, warp_size: int):
    """The launch of the kernel `which`: forward, backward or parameters."""
    from hip_ops.ops.router_mlp import triton

    return (triton.parameters_launch if which == "parameters" else triton.launch)(width, warp_size=warp_size)


def router_constants(width: int, classes: int, chosen) -> dict:
    """A router's constants, with a layer before it and one behind; each kernel has some of them."""
    from hip_ops.saved_bytes import router_columns

    sizes = {"R": width, "CLASSES": classes, "COLUMNS": router_columns(classes), "BLOCK": chosen.rows}
    has = {"HAS_PREVIOUS": True, "HAS_FORCED": False, "HAS_D_STATE": True}
    return has | sizes | {"PART": chosen.columns, "TILE": chosen.columns}


def router_mlp(which: str, width: int = 256, classes: int = 17) -> TritonObject:
    """A router, ZAYA1's by default."""
    from hip_ops.ops.router_mlp import triton_kernels

    chosen = router_launch(which, width, warp_size=64)
    kernel = getattr(triton_kernels, f"router_mlp_{which}_kernel")
    types = dict.fromkeys(kernel.arg_names, "*bf16") | ROUTER_TYPES
    constexprs = router_constants(width, classes, chosen)
    loose = ("rows", "unweighted", "biases")
    small = [name for name in kernel.arg_names if name not in (*NOT_SMALL, *constexprs)]  # activations
    return _compile(kernel, types, constexprs, chosen.num_warps, chosen.stages, unaligned=loose, small=small)


CASES: dict[str, Callable[[], TritonObject]] = {
    "rms_norm_forward": lambda: _rms_norm("forward", False),
    "rms_norm_forward_scaled": lambda: _rms_norm("forward", True),
    "rms_norm_backward": lambda: _rms_norm("backward", False),
    "rms_norm_backward_scaled": lambda: _rms_norm("backward", True),
    "rms_norm_sum_scaled": lambda: _rms_norm("sum", True),
    **{
        f"layer_norm_{which}{'_scaled' * scaled}": functools.partial(_rms_norm, which, scaled, centered=True)
        for which in ("forward", "backward", "sum")
        for scaled in (False, True)
    },
    "muon_momentum": lambda: _muon("momentum"),
    "muon_update": lambda: _muon("update"),
    "symmetric_product": lambda: _product(True),
    "general_product": lambda: _product(False),
    **{
        f"cca_prologue_{which}": functools.partial(_cca_prologue, which)
        for which in ("taps", "forward", "norm", "input", "weight", "sum")
    },
    **{
        f"grouped_{kind}{'_small' * small}": functools.partial(grouped_product, kind, small=small)
        for kind in ("rows_t", "rows", "outer")
        for small in (False, True)
    },
    **{
        f"router_mlp_{which}{suffix}": functools.partial(router_mlp, which, classes=classes)
        for suffix, classes in (("", 17), ("_74b", 25))
        for which in ("forward", "backward", "parameters")
    },
    "expert_count": lambda: _expert_rows("count"),
    "expert_place": lambda: _expert_rows("place"),
    "expert_gather": lambda: _expert_rows("gather"),
    "weighted_swiglu": lambda: _swiglu(False),
    "weighted_swiglu_backward": lambda: _swiglu(True),
    "row_statistics": lambda: _vocabulary_rows(False),
    "overwrite_with_gradient": lambda: _vocabulary_rows(True),
    "overwrite_with_exponentials": lambda: _vocabulary_exponentials(False),
    "finish_gradient": lambda: _vocabulary_exponentials(True),
    "rms_norm_forward_scaled_74b": lambda: _rms_norm("forward", True, hidden=OF_74B),
    "rms_norm_backward_scaled_74b": lambda: _rms_norm("backward", True, hidden=OF_74B),
    **{
        f"cca_prologue_{which}_74b": functools.partial(_cca_prologue, which, 16)
        for which in ("taps", "forward", "norm", "input", "weight", "sum")
    },
    **{
        f"expert_{which}_74b": functools.partial(_expert_rows, which, OF_74B, 24)
        for which in ("count", "place", "gather")
    },
    "weighted_swiglu_74b": lambda: _swiglu(False, OF_74B),
    "weighted_swiglu_backward_74b": lambda: _swiglu(True, OF_74B),
    **{
        f"grouped_{kind}_74b": functools.partial(grouped_product, kind, experts=3, hidden=OF_74B)
        for kind in ("rows_t", "rows", "outer")
    },
}

# SPDX-License-Identifier: Apache-2.0
"""Which part of a step adds which gradients to Megatron's fp32 buffer: what each parameter's flag says after a backward pass, and who writes first."""

from __future__ import annotations

# The part whose products add a parameter's gradient, by the first word that its name holds; vectors have a pass of their own.
GRADIENT_PARTS = (
    ("experts", "experts"),
    ("router", "router"),
    ("linear_", "projections"),
    ("embedding", "head"),
    ("output_layer", "head"),
)


def accumulated(model) -> dict[str, int]:
    """Elements of gradients by the part whose kernels add them to the fp32 buffer; "gradients": those added in a pass of their own.

    model: Megatron's chunks after a backward pass that Python ran, before buffers are zeroed again: the replay of a graph sets no flags.
    """
    found: dict[str, int] = {}
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            inside = getattr(parameter, "grad_added_to_main_grad", False)
            part = next((part for word, part in GRADIENT_PARTS if word in name), "gradients") if inside else "gradients"
            found[part] = found.get(part, 0) + parameter.numel()
    return found


def written_first(model) -> frozenset[str]:
    """The parts whose gradients a step's first micro-batch writes, so that nobody zeroes them. model: as above, at any time."""
    from zaya_plugin.optim.gradient_buffers import ResetRest

    buffers = [
        buffer
        for chunk in model
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ()))
    ]
    return frozenset({"experts"} if any(isinstance(buffer.reset, ResetRest) for buffer in buffers) else ())

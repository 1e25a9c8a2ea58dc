# SPDX-License-Identifier: Apache-2.0
"""The parts of a step, and the ranges that tell the profiler which part an operator belongs to.

The ranges exist while a step is traced and at no other time: methods of the model's modules are wrapped in
torch.profiler.record_function, and unwrapped again. Training itself has none.
"""

from __future__ import annotations

from collections.abc import Callable

RANGE = "zaya:"  # what a range's name begins with
STEP = "zaya step"  # around the step that is measured
PASSES = "zaya passes"  # around forward and backward of its micro-batches, which a graph may hold

# Keys and what a reader sees, in the order of a step.
PARTS = {
    "embedding": "embedding",
    "norms": "norms and merges",
    "projections": "projections",
    "prologue": "attention prologue",
    "attention": "attention",
    "router": "router",
    "experts": "experts",
    "head": "head and loss",
    "gradients": "gradient buffers",
    "optimizer": "optimizer",
    "other": "other",
    "communication": "exposed communication",
    "idle": "idle",
}

# Modules by the end of their name in the model, and the part of each of their methods. A range inside another one wins, so that
# what is left of self_attention.forward are the projections. "" is the model itself.
METHODS: dict[str, dict[str, str]] = {
    "": {"_preprocess": "embedding", "_postprocess": "head"},
    "rotary_pos_emb": {"forward": "prologue"},
    "input_affine": {"forward": "norms", "affine_and_norm": "norms"},
    "input_layernorm": {"forward": "norms"},
    "pre_mlp_layernorm": {"forward": "norms"},
    "final_layernorm": {"forward": "norms"},
    "post_attention_residual": {"forward": "norms", "merge_and_norm": "norms"},
    "post_mlp_residual": {"forward": "norms", "merge_and_norm": "norms"},
    "self_attention": {"forward": "projections", "_prologue": "prologue", "_attend": "attention"},
    "mlp": {"forward": "experts"},
    "router": {"project": "router", "forward": "router"},
}


class Ranges:
    """Ranges around methods of objects; `remove` takes them away again."""

    def __init__(self):
        self.wrapped: list[tuple[object, str, object]] = []

    def around(self, owner: object, method: str, part: str) -> None:
        """Wrap `owner.method`, of an object or a module of Python, until `remove`."""
        assert part in PARTS, part
        before = vars(owner).get(method, self)  # self: it came from the class
        setattr(owner, method, ranged(getattr(owner, method), part))
        self.wrapped.append((owner, method, before))

    def around_model(self, model) -> None:
        """Wrap what METHODS names in a GPTModel of ours."""
        for name, module in model.named_modules():
            for method, part in METHODS.get(name.rpartition(".")[2], {}).items():
                if hasattr(module, method):
                    self.around(module, method, part)

    def remove(self) -> None:
        """Everything is as before."""
        for owner, method, before in reversed(self.wrapped):
            if before is self:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
        self.wrapped.clear()


def ranged(function: Callable, part: str) -> Callable:
    """`function` inside a range of `part`."""
    return annotated(function, RANGE + part)


def annotated(function: Callable, name: str) -> Callable:
    """`function` inside a range called `name`."""
    from torch.profiler import record_function

    def inside(*positional, **named):
        with record_function(name):
            return function(*positional, **named)

    return inside

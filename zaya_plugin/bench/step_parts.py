# SPDX-License-Identifier: Apache-2.0
"""The parts of a step, and the ranges that tell the profiler which part an operator belongs to.

The ranges exist only while a step is traced: methods of the model's modules are wrapped in
torch.profiler.record_function and unwrapped again. Training itself has no ranges.
"""

from collections.abc import Callable
from contextlib import ExitStack

RANGE = "zaya:"  # prefix of a range's name
STEP = "zaya step"  # range around the measured step
PASSES = "zaya passes"  # range around forward and backward of its micro-batches, which a graph may hold

# Part -> its title in reports, in the order of a step.
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


def methods() -> dict[str, dict[Callable, str]]:
    """Return the part of each timed method, by the end of its module's name in the model; "" is the model itself.

    Of two nested ranges the inner one counts, so the projections are the rest of self_attention.forward. A norm of
    Transformer Engine has the same method name as ours.
    """
    from zaya_plugin.model.attention import ZayaSelfAttention
    from zaya_plugin.model.gpt_model import ZayaGPTModel, ZayaRotaryEmbedding
    from zaya_plugin.model.moe import ZayaMoELayer
    from zaya_plugin.model.residual import InputAffine, ResidualScaling, ZayaLayerNorm, ZayaRMSNorm
    from zaya_plugin.model.router import ZayaRouter

    norm, merge = (
        dict.fromkeys((ZayaRMSNorm.forward, ZayaLayerNorm.forward), "norms"),
        dict.fromkeys((ResidualScaling.forward, ResidualScaling.merge_and_norm), "norms"),
    )
    attention = ZayaSelfAttention
    return {
        "": {ZayaGPTModel._preprocess: "embedding", ZayaGPTModel._postprocess: "head"},
        "rotary_pos_emb": {ZayaRotaryEmbedding.forward: "prologue"},
        "input_affine": dict.fromkeys((InputAffine.forward, InputAffine.affine_and_norm), "norms"),
        "input_layernorm": norm,
        "pre_mlp_layernorm": norm,
        "final_layernorm": norm,
        "post_attention_residual": merge,
        "post_mlp_residual": merge,
        "self_attention": {
            attention.forward: "projections",
            attention._prologue: "prologue",
            attention._attend: "attention",
        },
        "mlp": {ZayaMoELayer.forward: "experts"},
        "router": dict.fromkeys((ZayaRouter.project, ZayaRouter.forward), "router"),
    }


class Ranges(ExitStack):
    """Ranges around methods of objects, until the `close`."""

    def around(self, owner: object, method: str, part: str) -> None:
        """Wrap `owner.method`, of an object or a Python module."""
        assert part in PARTS, part
        if method in vars(owner):
            self.callback(setattr, owner, method, vars(owner)[method])
        else:  # the class has it
            self.callback(delattr, owner, method)
        setattr(owner, method, annotated(getattr(owner, method), RANGE + part))

    def around_model(self, model) -> None:
        """Wrap the methods of `methods` in a ZayaGPTModel."""
        timed = methods()
        for name, module in model.named_modules():
            for method, part in timed.get(name.rpartition(".")[2], {}).items():
                if hasattr(module, method.__name__):
                    self.around(module, method.__name__, part)


def annotated(function: Callable, name: str) -> Callable:
    """Return `function` inside a range called `name`."""
    from torch.profiler import record_function

    def inside(*positional, **named):
        with record_function(name):
            return function(*positional, **named)

    return inside


def written_first(model) -> frozenset[str]:
    """Return the parts whose gradients are not zeroed, since a step's first micro-batch writes them. model: Megatron's
    chunks.
    """
    from zaya_plugin.optim.gradient_buffers import ZeroOtherGradients

    buffers = [
        buffer
        for chunk in model
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ()))
    ]
    return frozenset({"experts"} if any(isinstance(buffer.reset, ZeroOtherGradients) for buffer in buffers) else ())

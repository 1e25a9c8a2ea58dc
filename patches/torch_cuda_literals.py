# SPDX-License-Identifier: Apache-2.0
"""Literal "cuda" devices in Megatron: `device="cuda"`, `.cuda()`, `.to("cuda")` and type names, in some forty places.

A TorchFunctionMode rewrites them for the thread that runs the loop. It costs about a microsecond a torch call, which
is why the other torch patches are plain attributes.
"""

import torch
from torch.overrides import TorchFunctionMode

from zaya_plugin.patches.registry import MEGATRON, Patch

CPU = torch.device("cpu")


def names_cuda(device) -> bool:
    """Whether an argument is a CUDA device, as text or as torch.device."""
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaLiterals(TorchFunctionMode):
    """Replaces CUDA devices among the arguments of a torch call by the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # clip_grads.py and the optimizers compare with "torch.cuda.FloatTensor" and similar names.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if kwargs:
            if names_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


PATCH = Patch(
    symbol='"cuda" device literals',
    package="torch",
    versions=">=2.6",
    enter=lambda: CudaLiterals().__enter__(),
    reason='device="cuda", .cuda() and torch.cuda type names are literals in schedules, optimizers and clip_grads',
    upstream=MEGATRON + "core/optimizer/clip_grads.py",
)

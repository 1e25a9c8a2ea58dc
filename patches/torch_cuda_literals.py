# SPDX-License-Identifier: Apache-2.0
"""Literal "cuda" devices in Megatron: `device="cuda"`, `.cuda()`, `.to("cuda")` and type names, in some forty places.

A TorchFunctionMode rewrites them for the thread that runs the loop. It costs about a microsecond a torch call, which
is why the other torch patches are plain attributes.
"""

from zaya_plugin.patches.registry import MEGATRON, Patch


def enter_mode() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def names_cuda(device) -> bool:
        if isinstance(device, str):
            return device.startswith("cuda")
        return isinstance(device, torch.device) and device.type == "cuda"

    class CudaLiterals(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                # clip_grads.py and the optimizers compare with "torch.cuda.FloatTensor" and similar names.
                return func(*args).replace("torch.", "torch.cuda.", 1)
            if func is torch.Tensor.to and len(args) > 1 and names_cuda(args[1]):
                args = (args[0], cpu, *args[2:])
            if kwargs:
                if names_cuda(kwargs.get("device")):
                    kwargs = {**kwargs, "device": cpu}
                if kwargs.get("pin_memory"):
                    kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **(kwargs or {}))

    CudaLiterals().__enter__()


PATCH = Patch(
    symbol='"cuda" device literals',
    package="torch",
    versions=">=2.6",
    enter=enter_mode,
    reason='device="cuda", .cuda() and torch.cuda type names are literals in schedules, optimizers and clip_grads',
    upstream=MEGATRON + "core/optimizer/clip_grads.py",
)

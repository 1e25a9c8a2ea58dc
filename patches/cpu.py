# SPDX-License-Identifier: Apache-2.0
"""The patches that torch and Megatron require on a machine without an accelerator, one row a symbol.

Attributes are replaced where that is enough. Literal "cuda" devices, in some forty places of Megatron, are rewritten by
a TorchFunctionMode for the thread that runs the loop; it costs about a microsecond a torch call.
"""

import functools

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


class InOrderStream:
    """A stream whose work is complete when it is submitted; also the event that record_event() returns."""

    def __init__(self, *args, **kwargs):
        self.device = CPU

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return self


STREAM = InOrderStream()


def numpy_counts(stock):
    """Let the all-to-all of expert parallelism take counts that are on the CPU, which `stock` returns as tensors."""

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        moved = stock(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved

    return maybe_move_tensor_to_cpu


TorchPatch = functools.partial(Patch, package="torch", versions=">=2.6")

PATCHES = (
    TorchPatch(
        symbol='"cuda" device literals',
        enter=lambda: CudaLiterals().__enter__(),
        reason='device="cuda", .cuda() and torch.cuda type names are literals in schedules, optimizers and clip_grads',
        upstream=MEGATRON + "core/optimizer/clip_grads.py",
    ),
    TorchPatch(
        symbol="torch.cuda.current_device",
        make=lambda _: lambda: CPU,
        reason="raises without CUDA; Megatron asks it for the device of every buffer (initialize.py, mappings.py, DDP)",
        upstream=MEGATRON + "training/initialize.py",
    ),
    TorchPatch(
        symbol="torch.cuda.current_stream",
        make=lambda _: lambda device=None: STREAM,
        reason="raises without CUDA; DDP and checkpoint writers wait for the current stream",
        upstream=MEGATRON + "training/training.py",
    ),
    TorchPatch(
        symbol="torch.cuda.device_count",
        make=lambda _: lambda: 1,
        reason=(
            "with 0 devices Megatron skips model-parallel groups and seeding, and the checkpoint writer divides by the "
            "number"
        ),
        upstream=MEGATRON + "training/initialize.py",
    ),
    TorchPatch(
        symbol="torch.cuda.get_rng_state",
        make=lambda _: lambda device="cuda": torch.get_rng_state(),
        reason="raises without CUDA; the RNG tracker and checkpoints read it",
        upstream=MEGATRON + "training/checkpointing.py",
    ),
    TorchPatch(
        symbol="torch.cuda.manual_seed",
        make=lambda _: torch.manual_seed,
        reason="queued for a CUDA start that never comes, so the RNG tracker would not seed its model-parallel state",
        upstream=MEGATRON + "core/tensor_parallel/random.py",
    ),
    TorchPatch(
        symbol="torch.cuda.set_device",
        make=lambda _: lambda device: None,
        reason="raises without CUDA; called at start by megatron.training.initialize",
        upstream=MEGATRON + "training/initialize.py",
    ),
    TorchPatch(
        symbol="torch.cuda.Stream",
        make=lambda _: InOrderStream,
        reason="raises without CUDA; training.get_model wraps the model in DDP on a side stream",
        upstream=MEGATRON + "training/training.py",
    ),
    TorchPatch(
        symbol="torch.cuda.synchronize",
        make=lambda _: lambda device=None: None,
        reason="raises without CUDA; CPU work is synchronous already (core/timers.py, checkpoint writers)",
        upstream=MEGATRON + "core/timers.py",
    ),
    Patch(
        symbol="megatron.core.tensor_parallel.random._get_cuda_rng_state",
        make=lambda _: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        reason="starts CUDA and reads its default generator; needed by recomputation and the RNG tracker",
        upstream=MEGATRON + "core/tensor_parallel/random.py",
    ),
    Patch(
        symbol="megatron.core.tensor_parallel.random._set_cuda_rng_state",
        make=lambda _: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        reason="queued for a CUDA start that never comes; recomputation would draw other random numbers",
        upstream=MEGATRON + "core/tensor_parallel/random.py",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        make=numpy_counts,
        reason="leaves counts that are on the CPU as tensors, which the all-to-all of expert parallelism cannot take",
        upstream=MEGATRON + "core/transformer/moe/moe_utils.py",
    ),
    Patch(
        symbol="megatron.training.arguments.get_device_arch_version",
        make=lambda _: lambda: 10,  # from this generation on Megatron asks for no CUDA_DEVICE_MAX_CONNECTIONS
        reason="argument validation with tensor or context parallelism reads the properties of GPU 0",
        upstream=MEGATRON + "training/arguments.py",
    ),
    Patch(
        symbol="megatron.training.training.initialize_megatron",
        make=lambda stock: functools.partial(stock, allow_no_cuda=True),
        reason="asserts CUDA unless allow_no_cuda is given, and pretrain() has no argument for it",
        upstream=MEGATRON + "training/training.py",
    ),
)

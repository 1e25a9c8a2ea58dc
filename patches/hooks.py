# SPDX-License-Identifier: Apache-2.0
"""Symbols of a host that a run replaces for its own time, because what takes their place carries the run's state.

Static changes are patches, one file each beside this one. Here the caller passes the function and a `with` restores the symbol:

    with wrapped([("megatron.training.training.save_checkpoint", save_and_prune)]):
        pretrain(...)  # calls save_and_prune(Megatron's save_checkpoint, iteration, ...)

HOOKS says why each symbol is replaced, and when that can end; `zaya doctor` prints it. A symbol that is not listed, and a host outside
the range of versions, is refused. Nothing here imports a host before a `with` is entered.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from zaya_plugin import compat

TRAINING = "megatron.training.training."
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/"
PRIMUS = "https://github.com/AMD-AGI/Primus/blob/main/primus/core/patches/patch_runner.py"
CALLBACKS = "pretrain() takes a list of callbacks"
LOOP = ">=0.19.0rc0,<" + compat.FIRST_UNSUPPORTED  # what `zaya train` alone replaces, whose pretrain() is that of 0.19
BUFFERS = MEGATRON + "core/distributed/param_and_grad_buffer.py"
OWN_OPTIMIZER = "a registered optimizer can be a DistributedOptimizer (optimizer/emerging_optimizers.py)"


@dataclass(frozen=True)
class Hook:
    """symbol: dotted path; reason: why it is replaced; until: when the replacement can go; versions: of megatron.core, "" for any."""

    symbol: str
    reason: str
    until: str
    upstream: str = MEGATRON + "training/training.py"
    versions: str = compat.SUPPORTED

    @property
    def fits(self) -> bool:
        """Whether the installed megatron.core lies in the range. Not asked where any version will do: Primus chooses its Megatron late."""
        if not self.versions:
            return True
        version = compat.core_version()
        return version is not None and SpecifierSet(self.versions, prereleases=True).contains(version)


def _hook(symbol: str, reason: str, until: str = CALLBACKS, **more) -> tuple[str, Hook]:
    return symbol, Hook(symbol, reason, until, **more)


_OPTIMIZER = MEGATRON + "core/optimizer/__init__.py"
_SHARDED = MEGATRON + "core/optimizer/distrib_optimizer.py"
HOOKS: dict[str, Hook] = dict(
    (
        _hook(
            TRAINING + "training_log",
            "one line and one row of metrics a step, without waiting for the device",
            versions=LOOP,
        ),
        _hook(
            TRAINING + "evaluate_and_print_results", "validation a domain at a time, reported as metrics", versions=LOOP
        ),
        _hook(TRAINING + "save_checkpoint", "pending metrics are written before, older checkpoints go after a save"),
        _hook(TRAINING + "load_checkpoint", "a stage begins with the weights of the one before, at step 0"),
        _hook(TRAINING + "train", "validation before the first step of a stage", versions=LOOP),
        _hook(TRAINING + "train_step", "zaya bench observes single steps", versions=LOOP),
        _hook(TRAINING + "get_megatron_optimizer", "Muon and AdamW; for zaya bench none", OWN_OPTIMIZER),
        _hook(TRAINING + "finalize_model_grads", "counts of the routers balance the experts after each step"),
        _hook(
            TRAINING + "logical_and_across_model_parallel_group",
            "our optimizer's step returns the same on all ranks; asking again waits for the device",
            "train_step does not ask where the optimizer says so",
            versions=LOOP,
        ),
        _hook(
            TRAINING + "reduce_max_stat_across_model_parallel_group",
            "the norm of the gradients is the same on all ranks; asking again waits for the device",
            "train_step does not ask where the optimizer says so",
            versions=LOOP,
        ),
        _hook(
            TRAINING + "get_signal_handler",
            "ranks agree on a signal without waiting for the device in every step",
            "the handler's all-gather is asynchronous",
            versions=LOOP,
        ),
        _hook("megatron.core.optimizer.Adam", "builds Muon with AdamW", OWN_OPTIMIZER, upstream=_OPTIMIZER),
        _hook(
            "megatron.core.optimizer.DistributedOptimizer", "shards whole matrices", OWN_OPTIMIZER, upstream=_OPTIMIZER
        ),
        _hook(
            "megatron.core.optimizer.ChainedOptimizer",
            "one norm and one step without waiting for the device",
            OWN_OPTIMIZER,
            upstream=_OPTIMIZER,
        ),
        _hook(
            "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER",
            "our optimizer keeps its step in the parameter groups, as apex does",
            OWN_OPTIMIZER,
            upstream=_OPTIMIZER,
        ),
        _hook(
            "megatron.core.optimizer.distrib_optimizer.Adam",
            "0.16 accepts only an instance of this class",
            "Primus pins 0.17 or later",
            upstream=_SHARDED,
        ),
        _hook(
            "megatron.core.optimizer.distrib_optimizer.param_group_identifier_keys",
            "a stage's learning rates differ from those of the stage before",
            "saved groups are matched by names",
            upstream=_SHARDED,
        ),
        _hook(
            "megatron.core.optimizer.optimizer.param_group_identifier_keys",
            "a stage's learning rates differ from those of the stage before",
            "saved groups are matched by names",
            upstream=MEGATRON + "core/optimizer/optimizer.py",
        ),
        _hook(
            "primus.core.patches.patch_runner.error_rank_0",
            "Primus reports a patch that failed as a line of its log alone",
            "Primus keeps a list of failed patches",
            upstream=PRIMUS,
            versions="",
        ),
        _hook(
            "torch.utils.deterministic.fill_uninitialized_memory",
            "with cluster.deterministic: filling every new tensor with NaN doubles the launches of a step",
            "it is off by default",
            upstream="https://docs.pytorch.org/docs/stable/deterministic.html",
            versions="",
        ),
    )
)
# Attributes of instances that a run builds and that end with it; `replaced` and `wrapped` do not know them.
INSTANCES: dict[str, Hook] = dict(
    (
        _hook(
            "megatron.core.models.gpt.GPTModel().__class__",
            "it gets the head and loss of zaya_plugin.model.loss, its embedding and RoPE get our classes too; also in a host that builds the model",
            "a spec names the model's head",
            upstream=MEGATRON + "core/models/gpt/gpt_model.py",
        ),
        _hook(
            "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer().reset",
            "blocks of experts that are written first are not zeroed (zaya_plugin.optim.written_gradients)",
            "DDP asks a parameter whether its gradient is written first",
            upstream=BUFFERS,
        ),
        _hook(
            "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer().scale_gradients",
            "the optimizer multiplies by the scale as it reads the gradients (zaya_plugin.optim.deferred_scale)",
            "DDP hands the scale to the optimizer",
            upstream=BUFFERS,
        ),
        _hook(
            "megatron.core.distributed.DistributedDataParallel().expert_parallel_bucket_groups",
            "a layer's buckets of experts are one group (zaya_plugin.parallel.layer_groups)",
            "DDP groups buckets by layer",
            upstream=MEGATRON + "core/distributed/distributed_data_parallel.py",
        ),
        _hook(
            "megatron.core.optimizer.MegatronOptimizer().init_state_fn",
            "matrices of Muon get no second moment (zaya_plugin.optim.build)",
            OWN_OPTIMIZER,
            upstream=MEGATRON + "core/optimizer/optimizer.py",
        ),
    )
)


def replaced(values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Gives symbols other values within a `with`.

    Raises:
        KeyError: a symbol is not in HOOKS.
        ImportError: megatron.core is outside the range that a hook is written for. Nothing is replaced then.
    """
    return _changed([(symbol, lambda _, value=value: value) for symbol, value in values.items()])


def wrapped(functions: Iterable[tuple[str, Callable]]) -> AbstractContextManager[None]:
    """Replaces functions within a `with`: each gets the function whose place it takes as its first argument.

    Of two for one symbol the later one wraps the earlier one. Raises as `replaced`.
    """
    return _changed([(symbol, functools.partial(functools.partial, function)) for symbol, function in functions])


@contextmanager
def _changed(makers: list[tuple[str, Callable[[Any], Any]]]) -> Iterator[None]:
    """makers: symbol, and what makes its new value of the old one."""
    for symbol, _ in makers:
        if not HOOKS[symbol].fits:
            raise ImportError(
                f"hook of {symbol}: megatron.core {compat.core_version()} is installed. Allowed: {HOOKS[symbol].versions}. "
                "Fix: install a version in that range"
            )
    before = []
    try:
        for symbol, make in makers:
            module, _, name = symbol.rpartition(".")
            holder = importlib.import_module(module)
            before.append((holder, name, getattr(holder, name)))
            setattr(holder, name, make(before[-1][2]))
        yield
    finally:
        for holder, name, value in reversed(before):
            setattr(holder, name, value)


_for_good: list[ExitStack] = []  # a context that nothing refers to would restore its symbols


def install(functions: Iterable[tuple[str, Callable]]) -> Callable[[], None]:
    """As `wrapped`, for the rest of the process: in a host that is not ours no `with` surrounds the run. Returns what restores all."""
    stack = ExitStack()
    stack.enter_context(wrapped(functions))
    _for_good.append(stack)
    return stack.close


def describe() -> list[Hook]:
    """All hooks, for `zaya doctor`."""
    return [*HOOKS.values(), *INSTANCES.values()]

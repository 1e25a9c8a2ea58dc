# SPDX-License-Identifier: Apache-2.0
"""Replaces symbols of a host during a run, where the replacement carries the run's state, and restores them afterwards.

Static changes are patches, one file each next to this one. For a hook the caller passes the function, and a `with`
restores the symbol:

    with wrapped([("megatron.training.training.save_checkpoint", save_and_prune)]):
        pretrain(...)  # calls save_and_prune(Megatron's save_checkpoint, iteration, ...)

HOOKS states why each symbol is replaced and when the replacement can go; `zaya doctor` prints it. A symbol that is not
in HOOKS raises KeyError; a host outside the range of versions raises ImportError. This module imports no host before a
`with` is entered.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from zaya_plugin import compat
from zaya_plugin.ground.errors import message

TRAINING = "megatron.training.training."
SAVE = "megatron.core.dist_checkpointing.save"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/"
TRAINING_LOOP = MEGATRON + "training/training.py"
PRIMUS = "https://github.com/AMD-AGI/Primus/blob/main/primus/core/patches/patch_runner.py"
CALLBACKS = "pretrain() takes a list of callbacks"
# For symbols that only `zaya train` replaces, which requires pretrain() of 0.19.
LOOP = ">=0.19.0rc0,<" + compat.FIRST_UNSUPPORTED
BUFFERS = MEGATRON + "core/distributed/param_and_grad_buffer.py"
DDP_SOURCE = MEGATRON + "core/distributed/distributed_data_parallel.py"
OWN_OPTIMIZER = "a registered optimizer can be a DistributedOptimizer (optimizer/emerging_optimizers.py)"


@dataclass(frozen=True, kw_only=True)
class HostChange:
    """A changed symbol of a host, with what `zaya doctor` prints about it.

    Attributes:
        symbol: dotted path.
        reason: why it is changed.
        until: the condition under which the change can go.
        upstream: link to the code that makes it necessary.
        package: distribution that the change is written for; versions: the range of its versions, "" for any.
    """

    symbol: str
    reason: str
    until: str
    upstream: str
    package: str = "megatron-core"
    versions: str = compat.SUPPORTED

    @property
    def installed(self) -> Version | None:
        """The installed version of the package."""
        return compat.core_version() if self.package == "megatron-core" else Version(metadata.version(self.package))

    @property
    def fits(self) -> bool:
        """Whether the installed version is in the range. With any version allowed it is not read, since Primus chooses
        its Megatron late.
        """
        if not self.versions:
            return True
        return self.installed is not None and SpecifierSet(self.versions, prereleases=True).contains(self.installed)

    def require(self) -> None:
        """Raise ImportError unless `fits`."""
        if not self.fits:
            raise ImportError(
                message(
                    self.package,
                    self.installed,
                    problem=f"the change of {self.symbol} is not written for this version",
                    allowed=self.versions,
                    fix=f"pip install '{self.package}{self.versions}'",
                )
            )


def holder_of(symbol: str) -> tuple[Any, str]:
    """The module or class that holds `symbol`, imported, and the symbol's name in it."""
    path, _, name = symbol.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        outer, inner = holder_of(path)  # path is a class
        return getattr(outer, inner), name


def _hook(
    symbol: str, reason: str, until: str = CALLBACKS, upstream: str = TRAINING_LOOP, **more
) -> tuple[str, HostChange]:
    return symbol, HostChange(symbol=symbol, reason=reason, until=until, upstream=upstream, **more)


_OPTIMIZER = MEGATRON + "core/optimizer/__init__.py"
_SHARDED = MEGATRON + "core/optimizer/distrib_optimizer.py"
HOOKS: dict[str, HostChange] = dict(
    (
        _hook(
            TRAINING + "training_log",
            "one line and one row of metrics a step, without waiting for the device",
            versions=LOOP,
        ),
        _hook(
            TRAINING + "evaluate_and_print_results",
            "validation of each domain by itself, reported as metrics; in a guest: its heartbeat",
        ),
        _hook(
            TRAINING + "save_checkpoint_and_time",
            "a save copies the rank's state during the next step, and a process of its own writes it",
            "Megatron's asynchronous save has no collective, writes a checkpoint of one step, and survives its writer",
            versions=LOOP,
        ),
        _hook(
            TRAINING + "setup_model_and_optimizer",
            "pretrain_gpt.py builds its own model, with another head, loss, embedding gradient and RoPE",
            "a spec names the model's class",
            versions=LOOP,
        ),
        _hook(
            "gpt_builders.GPTModel",
            "Primus' own stage builds its own model, with another head, loss, embedding gradient and RoPE",
            "Primus pins 0.19 or later",
            upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.0/gpt_builders.py",
            versions=f">={compat.OLDEST},<0.19",
        ),
        _hook(TRAINING + "save_checkpoint", "in a guest: older checkpoints are removed after a save"),
        _hook(
            SAVE,
            "a checkpoint gets checksums, a manifest and its name once all its files are durable",
            "Megatron commits a checkpoint by one rename, with a checksum of each file",
            upstream=MEGATRON + "core/dist_checkpointing/serialization.py",
        ),
        _hook(
            TRAINING + "load_checkpoint",
            "a stage starts from the weights of the previous stage, at step 0; after a load ranks compare their bits",
        ),
        _hook(
            TRAINING + "train",
            "validation before the first step of a stage; the files of the checkpoints are planned; in a guest: its "
            "heartbeat",
        ),
        _hook(
            TRAINING + "dummy_train_step",
            "a step of data.skip_steps reads its batches on every rank, and the learning rate advances",
            "Megatron's reads them on one rank of a tensor group, and leaves the schedule behind",
            versions=LOOP,
        ),
        _hook(TRAINING + "train_step", "`zaya bench` observes single steps; in a guest: its heartbeat"),
        _hook(
            TRAINING + "get_megatron_optimizer",
            "builds Muon and AdamW; for `zaya bench --forward-backward-only` no optimizer",
            OWN_OPTIMIZER,
        ),
        _hook(TRAINING + "finalize_model_grads", "counts of the routers balance the experts after each step"),
        _hook(
            TRAINING + "logical_and_across_model_parallel_group",
            "our optimizer's step returns the same value on all ranks; a second reduction would wait for the device",
            "train_step skips the reduction where the optimizer declares that it is not needed",
            versions=LOOP,
        ),
        _hook(
            TRAINING + "reduce_max_stat_across_model_parallel_group",
            "the norm of the gradients is the same on all ranks; a second reduction would wait for the device",
            "train_step skips the reduction where the optimizer declares that it is not needed",
            versions=LOOP,
        ),
        _hook(
            TRAINING + "get_signal_handler",
            "ranks agree on a signal, and no step waits for the device",
            "the handler's all-gather is asynchronous",
            versions=LOOP,
        ),
        _hook("megatron.core.optimizer.Adam", "builds Muon with AdamW", OWN_OPTIMIZER, upstream=_OPTIMIZER),
        _hook(
            "megatron.core.optimizer.DistributedOptimizer", "shards whole matrices", OWN_OPTIMIZER, upstream=_OPTIMIZER
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
            "primus.core.patches.patch_runner.error_rank_0",
            "Primus reports a patch that failed only as a line of its log",
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
# Attributes of objects that a run builds, by class and attribute; they end with the run. `set_attribute` sets them.
_ONE_GROUP = "puts a layer's buckets of experts into one group (zaya_plugin.optim.gradient_buffers)"
INSTANCES: dict[str, HostChange] = {
    ".".join(symbol.split(".")[-2:]): change
    for symbol, change in (
        _hook(
            "torch.nn.Parameter().zero_out_wgrad",
            "DDP must not add the embedding's gradient, which is in the main gradient already "
            "(zaya_plugin.model.gpt_model)",
            "GPTModel leaves it to the head",
            upstream=MEGATRON + "core/models/gpt/gpt_model.py",
        ),
        _hook(
            "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer().reset",
            "skips blocks of experts that the first micro-batch overwrites (zaya_plugin.optim.gradient_buffers)",
            "DDP lets a parameter declare that its first gradient is written, not added",
            upstream=BUFFERS,
        ),
        _hook(
            "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer().scale_gradients",
            "the optimizer multiplies by the scale as it reads the gradients (zaya_plugin.optim.chained)",
            "DDP passes the scale to the optimizer",
            upstream=BUFFERS,
        ),
        _hook(
            "megatron.core.distributed.DistributedDataParallel().expert_parallel_bucket_groups",
            _ONE_GROUP,
            "DDP groups buckets by layer",
            upstream=DDP_SOURCE,
        ),
        _hook(
            "megatron.core.distributed.DistributedDataParallel().param_to_bucket_group",
            f"{_ONE_GROUP}; a parameter's hook finds the new group",
            "DDP groups buckets by layer",
            upstream=DDP_SOURCE,
        ),
        _hook(
            "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup().next_param_gather_bucket_group",
            f"{_ONE_GROUP}; the gather of one group starts that of the next",
            "DDP groups buckets by layer",
            upstream=BUFFERS,
        ),
        _hook(
            "megatron.core.optimizer.MegatronOptimizer()._filter_and_reorder_param_groups",
            "a run may resume with other learning rates and multipliers (zaya_plugin.optim.muon)",
            "saved groups are matched by their parameters",
            upstream=MEGATRON + "core/optimizer/optimizer.py",
        ),
        _hook(
            "megatron.core.optimizer.MegatronOptimizer().sharded_state_dict",
            "a run may resume with another number of parameter groups (zaya_plugin.optim.factory)",
            "saved groups are matched by their parameters",
            upstream=MEGATRON + "core/optimizer/optimizer.py",
        ),
        _hook(
            "megatron.core.optimizer.MegatronOptimizer().init_state_fn",
            "matrices of Muon get no second moment (zaya_plugin.optim.factory)",
            OWN_OPTIMIZER,
            upstream=MEGATRON + "core/optimizer/optimizer.py",
        ),
        _hook(
            "megatron.core.optimizer.MegatronOptimizer().tp_group",
            "0.16 leaves shards of experts out of the gradients' norm (zaya_plugin.compat)",
            "Primus pins 0.17 or later",
            upstream="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.0/megatron/core/optimizer/optimizer.py",
        ),
    )
}


def replaced(values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Set symbols to other values within a `with`.

    Raises:
        KeyError: a symbol is not in HOOKS.
        ImportError: megatron.core is outside the range of a hook. In both cases nothing is replaced.
    """
    return _changed([(symbol, lambda _, value=value: value) for symbol, value in values.items()])


def wrapped(functions: Iterable[tuple[str, Callable]]) -> AbstractContextManager[None]:
    """Replace functions within a `with`; each new function gets the replaced one as its first argument.

    Of two functions for one symbol the later one wraps the earlier one. Raises as `replaced`.
    """
    return _changed([(symbol, functools.partial(functools.partial, function)) for symbol, function in functions])


@contextmanager
def _changed(makers: list[tuple[str, Callable[[Any], Any]]]) -> Iterator[None]:
    """Replace symbols within a `with`. makers: each symbol, and the function that returns its new value from the old
    one.
    """
    for symbol, _ in makers:
        HOOKS[symbol].require()
    before = []
    try:
        for symbol, make in makers:
            holder, name = holder_of(symbol)
            before.append((holder, name, getattr(holder, name)))
            setattr(holder, name, make(before[-1][2]))
        yield
    finally:
        for holder, name, value in reversed(before):
            setattr(holder, name, value)


def set_attribute(symbol: str, instance: Any, value: Any) -> None:
    """Set the attribute of `instance` that the row `symbol` of INSTANCES names, such as "GPTModel().__class__".

    Raises:
        KeyError: no such row.
        ImportError: the installed version is outside the row's range. In both cases nothing is set.
    """
    INSTANCES[symbol].require()
    setattr(instance, symbol.rpartition(".")[2], value)


_for_good: list[ExitStack] = []  # without a reference a context would be closed and restore its symbols


def install(functions: Iterable[tuple[str, Callable]]) -> Callable[[], None]:
    """Replace functions as `wrapped` does, for the rest of the process, in a host whose run no `with` can surround.

    Returns the function that restores the symbols.
    """
    stack = ExitStack()
    stack.enter_context(wrapped(functions))
    _for_good.append(stack)
    return stack.close


def describe() -> list[HostChange]:
    """Return all hooks, for `zaya doctor`."""
    return [*HOOKS.values(), *INSTANCES.values()]

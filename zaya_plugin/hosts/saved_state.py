# SPDX-License-Identifier: Apache-2.0
"""Saves of `zaya train`: Megatron's state of a run, and when it is saved.

Takes the place of Megatron's save_checkpoint_and_time, which synchronises weights, empties the allocator's cache and
builds descriptions of all tensors at every save. This module builds that description once, before the first step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import checkpointing, get_args
from torch import Tensor

from zaya_plugin.checkpoint import places
from zaya_plugin.checkpoint.on_disk import MANIFEST_MARK
from zaya_plugin.checkpoint.saver import BUSY, Saver
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import RunEndedError, message
from zaya_plugin.ground.parent_death import GRACE, GRACE_SECONDS
from zaya_plugin.optim.sharding.distributed import WITHOUT_TENSORS, MuonDistributedOptimizer

SECONDS_FOR_A_SAVE = 60.0  # of a run that an error ends


class SavedState:
    """The saves of one rank.

    Attributes:
        saver: writes them.
        waits: save=sync: training waits until a checkpoint is complete.
        ends_at: the time (monotonic) at which the run will be killed, once it was asked to end.
    """

    def __init__(self, recipe: Recipe, saver: Saver):
        self.saver = saver
        self.waits = recipe.checkpoint.save == "sync"
        self.train_iters = recipe.stage.train_iters
        self.interval = recipe.checkpoint.save_interval
        self.ends_at: float | None = None
        self._left_out: tuple | None = None
        self._last: tuple | None = None
        self._watched: list[int] = []
        self._by_model = False  # the optimizer's state is described by the model's, as Megatron's without shards is

    # The state

    @staticmethod
    def state(model, optimizer, scheduler, iteration: int, flops, data_iterator=None) -> dict:
        """Return Megatron's sharded state. model: [] for the state without model and optimizer's tensors."""
        args = get_args()
        metadata = checkpointing._build_sharded_state_dict_metadata(args)
        content = {**checkpointing._clean_metadata_for_serialization(metadata), MANIFEST_MARK: True}
        if not model:
            metadata[WITHOUT_TENSORS] = True
        state = checkpointing.generate_state_dict(
            args,
            unwrap_model(model),
            optimizer,
            scheduler,
            checkpointing.get_rng_state(
                args.ckpt_format,
                parallel_state.get_tensor_model_parallel_group(),
                parallel_state.get_pipeline_model_parallel_group(),
            ),
            iteration=iteration,
            optim_sd_kwargs=dict(metadata=metadata),
            model_sd_kwargs=dict(metadata=metadata),
            rerun_state=get_rerun_state_machine().state_dict(data_iterator, args.ckpt_format),
        )
        state["num_floating_point_operations_so_far"] = flops
        state["content_metadata"] = content
        return state

    def prepare(self, model, optimizer, scheduler) -> None:
        """Plan the files and allocate the memory, before the first step. A collective."""
        optimizer.announce_changes(self.saver.before_change)
        self._by_model = not all(isinstance(part, MuonDistributedOptimizer) for part in optimizer.parts)
        on_device = any(parameter.is_cuda for parameter in model[0].parameters())
        self.saver.prepare(self.state(model, optimizer, scheduler, 0, 0.0), pin=on_device)
        self._watched = [tensor.data_ptr() for tensor in _tensors(model, optimizer)]

    @property
    def last_step(self) -> int:
        """The step of the last save that was begun, 0 without one."""
        return 0 if self._last is None else self._last[0]

    def leave_from(self, step: int) -> None:
        """Give the save in flight up if it is of `step` or a later one, or wait for it. All ranks must call it."""
        if self.last_step >= step:
            self.saver.abandon()
        else:
            self.saver.wait(SECONDS_FOR_A_SAVE)

    # When

    def save(self, iteration: int, model, optimizer, scheduler, flops, data_iterator=None) -> None:
        """Save, unless the save before is still being written; the last save of a run waits for it instead."""
        call = iteration, model, optimizer, scheduler, flops, data_iterator
        at_interval = self.interval and iteration % self.interval == 0 and iteration != self.train_iters
        if at_interval and self.ends_at is None and not self.waits:
            if self.saver.agreed_state == BUSY:
                self._left_out = call
                self.saver.report(
                    f"WARNING: no checkpoint at step {iteration}: the one before is still being written and needs "
                    f"{self.saver.seconds_left:.0f} s more. A longer checkpoint.save_interval avoids this"
                )
                return
        elif not self._make_room():
            return
        self._start(*call)
        if self.waits:
            self.saver.wait()

    def _start(self, iteration: int, model, optimizer, scheduler, flops, data_iterator) -> None:
        self._left_out, self._last = None, (iteration, model, optimizer, scheduler, flops, data_iterator)
        args = get_args()
        start = time.perf_counter()
        if self._watched != [tensor.data_ptr() for tensor in _tensors(model, optimizer)]:
            raise RuntimeError(
                message(
                    "checkpoint",
                    problem="a tensor of the model or of the optimizer was replaced after the start, so a checkpoint "
                    "would hold the old tensor; the checkpoints before are intact",
                    allowed="tensors that are changed in place",
                    fix="in code of your own that replaces a tensor, copy into it (`tensor.copy_`); without such code "
                    "report this with the log. The same command resumes from the last checkpoint",
                )
            )
        state = self.state(model if self._by_model else [], optimizer, scheduler, iteration, flops, data_iterator)
        self.saver.save(iteration, state, getattr(args, "zaya", {}))
        self.saver.waited = time.perf_counter() - start

    def _make_room(self) -> bool:
        """Wait for the save in flight, or give it up where the time is too short. Return whether there is time for
        another. All ranks must call it.
        """
        if self.ends_at is None:
            self.saver.wait()
            return True
        # the slowest rank and the earliest end decide
        old, new, rest = _largest(self.saver.seconds_left, self.saver.seconds_for_one, -self.rest())
        rest = -rest
        if old + new <= rest or old == 0:
            (in_flight,) = _largest(not self.saver.wait(rest))
            return not in_flight
        if new <= rest:
            self.saver.report(f"the save in flight is given up for one of this step: {rest:.0f} s are left")
            self.saver.abandon()
            return True
        self.saver.report(f"no checkpoint of this step: the save in flight takes the {rest:.0f} s that are left")
        self.saver.wait(rest)
        return False

    def end_is_near(self, since: float) -> None:
        """Note that the run was asked to end (SIGTERM) at this time."""
        self.ends_at = since + float(os.environ.get(GRACE) or GRACE_SECONDS)

    def rest(self) -> float:
        """Seconds until the run is killed."""
        return float("inf") if self.ends_at is None else max(0.0, self.ends_at - time.monotonic() - 2)

    def finish(self, iteration: int) -> None:
        """Wait for the last save.

        Raises:
            RunEndedError: it has failed.
        """
        if self._left_out is not None and self._left_out[0] == iteration and self._make_room():
            self._start(*self._left_out)
        if self._last is None:
            return
        if self._last_failed() and self.ends_at is None:  # on any rank; there is no next interval to try it again
            self.saver.abandon()
            self._start(*self._last)
            if not self._last_failed():
                return
        if self.saver.state == BUSY:
            self.saver.report("WARNING: the last checkpoint was not complete when the time was over")
        elif self.saver.failed == self._last[0]:
            raise RunEndedError(
                message(
                    str(self.saver.directory),
                    problem=f"the last checkpoint, of step {self._last[0]}, was not written; a WARNING above has the "
                    f"reason ({places.at(self.saver.directory).free()})",
                    fix="remove the cause, then the same command with resume=auto continues from the checkpoint before",
                )
            )

    def _last_failed(self) -> bool:
        """Wait for the last save, and return whether it has failed on any rank. All ranks must call it."""
        self.saver.wait(self.rest())
        (failed,) = _largest(self.saver.failed == self._last[0])
        return bool(failed)


def _largest(*values: float) -> list[float]:
    """Return the largest of each value over all ranks. A collective."""
    largest = torch.tensor(values, dtype=torch.float64)
    if torch.distributed.get_backend() != "gloo":
        largest = largest.to(torch.cuda.current_device())
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest.tolist()


def _tensors(model, optimizer) -> Iterator[Tensor]:
    """Yield the tensors of which checkpoints are copies."""
    for chunk in unwrap_model(model):
        yield from chunk.buffers()
    for part in optimizer.parts:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (value for value in part.optimizer.state[parameter].values() if torch.is_tensor(value))

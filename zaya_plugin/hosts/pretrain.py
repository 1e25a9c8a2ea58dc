# SPDX-License-Identifier: Apache-2.0
"""`zaya train` on `megatron.training`: recipe -> arguments -> `pretrain`, with our model, data, loss and hooks.

The loop, the schedules, the samplers and the checkpoints are Megatron's. pretrain() takes no callbacks in 0.19, so some
module-level functions are replaced during a run (zaya_plugin.patches.hooks). What every host does with a recipe is in
adapter.py; this file has reports, saves during the training, guards and the end of a run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.training import get_args, get_timers, get_tokenizer, training
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from zaya_plugin.checkpoint import restore, starts
from zaya_plugin.checkpoint.saver import Saver
from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.dataset import mean_loss
from zaya_plugin.data.prompts import read_prompts
from zaya_plugin.data.sources import DataSources
from zaya_plugin.ground import phases
from zaya_plugin.ground.errors import NotFiniteError, RunEndedError, message
from zaya_plugin.ground.exit_codes import ENDED_EARLY, ROLL_BACK
from zaya_plugin.hosts import loader_processes, start_waits
from zaya_plugin.hosts.adapter import Adapter, forward_step
from zaya_plugin.hosts.measured_steps import graph_warm_up
from zaya_plugin.hosts.routing import RoutingRecord
from zaya_plugin.hosts.samples import continuations
from zaya_plugin.hosts.saved_state import SavedState
from zaya_plugin.hosts.stage_model import parse_arguments
from zaya_plugin.optim.balancing import RouterStatistics
from zaya_plugin.optim.chained import NonFiniteGradientsError
from zaya_plugin.parallel import registered_buffers
from zaya_plugin.patches import hooks
from zaya_plugin.patches.hooks import TRAINING
from zaya_plugin.training import heartbeat, loss_guard
from zaya_plugin.training.kernels import kernel_lines, warm_up_kernels
from zaya_plugin.training.lifecycle import Lifecycle
from zaya_plugin.training.loss_guard import LossGuard, RollBackError, Spike
from zaya_plugin.training.metrics import Reporter, Step, memory_gib
from zaya_plugin.training.step_queue import AgreedSignal, StepClock, StepQueue

# With deterministic algorithms torch fills every new tensor with NaN, to show reads of uninitialised memory; this
# doubles a step's launches.
FILL_OF_NEW_MEMORY = "torch.utils.deterministic.fill_uninitialized_memory"


def run(
    recipe: Recipe,
    sources: DataSources,
    lifecycle: Lifecycle,
    reporter: Reporter,
    build_optimizer: Callable | None = None,
) -> int:
    """Train the recipe; return 0 after the last step or at exit_interval,
    or ENDED_EARLY when a signal has ended the run.

    Args:
        recipe: validated; patches are applied already.
        sources: tokenizer and data sets of the recipe.
        lifecycle: resumption, and the removal of old checkpoints.
        reporter: gets every step and validation.
        build_optimizer: called in place of `Adapter.optimizer`.
    """
    args = parse_arguments(megatron_arguments(recipe, sources.tokenizer_arguments()))
    trainer = Trainer(recipe, args, lifecycle, sources, reporter)
    trainer.check()
    registered_buffers.end_with_release()
    phases.begin(f"connecting {args.world_size} ranks" if args.world_size > 1 else "setting up Megatron")
    try:
        with (
            hooks.replaced({FILL_OF_NEW_MEMORY: False} if recipe.cluster.deterministic else {}),
            hooks.wrapped(trainer.hooks(build_optimizer)),
        ):
            training.pretrain(
                pretrain_cfg_container_from_args(args),
                trainer.datasets,
                ModelType.encoder_or_decoder,
                trainer.routing.around(forward_step) if trainer.routing else forward_step,
                model_provider=trainer.model,
            )
    except SystemExit as left:  # signals and exit_interval leave pretrain() this way, after saving
        if left.code:  # as Megatron's rerun machine does
            trainer.saved.finish(trainer.step)
            raise
    except RollBackError as error:
        # The weights after the step before gave the first spike.
        first = error.first_step - 1
        trainer.saved.leave_from(first)
        if args.rank == 0:
            lifecycle.put_aside_from(first)
        raise loss_guard.roll_back(error.first_step, trainer.step, lifecycle.last_good()) from None
    except NonFiniteGradientsError as error:
        trainer.saved.leave_from(trainer.step + 1)  # the save in flight is of a good step
        step = args.curr_iteration + 1
        text = f"step {step}: {error} {lifecycle.last_good()}."
        raise as_guard(recipe, NonFiniteGradientsError(text), step) from error
    except NonFiniteLossError as error:
        trainer.saved.leave_from(error.step)
        raised = NonFiniteLossError(f"{error} {lifecycle.last_good()}.", error.step)
        raise as_guard(recipe, raised, error.step) from error
    finally:
        heartbeat.phase("end")
        phases.end()
        lifecycle.ended(sys.exc_info()[1])
        try:
            if sys.exc_info()[0] is None:
                trainer.steps.flush()
                trainer.saved.finish(trainer.step)
            else:  # the device may have failed, or wait for another rank for ever
                with contextlib.suppress(RuntimeError):
                    trainer.steps.poll()
        finally:
            loader_processes.end()
            trainer.saved.saver.close()
            release_graphs()
            reporter.close()  # last, since it may wait for a tracker
        if sys.exc_info()[0] is None:  # all ranks have arrived
            registered_buffers.release()
    if trainer.refused == trainer.step:
        problem = "the run ends, and the gradients of its last step were not finite, so it was not saved"
        text = message("optim.non_finite_gradients", recipe.optim.non_finite_gradients, problem=problem)
        raise NonFiniteGradientsError(f"step {trainer.step}: {text} {lifecycle.last_good()}.")
    return trainer.ended_early()


def as_guard(recipe: Recipe, error: RunEndedError, step: int) -> RunEndedError:
    """Leave evidence of an error about values that are not finite, and return it; where a guard may roll back, it asks
    for that.
    """
    heartbeat.guard("non_finite", str(error), first_step=step, step=step)
    if recipe.guard.loss_spike == "roll_back":
        error.exit_code = ROLL_BACK
    return error


class NonFiniteLossError(NotFiniteError):
    """The loss of a step is infinite or NaN, although its gradients are finite, or a validation loss is.

    The ranks that have the loss raise it before they write their part of a checkpoint of this step, so that the
    checkpoint is never complete.
    """

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step


def not_finite(loss: float, step: int, what: str = "loss") -> str:
    """Return the message about a training or validation loss that is not finite."""
    return f"step {step}: " + message(
        what,
        loss,
        problem=f"is not finite{', and the gradients are' if what == 'loss' else ''}: the data may hold no token that "
        "counts, or be damaged. Nothing is saved from this step on",
        fix="`zaya data inspect` shows the data; remove its cached indices if the data was changed",
    )


def counted_step(step: Callable, data_iterator, model):
    """Run `step`, a forward step, and report with its loss the mean number of tokens of a sequence that count."""
    losses, reduce_loss = step(data_iterator, model)

    def reduce(losses):
        total, count, report = reduce_loss(losses)
        # Context-parallel ranks hold a part of each sequence.
        sequences = losses.shape[0] / parallel_state.get_context_parallel_world_size()
        counted = report["lm loss"][1]
        return total, count, {**report, "tokens": torch.stack((counted, torch.full_like(counted, sequences)))}

    return losses, reduce


def release_graphs() -> None:
    """Release the graphs that Megatron captured: at its end an NCCL communicator waits for every graph that holds one
    of its kernels.
    """
    for stage, graph in FullCudaGraphWrapper.cuda_graph.items():
        if graph is not None:
            graph.reset()
        FullCudaGraphWrapper.cuda_graph[stage] = FullCudaGraphWrapper.result[stage] = None


class Trainer(Adapter):
    """A recipe's part of Megatron's loop, with reports of every step, saves during the training, and guards."""

    def __init__(self, recipe: Recipe, args, lifecycle: Lifecycle, sources: DataSources, reporter: Reporter):
        super().__init__(recipe, args, lifecycle, sources)
        self.reporter = reporter
        self.prompts = read_prompts(recipe, sources)
        self.routing = RoutingRecord(recipe) if recipe.stage.record_routing else None
        saver = Saver(
            lifecycle.directory,
            args.rank,
            args.world_size,
            keep_last=recipe.checkpoint.keep_last,
            keep_every=recipe.checkpoint.keep_every,
            collectives=60 * args.distributed_timeout_minutes,
        )
        saver.report = reporter.print if args.rank == 0 else print
        self.saved = SavedState(recipe, saver)
        self.started = False
        self.scheduler = None
        self.lr: float | None = None  # of the next step's update
        self.step = 0  # the last that ended; args.curr_iteration is the one before
        self.refused: int | None = None  # the last step that was skipped because its gradients were not finite
        self.validated: int | None = None  # the step of the last validation
        self.steps = StepQueue()
        saver.before_writing = self.steps.flush
        self.clock = StepClock(on_device=recipe.cluster.device != "cpu")
        self.signal: AgreedSignal | None = None
        self.guard: LossGuard | None = None  # on the rank that reports
        self.spiked = 0  # the first step of a loss spike, once the guard asks to roll back

    def check(self) -> None:
        super().check()
        self.step = self.lifecycle.resumed_at

    def hooks(self, build_optimizer: Callable | None = None) -> list[tuple[str, Callable]]:
        """Return the replaced symbols with our functions. build_optimizer: in place of `optimizer`."""
        return [
            *super().hooks(),
            *([(TRAINING + "get_megatron_optimizer", build_optimizer)] if build_optimizer else []),
            (TRAINING + "training_log", self.training_log),
            (TRAINING + "evaluate_and_print_results", self.evaluate_and_report),
            (TRAINING + "save_checkpoint_and_time", self.save),
            (TRAINING + "train", self.prepare_and_train),
            (TRAINING + "logical_and_across_model_parallel_group", lambda _, succeeded, group=None: succeeded),
            (TRAINING + "reduce_max_stat_across_model_parallel_group", lambda _, stat, group=None: stat),
            (TRAINING + "get_signal_handler", self.signal_handler),
            (TRAINING + "dummy_train_step", self.skip_step),
        ]

    def model(self, *positional, **named):
        """Build the model of one (virtual) stage, after the choice of the checkpoint to load."""
        heartbeat.phase("build")
        phases.begin("building the model")
        if not self.started:  # with virtual stages there is one call for each
            self.started = True
            self.begin()
        return super().model(*positional, **named)

    def begin(self) -> None:
        """Choose the checkpoint to load, start the reports and check the kernels. A collective."""
        lifecycle, saver = self.lifecycle, self.saved.saver
        skipped = lifecycle.settle()
        if self.routing is not None:
            self.routing.begin(lifecycle.resumed_at)
        saver.generation, saver.local, saver.leads = lifecycle.generation, lifecycle.local, lifecycle.leads
        saver.limit = lifecycle.upload_limit
        self.reporter.start(lifecycle.tracker_id, resumed_at=lifecycle.resumed_at, lineage=lifecycle.lineage)
        if resumed_at := lifecycle.resumed_at:
            metrics = Path(self.recipe.run_dir) / "metrics.jsonl"
            self.validated = restore.on_rank_0(lambda: starts.last_step(metrics, "valid_loss", resumed_at))
        if self.reporter.reports:
            self.guard = loss_guard.make_guard(self.recipe, resumed_at)
        if skipped:
            self.reporter.note(skipped)
        with heartbeat.during("warm_up"):
            checked = warm_up_kernels(self.recipe)
        if kernels := kernel_lines(self.recipe):
            self.reporter.note([*kernels, checked])

    def prepare_and_train(self, train, forward_step_func, model, optimizer, scheduler, *positional, **named):
        """Validate before the first step of a stage, plan the checkpoints, then run Megatron's training loop."""
        if self.handover.begins and self.recipe.stage.eval_at_start and self.args.do_valid:
            _, valid_data, non_loss, config, *_ = positional
            groups = {name: named.get(name) for name in ("pg_collection", "p2p_communicator")}
            self.evaluate_and_report(None, "start", forward_step_func, valid_data, model, 0, non_loss, config, **groups)
            for chunk in model:
                chunk.train()
        start_waits.over()
        heartbeat.phase("warm_up", self.step)
        phases.begin("first step; it may compile kernels")
        self.scheduler = scheduler
        if optimizer is not None:
            self.lr = get_canonical_lr_for_logging(optimizer.param_groups)
        # The profiler writes next to this folder. At the start Megatron would open event files in it,
        # whose errors end it.
        self.args.tensorboard_dir = str(Path(self.recipe.run_dir) / "tensorboard")
        if self.args.save and optimizer is not None:
            self.saved.prepare(model, optimizer, scheduler)
        return train(forward_step_func, model, optimizer, scheduler, *positional, **named)

    def signal_handler(self, get_signal_handler: Callable) -> AgreedSignal:
        """Replaces Megatron's get_signal_handler."""
        if self.signal is None:
            self.signal = AgreedSignal(
                get_signal_handler(), torch.cuda.current_device(), self.saved.saver, lambda: self.spiked
            )
        return self.signal

    def finalize(self, *positional, **named):
        # The previous step has ended. A captured step does not reach this line: training_log polls too.
        self.clock.gradients_ready()
        self.steps.poll()
        self.saved.saver.poll()
        super().finalize(*positional, **named)

    def training_log(
        self,
        _,
        loss_dict,
        total_loss_dict,
        learning_rate,
        iteration,
        loss_scale,
        report_memory_flag,
        skipped_iter,
        grad_norm,
        *positional,
        **named,
    ):
        """Report a step as one line and one row of metrics once the numbers are on the host; replaces Megatron's
        training_log.
        """
        args, self.step = get_args(), iteration
        phases.end()
        batch_size = get_current_global_batch_size()
        statistics = self.balancer.statistics
        if skipped_iter and grad_norm is None:
            self.refused = iteration
        warm = iteration > self.lifecycle.resumed_at + graph_warm_up(args)
        known = dict(
            step=iteration,
            lr=self.lr,
            grad_norm=float(grad_norm) if grad_norm is not None else None,
            tokens=batch_size * args.seq_length,
            flops=training.num_floating_point_operations(args, batch_size),
            skipped=bool(skipped_iter),
            consumed_samples=args.consumed_train_samples,
            last_step=args.train_iters,
            memory_gib=memory_gib(),
            is_warm=warm and iteration > self.lifecycle.resumed_at + 1,
        )
        self.lr = learning_rate  # the schedule has moved on already
        busy = self.clock.until_gradients()
        seconds = self.clock.lap(first=lambda: get_timers()("interval-time").elapsed())
        losses = [loss_dict["lm loss"]] if "lm loss" in loss_dict else []
        counts = [] if statistics is None else [statistics.tokens_per_expert, statistics.entropy]

        def report(arrived: list[torch.Tensor]) -> None:
            loss = arrived[0].item() if losses else None
            routers = RouterStatistics(*arrived[len(losses) :]) if counts else None
            if self.reporter.reports:
                self.lifecycle.check_lock()
            taken = seconds()
            heartbeat.step(iteration, taken, busy(), loss, warm)
            spike = None
            if self.guard is not None and loss is not None and not skipped_iter:
                spike = self.guard.add(iteration, loss, known["grad_norm"])
            z = None if spike is None else spike.loss_z
            self.reporter.step(Step(loss=loss, seconds=taken, statistics=routers, loss_spike=z, **known))
            if spike is not None and spike.acts:
                self.act_on(spike)
            if loss is not None and not math.isfinite(loss) and not skipped_iter:
                raise NonFiniteLossError(not_finite(loss, iteration), iteration)

        self.steps.add(iteration, [*losses, *counts], report)
        self.saved.saver.poll()
        if args.record_memory_history and iteration == min(args.profile_step_end, args.train_iters):
            self.dump_memory_snapshot(args)
        return False  # no memory report by Megatron

    def act_on(self, spike: Spike) -> None:
        """Name a loss spike, and where the recipe says so let all ranks roll back."""
        self.reporter.note([f"WARNING: {spike.text}"])
        if self.recipe.guard.loss_spike == "roll_back":
            self.spiked = spike.first_step
            first = max(1, spike.first_step - 1)  # from its checkpoint on the state is spoiled
            values = {**asdict(spike), "first_spike": spike.first_step, "first_step": first}
            if self.recipe.guard.skip_data:
                values["skip"] = [first, spike.step]
            heartbeat.guard("loss_spike", spike.text, **values)

    @staticmethod
    def dump_memory_snapshot(args) -> None:
        """Write the allocator's history of this rank, for pytorch.org/memory_viz; Megatron records it from the
        start.
        """
        if args.rank in args.profile_ranks:
            path = Path(args.memory_snapshot_path)
            torch.cuda.memory._dump_snapshot(str(path.with_stem(f"{path.stem}_rank{args.rank}")))

    @heartbeat.during("validate")
    def evaluate_and_report(
        self, _, prefix, forward_step_func, data_iterator, model, iteration, process_non_loss_data_func, config, **named
    ):
        """Evaluate one domain at a time, continue the prompts and report; replaces Megatron's
        evaluate_and_print_results, which it calls after the last step too.
        """
        self.steps.flush()
        if iteration == self.validated:
            return
        groups = {name: named.get(name) for name in ("pg_collection", "p2p_communicator", "non_loss_data_func")}
        domains, mean_losses, tokens = self.sources.domains or {"": 1.0}, {}, 0.0
        iterations = self.args.eval_iters // len(domains)
        for domain in domains:
            losses, _, timed_out = training.evaluate(
                functools.partial(counted_step, forward_step_func),
                data_iterator,
                model,
                process_non_loss_data_func,
                config,
                eval_iters=iterations,
                **groups,
            )
            if timed_out:
                return
            if losses:
                mean_losses[domain] = losses["lm loss"].item()
                tokens += losses["tokens"].item() * iterations * self.args.eval_global_batch_size
        self.validated = iteration
        if mean_losses:
            mean = mean_loss(mean_losses, domains)
            self.reporter.validation(iteration, mean, round(tokens), mean_losses if self.sources.domains else {})
            if not math.isfinite(mean):  # after the report, and before the save of this step
                raise NonFiniteLossError(not_finite(mean, iteration, "validation loss"), iteration)
        if self.prompts is not None:
            texts = continuations(self.recipe, self.prompts, model[0], get_tokenizer().eod)
            self.reporter.samples(iteration, self.prompts.texts, texts)
        self.clock.restart()

    def skip_step(self, _, data_iterator) -> None:
        """Read the batches of a step of data.skip_steps and leave them out; replaces Megatron's dummy_train_step."""
        for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
            if iterator is not None:  # as on the middle stages of a pipeline
                for _ in range(get_num_microbatches()):
                    next(iterator)
        self.scheduler.step(increment=get_current_global_batch_size())
        self.lr = get_canonical_lr_for_logging(self.scheduler.optimizer.param_groups)
        self.clock.restart()

    @heartbeat.during("save")
    def save(self, _, iteration, model, optimizer, scheduler, flops, *positional, train_data_iterator=None, **named):
        """Save a checkpoint during the training; replaces Megatron's save_checkpoint_and_time.

        The step's own numbers are reported once the copy has ended: to wait for them would leave the device idle.
        """
        if self.args.rank == 0:
            self.lifecycle.check_lock()
        if self.refused == iteration:
            self.saved.saver.report(f"WARNING: no checkpoint at step {iteration}: its gradients were not finite")
            return
        if self.signal is not None and self.signal.since is not None:
            self.saved.end_is_near(self.signal.since)
        self.saved.save(iteration, model, optimizer, scheduler, flops, train_data_iterator)

    def ended_early(self) -> int:
        """Return ENDED_EARLY if a signal ended the run before its last step, else 0; rank 0 names the step."""
        step, last = self.step, self.args.train_iters
        if self.signal is None or self.signal.since is None or step >= last:
            return 0
        # A launcher ends the other ranks when the first leaves with a code that is not 0.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.args.rank == 0:
            completed = self.saved.saver.completed
            kept = "no checkpoint of this start is complete" if completed is None else f"step {completed} is saved"
            text = f"zaya: a signal ended the run early, at step {step} of {last}; {kept}. resume=auto continues"
            print(text, file=sys.stderr, flush=True)
        return ENDED_EARLY

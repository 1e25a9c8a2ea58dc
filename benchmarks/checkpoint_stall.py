# SPDX-License-Identifier: Apache-2.0
"""Measure what a checkpoint costs a training: in the loop of `zaya train`, by our saves, Megatron's and torch's, in turns.

    python3 -m benchmarks.checkpoint_stall --random-tokens 4096 --rounds 9 experiment=cpu_demo nproc=2
    python3 -m benchmarks.checkpoint_stall experiment=zaya1_base cluster=h200_8 nproc=1 cluster.gpus_per_node=1 \\
        cluster.numa_nodes=[] model.num_layers=2 stage.micro_batch_size=4 stage.global_batch_size=32

A round makes one save of each kind:

    async, sync      checkpoint.save of this plugin
    stock            Megatron's save, whose format gathers the optimizer's state on every rank
    stock_boxes      Megatron's save with this plugin's boxes, which gathers nothing
    torch            torch.distributed.checkpoint.async_save with overlapped staging into pinned memory, by a process.
                     The event that orders the copy after the optimizer is added, and before torch 2.13 the stager's
                     cache is kept; `async_save` alone has the former mistake in every version
    nvrx             nvidia-resiliency-ext's asynchronous writer (0.6 or later), with the cached plan and the persistent
                     worker that Megatron asks it for; only if it is named with --kinds. On a CPU through its shared
                     memory, since its other way needs a GPU. The wait for the optimizer's kernels is added. Its wheels
                     need glibc 2.39; elsewhere unpack one into a folder of PYTHONPATH, since this part is plain Python
    plain            no checkpoint: a process writes as many bytes to the same disk, then fsync
    none             nothing: how far the figures of a window without a save are from 0

A window is the step during which a save is made and all steps until it is on the disk, at least two. Stall: the time of
the window less that of as many steps without a save, by the median of those before and after it, since other work on
the machine comes and goes. Times are those between
the ends of steps, by events on a GPU and by the host's clock on a CPU, on rank 0. The first round warms up; the memory
of the rank and its children (their proportional share of shared pages) is read during it. Prints a table and writes
<name>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

from zaya_plugin.ground.parent_death import adopt_children

MODULE = "benchmarks.checkpoint_stall"
KINDS = ("async", "sync", "stock", "stock_boxes", "torch", "nvrx", "plain", "none")
RECORD = "stall.json"
WARM_UP = 6  # steps before the first save; a graph is captured in them
REST = 2  # steps after a window that are not counted: what it has written is removed


@dataclass(frozen=True)
class Choices:
    """The command line. once: kinds that are saved in the first counted round alone. seconds: after which no further
    save begins. plain_steps: counted steps without a save, after each save.
    """

    kinds: list[str]
    once: list[str]
    rounds: int
    seconds: float
    plain_steps: int
    random_tokens: int


# Outside the ranks


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python3 -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=[kind for kind in KINDS if kind != "nvrx"], metavar="KIND"
    )
    parser.add_argument("--once", nargs="+", choices=KINDS, default=[], metavar="KIND", help="saved once, no warm-up")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further save begins")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind that count; default: %(default)s")
    parser.add_argument("--plain-steps", type=int, default=8, help="steps without a save after each; %(default)s")
    parser.add_argument("--random-tokens", type=int, default=262_272, metavar="ROWS", help="rows of the vocabulary")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/checkpoint_stall"), help="folder of the run, on the disk"
    )
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="checkpoint_stall")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    arguments = parser.parse_intermixed_args(argv)
    if "nvrx" in arguments.kinds and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        parser.error("--kinds nvrx: nvidia_resiliency_ext is not installed (version 0.6 or later)")
    from benchmarks.result_record import described, write
    from zaya_plugin.bench.options import Options, measured_recipe, with_data_path
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.run_directory import keep_recipe
    from zaya_plugin.run import launch, rank_plan, start_recipe

    choices = Choices(
        arguments.kinds,
        arguments.once,
        arguments.rounds,
        arguments.seconds,
        arguments.plain_steps,
        arguments.random_tokens,
    )
    overrides = [*with_data_path(arguments.overrides), "logger=none"]
    recipe = measured_recipe(compose(overrides), Options(warmup=10_000), str(arguments.work))
    recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, save_interval=1, keep_last=1))
    plan = rank_plan.make_plan(recipe, os.environ, (MODULE, json.dumps(asdict(choices))))
    recipe = start_recipe.with_choices(recipe, plan)
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    keep_recipe(recipe, arguments.work)
    code = launch.run_ranks(plan, arguments.work / "logs").code
    if not (arguments.work / RECORD).exists():
        return code
    found = json.loads((arguments.work / RECORD).read_text())
    device = found.pop("device")
    print(table(found["kinds"]))
    record = described(arguments.commit, device) | {"command": shlex.join(["python3", "-m", MODULE, *argv])}
    write(record | {"ranks": plan.world_size, **found}, arguments.name, arguments.results)
    return code


def table(kinds: dict[str, dict]) -> str:
    """Return the figures of each kind of save as text."""
    lines = [
        f"{'save':12}{'stall s':>10}{'the middle half of them':>25}{'slowest step':>14}{'call s':>9}{'steps':>7}"
        f"{'drain s':>9}{'GB/s':>7}"
    ]
    for kind, found in kinds.items():
        low, high = found["middle_half_s"]
        lines.append(
            f"{kind:12}{found['stall_s']:10.4f}{f'{low:.4f} to {high:.4f}':>25}{found['slowest_step']:14.1%}"
            f"{found['call_s']:9.4f}{found['steps']:7.1f}{found['drain_s']:9.3f}{found['drain_gb_per_s']:7.2f}"
        )
    return "\n".join(lines)


# Figures


@dataclass
class Window:
    """One save: seconds of its steps; of the call; until all was on the disk, of which bytes were written."""

    kind: str
    round: int
    call: float
    steps: list[float]
    drain: float = 0.0
    checksum: float | None = None


def figures(windows: Iterable[tuple[int, Window]], plain: dict[int, float], near: int, size: int) -> dict[str, dict]:
    """Return the medians of each kind of save.

    windows: with the number of their first step. plain: seconds of the steps without a save, by number; the `near` ones
    before and after a window are its measure. size: bytes of a rank.
    """
    found: dict[str, dict] = {}
    for first, window in windows:
        before = [plain[step] for step in sorted(plain) if step <= first][-near:]
        after = [plain[step] for step in sorted(plain) if step > first][:near]
        usual = statistics.median(before + after)
        found.setdefault(window.kind, {"windows": []})["windows"].append(
            {
                "stall_s": sum(window.steps) - usual * len(window.steps),
                "call_s": window.call,
                "slowest_step": max(window.steps) / usual - 1,
                "drain_s": window.drain,
                "drain_gb_per_s": size / 1e9 / window.drain,
                "steps": len(window.steps),
                "checksum_s": window.checksum,
                "step_s": window.steps,
                "usual_step_s": usual,
            }
        )
    for each in found.values():
        for name, value in each["windows"][0].items():
            if isinstance(value, (int, float)):
                each[name] = statistics.median(window[name] for window in each["windows"])
        stalls = sorted(window["stall_s"] for window in each["windows"])
        each["middle_half_s"] = [stalls[len(stalls) // 4], stalls[-1 - len(stalls) // 4]]
    return found


def memory_of(process: int, children: bool = True) -> int:
    """Return the bytes of a process and its descendants; a page of n processes counts 1/n in each."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        total = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
        if children:
            for task in Path(f"/proc/{process}/task").iterdir():
                total += sum(memory_of(int(child)) for child in (task / "children").read_text().split())
        return total
    except (OSError, StopIteration):  # it has ended
        return 0


class PeakMemory:
    """Reads this rank's memory and its children's again and again, in a thread."""

    def __init__(self):
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.peak = max(self.peak, memory_of(os.getpid()))

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak


# Inside a rank


def measure(choices: Choices, recipe, rank: int, world_size: int, console) -> None:
    """Train and save; rank 0 writes the figures to the run directory."""
    import torch

    from zaya_plugin.bench.random_tokens import RandomTokens
    from zaya_plugin.hosts import pretrain, worker
    from zaya_plugin.training.lifecycle import Lifecycle
    from zaya_plugin.training.metrics import Reporter

    worker.prepare(recipe)
    if recipe.cluster.device != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    class StepLines(Reporter):
        """A run's metrics, without the summary at its end."""

        def close(self) -> None:
            self.losses = []
            super().close()

    trainer = trainer_class(choices, recipe, console)
    with mock.patch.object(pretrain, "Trainer", trainer):
        reporter = StepLines(recipe, rank, world_size, console)
        pretrain.run(recipe, RandomTokens(choices.random_tokens), Lifecycle(recipe), reporter)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def trainer_class(choices: Choices, recipe, console):
    """Return the product's trainer, which saves by the schedule of this benchmark."""
    import torch
    from megatron.training import get_args

    from zaya_plugin.checkpoint.saver import BUSY
    from zaya_plugin.hosts import pretrain

    class Trainer(pretrain.Trainer):
        def __init__(self, *positional):
            super().__init__(*positional)
            self.ends: list = []  # of the steps: times, or events of a GPU
            self.plain: list[int] = []  # steps without a save that count
            self.windows: list[tuple[int, Window]] = []  # first step, what is known
            self.schedule = [
                (n, kind)
                for n in range(choices.rounds + 1)
                for kind in choices.kinds
                if n == 1 or kind not in choices.once
            ]
            self.until = time.perf_counter() + choices.seconds
            self.open: tuple[int, Window, Callable[[], bool]] | None = None
            self.next = WARM_UP
            self.memory: dict[str, dict] = {}
            self.watch: PeakMemory | None = None
            self.group = None
            self.stager = self.staging = None
            self.nvrx = None

        # What the loop calls

        def prepare_and_train(self, train, forward_step_func, model, optimizer, scheduler, *rest, **named):
            """Train; the saver is prepared later, so that the memory without it can be read."""
            self.group = torch.distributed.new_group(backend="gloo")
            return train(forward_step_func, model, optimizer, scheduler, *rest, **named)

        def save(self, stock, iteration, model, optimizer, *rest, **named):
            """At the end of each step: note the time, close a window or begin one."""
            self.ends.append(self.now())
            step = len(self.ends)
            if self.open is not None:
                return self.heed(step)
            if self.saved.saver.prepared and step > self.next - choices.plain_steps:
                self.plain.append(step)
            if step < self.next:
                return
            if not self.schedule:
                self.finish()
                raise SystemExit(0)
            if not self.saved.saver.prepared:
                self.prepare(model, optimizer, rest[0])
            own = super().save
            self.begin_save(
                step,
                lambda: own(stock, iteration, model, optimizer, *rest, **named),
                lambda: stock(iteration, model, optimizer, *rest, **named),
            )

        @staticmethod
        def now():
            if recipe.cluster.device == "cpu":
                return time.perf_counter()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        # Saves

        def prepare(self, model, optimizer, scheduler) -> None:
            before, begun = memory_of(os.getpid(), children=False), time.perf_counter()
            self.saved.prepare(model, optimizer, scheduler)
            self.memory["before"] = before
            self.memory["prepare_s"] = time.perf_counter() - begun
            self.memory["pinned"] = self.saved.saver._buffer.pinned
            self.other = Path(recipe.run_dir) / "other"
            optimizer.announce_changes(self.before_change)

        def before_change(self, tensors) -> None:
            if self.staging is not None:  # as torchtitan waits
                self.staging.result()
                self.staging = None
            self.saved.saver.before_change(tensors)

        def begin_save(self, step: int, own: Callable[[], None], stock: Callable[[], None]) -> None:
            """Begin the next save of the schedule."""
            round, kind = self.schedule.pop(0)
            if round == 0:
                self.before = memory_of(os.getpid())
                self.watch = PeakMemory()
            begun = time.perf_counter()
            drained = {
                "async": lambda: self.own(own, waits=False),
                "sync": lambda: self.own(own, waits=True),
                "stock": lambda: self.megatron(stock, gathers=True),
                "stock_boxes": lambda: self.megatron(stock, gathers=False),
                "torch": self.torch_save,
                "nvrx": self.nvrx_save,
                "plain": self.plain_write,
                "none": lambda: lambda: True,
            }[kind]()
            call = time.perf_counter() - begun
            self.open = step, Window(kind, round, call, [], drain=call if drained() else 0.0), drained
            self.begun = begun

        def own(self, save: Callable[[], None], waits: bool) -> Callable[[], bool]:
            self.saved.waits = waits
            save()
            return lambda: self.saved.saver.state != BUSY

        def megatron(self, save: Callable[[], None], gathers: bool) -> Callable[[], bool]:
            args = get_args()
            with mock.patch.object(args, "save", str(self.other)), gathered() if gathers else contextlib.nullcontext():
                save()
            return lambda: True

        def torch_save(self) -> Callable[[], bool]:
            from torch.distributed.checkpoint import async_save
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

            on_device = recipe.cluster.device != "cpu"
            if self.stager is None:
                self.stager = DefaultStager(StagingOptions(on_device, True, True, on_device))
                self.stager._state_dict_stager.close = lambda: None  # 2.11 and 2.12 forget their buffers at each save
            if on_device:
                self.stager._staging_stream.wait_event(torch.cuda.current_stream().record_event())
            tensors = self.saved.saver._file.tensors
            answer = async_save(
                {f"{self.args.rank}.{n}": tensor for n, (_, tensor) in enumerate(tensors)},
                checkpoint_id=str(self.other),
                process_group=self.group,
                async_checkpointer_type=AsyncCheckpointerType.THREAD,
                async_stager=self.stager,
            )
            self.staging = answer.staging_completion

            def done() -> bool:
                if answer.upload_completion.done():
                    answer.upload_completion.result()  # raises what went wrong
                    return True
                return False

            return done

        def nvrx_save(self) -> Callable[[], bool]:
            from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
            from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
            from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
                CheckpointMetadataCache,
                save_state_dict_async_finalize,
                save_state_dict_async_plan,
            )

            on_device = recipe.cluster.device != "cpu"
            if self.nvrx is None:
                self.nvrx = AsyncCallsQueue(cpu_shm_mode=not on_device), CheckpointMetadataCache()
            queue, cache = self.nvrx
            self.other.mkdir(exist_ok=True)
            writer = FileSystemWriterAsync(
                str(self.other),
                thread_count=2,
                use_cached_data_structure=True,
                use_cpu_shm_for_gpu_tensors=not on_device,
            )
            tensors = self.saved.saver._file.tensors
            planned = save_state_dict_async_plan(
                {f"{self.args.rank}.{n}": tensor for n, (_, tensor) in enumerate(tensors)},
                writer,
                self.group,
                enable_cache=True,
                metadata_cache=cache,
            )
            write, preload, arguments = writer.get_save_function_and_args()
            if on_device:  # its worker copies on a stream of its own, and waits for nothing
                torch.cuda.current_stream().synchronize()
            request = AsyncRequest(
                write, arguments, [lambda: save_state_dict_async_finalize(*planned)], preload_fn=preload
            )
            queue.schedule_async_request(request)
            finished: list[int] = []

            def done() -> bool:  # a collective, which every rank calls after each step of the window
                finished.extend(queue.maybe_finalize_async_calls())
                return bool(finished)

            return done

        def plain_write(self) -> Callable[[], bool]:
            self.other.mkdir(exist_ok=True)
            buffer, size = self.saved.saver._buffer.descriptor, self.saved.saver.bytes
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.plain_write", str(buffer), str(size), str(self.other / f"{self.args.rank}")],
                pass_fds=[buffer],
                stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            return lambda: self.process.poll() is not None

        # After a step of a window

        def heed(self, step: int) -> None:
            """Close the window if all ranks have drained."""
            first, window, drained = self.open
            is_over = drained()
            if is_over and not window.drain:
                window.drain = time.perf_counter() - self.begun
            answer = torch.tensor([is_over, time.perf_counter() < self.until], dtype=torch.int32)
            torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MIN, group=self.group)
            all_over, has_time = answer.tolist()
            if not all_over or step < first + 2:
                return
            if not has_time:
                self.schedule = []
            self.open = None
            if window.kind in ("async", "sync"):
                assert self.saved.saver.failed is None, "a save has failed"
                window.drain = self.saved.saver.bytes / self.saved.saver.rate
            elif window.kind == "plain":
                told = json.loads(self.process.communicate()[0])
                window.drain, window.checksum = told["write"], told["checksum"]
            if window.round == 0:
                self.memory[window.kind] = {"beyond_before_s_save": self.watch.end() - self.before}
                self.memory[window.kind]["beyond_run_without_saves"] = self.watch.peak - self.memory["before"]
            else:
                self.windows.append((first, replace(window, steps=[step])))
            torch.distributed.barrier(group=self.group)
            if self.args.rank == 0:
                shutil.rmtree(self.other, ignore_errors=True)
                for each in Path(self.saved.saver.directory).glob("iter_*"):  # the disk need not hold two
                    shutil.rmtree(each, ignore_errors=True)
                print(f"{window.kind}: drained in {window.drain:.2f} s, {step - first} steps", file=console, flush=True)
            self.next = step + REST + choices.plain_steps
            if window.round > 0:
                self.keep()

        def finish(self) -> None:
            if self.nvrx is not None:
                self.nvrx[0].close()
            self.keep()

        def keep(self) -> None:
            """Rank 0 writes the record, so that a run which is ended early has one of its windows so far."""
            if recipe.cluster.device == "cpu":
                ends = self.ends
            else:
                torch.cuda.synchronize()
                ends = [self.ends[0].elapsed_time(each) / 1000 for each in self.ends]
            seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
            # seconds[n] is the time of the step that ended as the (n + 2)nd
            windows = [
                (first, replace(each, steps=seconds[first - 1 : int(each.steps[0]) - 1]))
                for first, each in self.windows
            ]
            plain = {step: seconds[step - 2] for step in self.plain}
            size = self.saved.saver.bytes
            sizes: list = [None] * self.args.world_size
            torch.distributed.all_gather_object(sizes, (size, self.memory), group=self.group)
            if self.args.rank != 0:
                return
            record = {
                "device": torch.cuda.get_device_name() if recipe.cluster.device != "cpu" else None,
                "bytes": [each for each, _ in sizes],
                "plain_step_s": statistics.median(plain.values()),
                "plain_steps_s": list(plain.values()),
                "memory": [each for _, each in sizes],
                "kinds": figures(windows, plain, choices.plain_steps, size),
            }
            (Path(recipe.run_dir) / RECORD).write_text(json.dumps(record))

    return Trainer


@contextlib.contextmanager
def gathered():
    """Let Megatron gather the optimizer's state, as its own optimizer does."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from zaya_plugin.optim.sharding.distributed import MuonDistributedOptimizer

    def tensors(self, model_param):
        found = DistributedOptimizer._get_main_param_and_optimizer_states(self, model_param)
        # Megatron collects the same keys of all parameters. This view of one zero takes no memory.
        found.setdefault("exp_avg_sq", found["param"].new_zeros(()).expand(found["param"].shape))
        return found

    with mock.patch.multiple(
        MuonDistributedOptimizer,
        _get_main_param_and_optimizer_states=tensors,
        sharded_param_state_fully_reshardable=DistributedOptimizer.sharded_param_state_fully_reshardable,
    ):
        yield


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("recipe.yaml"):
        from zaya_plugin.hosts import worker

        adopt_children()
        sys.exit(worker.main(sys.argv[1:2], lambda *of_rank: measure(Choices(**json.loads(sys.argv[2])), *of_rank)))
    sys.exit(main(sys.argv[1:]))

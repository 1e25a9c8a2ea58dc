# SPDX-License-Identifier: Apache-2.0
"""One rank of a run whose losses, gradients and expert choices are kept: `layout_run <job.json>`, under torchrun or
rank_server.py.

The run is the product's own (recipe, hosts.pretrain, Megatron's loop and checkpoints). What is kept is named so that it
does not depend on the layout: gradients by checkpoint key and put together from their shards, expert ids by the tokens
of the sequence and the position in it.

The job: recipe (overrides), out (the .pt that rank 0 writes), save_at (step whose checkpoint is written, or null),
gradients (keep them), traffic (count what each rank sends), forced (a former .pt whose expert ids replace the routers'
choices, or null).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch

from tests.distributed.traffic import Traffic
from zaya_plugin import patches

patches.apply_torch()


class Recorder:
    """What this rank saw, step by step."""

    def __init__(self, job: dict):
        self.job = job
        self.step = 0
        self.batch: list[bytes] | None = None
        self.positions: torch.Tensor | None = None
        self.recording = False
        self.ids: list[tuple] = []  # step, layer, sequences of the micro-batch, positions, ids [s, b], margins [s, b]
        self.gradients: list[list] = []
        self.reported: list[dict] = []
        self.traffic = Traffic() if job["traffic"] else None
        self.sent: list[dict] = []  # a step: what this rank has sent since the step before was reported
        self.memory: list[dict] = []  # a step on an accelerator: bytes held after it, and the most during it
        forced = torch.load(job["forced"])["ids"] if job["forced"] else None
        self.forced = forced

    def peek(self, data_iterator):
        """The iterator, with every batch noted before the product cuts it."""
        recorder = self

        class Peeking:
            def __iter__(self):
                return self

            def __next__(self):
                batch = next(data_iterator)
                recorder.tokens = batch["tokens"].clone()
                recorder.batch = [row.cpu().numpy().tobytes() for row in recorder.tokens]
                return batch

        return Peeking()

    def watch(self, model, args) -> None:
        """Hooks on a model chunk: which batch it computes, and what its routers choose."""
        from megatron.core import parallel_state

        from zaya_plugin.model.layer import ZayaTransformerLayer

        cut = local_positions(
            args.seq_length,
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
            getattr(args, "context_parallel_order", None) or "zigzag",
        )
        seen = cut
        if args.sequence_parallel:
            tensor = parallel_state.get_tensor_model_parallel_rank()
            seen = cut.chunk(parallel_state.get_tensor_model_parallel_world_size())[tensor]

        def before(module, positional, named):
            self.recording = True
            tokens = positional[0] if positional else named["input_ids"]
            if tokens is not None:
                assert torch.equal(tokens.cpu(), self.tokens[:, cut]), "another cut of the sequence than was asked for"
            if self.forced is not None:
                ids = torch.stack([self.forced[self.step, key] for key in self.batch], dim=-1)  # [L, s, b]
                named = {**named, "extra_block_kwargs": {"context_mask": ids[:, seen].to(torch.cuda.current_device())}}
            return positional, named

        def after(module, positional, output):
            self.recording = False

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after)
        for layer in model.modules():
            if isinstance(layer, ZayaTransformerLayer):
                layer.mlp.router.register_forward_hook(self._choices(layer.layer_number, seen))

    def _choices(self, layer_number: int, positions: torch.Tensor):
        def hook(module, positional, output):
            if self.recording:  # and not when a backward pass computes the layer again
                assert output[1].shape[0] == len(positions)
                ids = output[1].detach().cpu()
                self.ids.append(
                    (self.step, layer_number, self.batch, positions, ids, self.margins.view(ids.shape).cpu())
                )

        return hook

    def note_margins(self) -> None:
        """From now on every choice of an expert leaves behind how far the second best class was."""
        import hip_ops

        router_mlp = hip_ops.router_mlp

        def choose(*arguments, **named):
            routed, biases = router_mlp(*arguments, **named), arguments[2].biases
            probabilities = routed.logits[:, : len(biases)].float().softmax(dim=-1)
            best = (probabilities + biases).topk(2, dim=-1).values
            self.margins = best[:, 0] - best[:, 1]
            return routed

        hip_ops.router_mlp = choose

    def end_of_step(self, chunks) -> None:
        """To be called with all gradients reduced and before the optimizer runs."""
        if self.job["gradients"]:
            self.gradients.append(local_gradients(chunks))
        self.step += 1


def local_positions(length: int, ranks: int, rank: int, order: str) -> torch.Tensor:
    """Positions of a sequence that a context-parallel rank holds, in its order. Written down again, not imported."""
    if ranks == 1:
        return torch.arange(length)
    if order == "contiguous":
        return torch.arange(length).chunk(ranks)[rank]
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def local_gradients(chunks) -> list[tuple]:
    """(checkpoint key, global shape, global offset, gradient fp32) of every parameter piece on this rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    pieces = []
    for ddp in chunks:
        gradients = {}
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            for bucket in buffer.buckets:
                # the optimizer would multiply as it reads them
                grads = bucket.grad_data * buffer.scale_gradients.func.__self__.factor  # of the DeferredScale
                if ddp.ddp_config.use_distributed_optimizer:  # each rank holds the sum of its own shard alone
                    group = buffer.data_parallel_group
                    shard = grads.chunk(group.size())[group.rank()].clone()
                    grads = torch.empty_like(grads)
                    torch.distributed.all_gather_into_tensor(grads, shard, group=group)
                for param in bucket.params:
                    start = param.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                    shard = grads[start : start + param.numel()]
                    gradients[param.data_ptr()] = shard.view(param.shape).float().cpu().clone()
        module = ddp.module
        while not hasattr(module, "decoder"):
            module = module.module
        named = set()
        for sharded in nested_values(module.sharded_state_dict()):
            built = list(nested_values(sharded.build())) if isinstance(sharded, ShardedTensorFactory) else [sharded]
            for piece in built:
                if isinstance(piece, ShardedTensor) and piece.data is not None and piece.data.data_ptr() in gradients:
                    assert piece.data.shape == piece.local_shape and len(built) == 1
                    gradient = gradients[piece.data.data_ptr()]
                    named.add(piece.data.data_ptr())
                    pieces.append(
                        (piece.key, piece.global_shape, piece.global_offset, gradient.view(piece.local_shape))
                    )
        assert named == set(gradients), "a parameter has no key in the checkpoint"
    return pieces


def join_gradients(ranks: list[list[tuple]]) -> tuple[dict[str, torch.Tensor], float]:
    """Whole gradients by key, and the largest relative difference between two ranks' copies of one piece."""
    whole, first, difference = {}, {}, 0.0
    for key, shape, offset, gradient in (piece for rank in ranks for piece in rank):
        if (key, offset) in first:
            known = first[key, offset]
            scale = known.norm().item()
            apart = (gradient - known).norm().item()
            difference = max(difference, apart / scale if scale else apart)
            continue
        first[key, offset] = gradient
        if key not in whole:
            whole[key] = torch.full(shape, float("nan"))
        whole[key][tuple(slice(o, o + n) for o, n in zip(offset, gradient.shape, strict=True))] = gradient
    for key, gradient in whole.items():
        assert not gradient.isnan().any(), f"{key}: no rank holds all of it, or its gradient is not finite"
    return whole, difference


def join_ids(ranks: list[list[tuple]], layers: int, length: int) -> tuple[dict, dict]:
    """Expert ids int64 [L, s] and margins fp32 [L, s] by step and sequence; every token of every layer has to have one
    id.
    """
    whole: dict[tuple[int, bytes], torch.Tensor] = {}
    margins: dict[tuple[int, bytes], torch.Tensor] = {}
    for step, layer, sequences, positions, ids, apart in (entry for rank in ranks for entry in rank):
        for column, sequence in enumerate(sequences):
            table = whole.setdefault((step, sequence), torch.full((layers, length), -1))
            before = table[layer - 1, positions]
            assert bool(((before < 0) | (before == ids[:, column])).all()), "two ranks routed one token differently"
            table[layer - 1, positions] = ids[:, column]
            margins.setdefault((step, sequence), torch.zeros(layers, length))[layer - 1, positions] = apart[:, column]
    assert all(bool((table >= 0).all()) for table in whole.values()), "some tokens were routed by nobody"
    return whole, margins


def run(job: dict) -> None:
    """Train as the job says; rank 0 writes what all ranks saw."""
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.run.rank_plan import rank_environment

    recipe = compose(job["recipe"])
    os.environ.update(rank_environment(recipe, int(os.environ["WORLD_SIZE"]), os.environ))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    validate(recipe, world)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    patches.apply()
    from zaya_plugin.data.sources import find_sources
    from zaya_plugin.hosts import pretrain
    from zaya_plugin.training.lifecycle import Lifecycle
    from zaya_plugin.training.metrics import Reporter

    recorder = Recorder(job)
    recorder.note_margins()

    class Trainer(pretrain.Trainer):
        def model(self, *positional, **named):
            model = super().model(*positional, **named)
            recorder.watch(model, self.args)
            return model

        def finalize(self, finalize_model_grads, model, *positional, **named):
            super().finalize(finalize_model_grads, model, *positional, **named)
            recorder.end_of_step(model)

        def save(self, stock, iteration, *positional, **named):
            if iteration == job["save_at"]:
                super().save(stock, iteration, *positional, **named)

    class Recording(Reporter):
        def step(self, step):
            super().step(step)
            if recorder.traffic is not None:
                recorder.sent.append(recorder.traffic.take_step())
            if recipe.cluster.device == "cuda":
                recorder.memory.append(
                    {"held": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
                )
                torch.cuda.reset_peak_memory_stats()
            if self.reports:
                statistics = step.statistics
                counts = None if statistics is None else statistics.tokens_per_expert.cpu()
                recorder.reported.append(
                    {
                        "step": step.step,
                        "loss": step.loss,
                        "grad_norm": step.grad_norm,
                        "seconds": step.seconds,
                        "tokens_per_expert": counts,
                    }
                )

    forward_step = pretrain.forward_step
    pretrain.forward_step = lambda iterator, model, *rest: forward_step(recorder.peek(iterator), model, *rest)
    pretrain.Trainer = Trainer
    with recorder.traffic or contextlib.nullcontext():
        pretrain.run(recipe, find_sources(recipe), Lifecycle(recipe), Recording(recipe, rank, world, sys.stdout))

    mine = {name: getattr(recorder, name) for name in ("ids", "gradients", "reported", "sent", "memory")}
    ranks = [None] * world if rank == 0 else None
    torch.distributed.gather_object(mine, ranks)
    if rank == 0:
        joined = [join_gradients(step) for step in zip(*(r["gradients"] for r in ranks), strict=True)]
        ids, margins = join_ids([r["ids"] for r in ranks], recipe.model.num_layers, recipe.stage.seq_length)
        result = {
            "reported": ranks[-1]["reported"],
            "ids": ids,
            "margins": margins,
            "gradients": [gradients for gradients, _ in joined],
            "sent": [r["sent"] for r in ranks],
            "memory": [r["memory"] for r in ranks],
            "replicas": max((difference for _, difference in joined), default=0.0),
        }
        torch.save(result, job["out"])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(job_file: str) -> None:
    """One rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment."""
    job = json.loads(Path(job_file).read_text())
    log = Path(job["out"]).with_suffix(f".rank{os.environ['RANK']}.log")
    with open(log, "w", buffering=1) as out, contextlib.redirect_stdout(out):
        run(job)


if __name__ == "__main__":
    main(sys.argv[1])

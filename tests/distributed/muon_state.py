# SPDX-License-Identifier: Apache-2.0
"""The ranks of tests/distributed/test_muon_state.py: `muon_state.py save|load|skip|cut DIRECTORY RANKS [stock]`.

They are forked, since importing torch and Megatron takes longer than what they do.

save: five Muon steps on made-up gradients, then the checkpoint and rank 0's view of the whole state.
load: the checkpoint at this number of ranks, the whole state again, one more step.
cut: as save, with Megatron's own buffer layout, which cuts matrices.
stock: the optimizer's state is saved and loaded by Megatron's own methods.
skip: a gradient that is not a number on one rank alone; nothing may change anywhere.
"""

import contextlib
import multiprocessing
import re
import sys
from pathlib import Path

import pytest
import torch

from zaya_plugin import patches

patches.apply_torch()
if sys.argv[1] == "cut":
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    stock_layout = DistributedOptimizer._compute_per_buffer_param_layout
patches.apply()
if sys.argv[1] == "cut":
    DistributedOptimizer._compute_per_buffer_param_layout = staticmethod(stock_layout)

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from tests.distributed.muon_model import build_model, with_optimizer  # noqa: E402
from zaya_plugin.checkpoint.replicas import check_replicas  # noqa: E402
from zaya_plugin.optim.parameter_role import role_of  # noqa: E402
from zaya_plugin.optim.sharding.distributed import MuonDistributedOptimizer  # noqa: E402

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
COLLECTIVE = re.compile(r"(all_|reduce|gather|scatter|broadcast|barrier|send|recv|batch_|monitored_)")
METADATA |= {"chained_optim_avoid_prefix": True}  # as megatron.training.checkpointing sets it


def step(ddp, optimizer, number, broken_rank=None):
    """One optimizer step whose reduced gradient does not depend on the number of ranks."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    for p in ddp.parameters():
        # DDP averages over ranks: what each brings is the same, so sums of equal powers of two are exact.
        p.main_grad.copy_(torch.randn(p.shape, generator=generator).bfloat16().float())
    if broken_rank == torch.distributed.get_rank():
        next(ddp.parameters()).main_grad.view(-1)[0] = float("nan")
    ddp.finish_grad_sync()
    return optimizer.step()[0]


def whole_state(ddp, optimizer):
    """Weights, fp32 weights and optimizer state by parameter name, put together from all ranks."""
    names = {p: name for name, p in ddp.module.named_parameters()}
    result = {}
    for inner in optimizer.chained_optimizers:
        for model_param, main in inner._pairs():
            place = inner._get_model_param_range_map(model_param)["param"]
            tensors = {"main": main, **inner.optimizer.state[main]}
            for key, value in tensors.items():
                result[names[model_param], key] = (place.start, place.end, value.detach().clone())
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, result)
    whole = {}
    for (name, key), numel in {k: None for rank in ranks for k in rank}.items():
        pieces = sorted((rank[name, key] for rank in ranks if (name, key) in rank), key=lambda piece: piece[0])
        assert [a[1] for a in pieces[:-1]] == [b[0] for b in pieces[1:]] and pieces[0][0] == 0, (
            name,
            "has a gap or an overlap",
        )
        whole[name, key] = torch.cat([piece[2].flatten() for piece in pieces])
        numel = whole[name, key].numel()
        assert numel == dict(ddp.module.named_parameters())[name].numel()
    whole |= {(name, "weight"): p.detach().clone().flatten() for name, p in ddp.module.named_parameters()}
    return whole


def state_bytes(optimizer):
    """This rank's fp32 weights and optimizer state."""
    return sum(
        main.nbytes + sum(t.nbytes for t in inner.optimizer.state[main].values())
        for inner in optimizer.chained_optimizers
        for _, main in inner._pairs()
    )


def save_and_load_by_megatron() -> None:
    """Megatron's methods, with the second moment of Muon's matrices made up for its gather and left out of files."""

    def tensors_of(self, model_param):
        tensors = DistributedOptimizer._get_main_param_and_optimizer_states(self, model_param)
        if "exp_avg_sq" not in tensors:
            tensors["exp_avg_sq"] = torch.zeros_like(tensors["param"])
        return tensors

    def states(self, *positional, **named):
        found = DistributedOptimizer.sharded_param_state_fully_reshardable(self, *positional, **named)
        for index, param in enumerate(p for buffer in self.buffers for p in buffer.param_index_map):
            if role_of(param).matrices is not None:
                del found[index]["exp_avg_sq"]
        return found

    MuonDistributedOptimizer._get_main_param_and_optimizer_states = tensors_of
    MuonDistributedOptimizer.sharded_param_state_fully_reshardable = states
    del MuonDistributedOptimizer.load_parameter_state_from_fully_reshardable


@contextlib.contextmanager
def no_collectives():
    """Within it a collective is an error."""
    names = [name for name in torch.distributed.distributed_c10d.__all__ if COLLECTIVE.match(name)]
    assert {"all_gather_into_tensor", "all_gather_object", "barrier", "gather"} <= {*names}

    def refuse(*positional, **named):
        raise AssertionError("a collective")

    stock = {name: getattr(torch.distributed, name) for name in names}
    try:
        for name in names:
            setattr(torch.distributed, name, refuse)
        yield
    finally:
        for name, function in stock.items():
            setattr(torch.distributed, name, function)


def save(ddp, optimizer, folder: Path, allowed) -> None:
    """A checkpoint in `folder`; the optimizer's part is made within `allowed`."""
    model_state = ddp.module.sharded_state_dict()
    with allowed:
        state = optimizer.sharded_state_dict(model_state, metadata=METADATA)
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save({"optimizer": state, "model": model_state}, str(folder))


def load(ddp, optimizer, folder: Path) -> None:
    model_state = ddp.module.sharded_state_dict()
    state = optimizer.sharded_state_dict(model_state, is_loading=True, metadata=METADATA)
    loaded = dist_checkpointing.load({"optimizer": state, "model": model_state}, str(folder))
    ddp.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def other_bits_on_one_rank_are_named(ddp, optimizer) -> None:
    name, param = next((name, p) for name, p in ddp.module.named_parameters() if "linear_proj" in name)
    last = torch.distributed.get_world_size() - 1
    if last == 0:
        return
    kept = param.data.view(-1)[-1].clone()
    if torch.distributed.get_rank() == last:
        param.data.view(-1)[-1] += 1.0
    with pytest.raises(RuntimeError, match=rf"differ in 1 tensors: {re.escape(name)} \(rank {last} and rank 0\)"):
        check_replicas([ddp.module], optimizer)
    param.data.view(-1)[-1] = kept


def main(rank: int, world: int, what: str, directory: Path, by: str = "") -> None:
    if by == "stock":
        save_and_load_by_megatron()
    store = torch.distributed.FileStore(str(directory / f"store_{what}{world}{by}"), world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel()
    ddp, optimizer = with_optimizer(build_model())
    if what == "skip":
        assert step(ddp, optimizer, 1)
        before = whole_state(ddp, optimizer)
        for broken in range(world):
            assert step(ddp, optimizer, 2, broken_rank=broken) is False
        after = whole_state(ddp, optimizer)
        assert all(torch.equal(before[key], after[key]) for key in before) and before.keys() == after.keys()
        assert step(ddp, optimizer, 3)
        return
    if what in ("save", "cut"):
        for number in range(5):
            assert step(ddp, optimizer, number)
    exchanges = [part.exchange for part in optimizer.chained_optimizers]
    cut = torch.tensor(sum(len(exchange.cut) for exchange in exchanges if exchange is not None))
    torch.distributed.all_reduce(cut)
    assert cut >= 4 if what == "cut" else cut == 0
    if what == "load":
        load(ddp, optimizer, directory / "checkpoint")
        check_replicas([ddp.module], optimizer)
        other_bits_on_one_rank_are_named(ddp, optimizer)
    else:
        save(ddp, optimizer, directory / "checkpoint", contextlib.nullcontext() if by else no_collectives())
        for format in ("dp_reshardable", "fully_sharded_model_space", None):
            with pytest.raises(ValueError, match="distrib_optim_sharding_type.*Allowed: fully_reshardable"):
                optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": format})
    sizes = [None] * world
    torch.distributed.all_gather_object(sizes, state_bytes(optimizer))
    state = whole_state(ddp, optimizer)
    assert step(ddp, optimizer, 5)
    after = whole_state(ddp, optimizer)
    if rank == 0:
        torch.save({"state": state, "after": after, "sizes": sizes}, directory / f"{what}{world}{by}.pt")


if __name__ == "__main__":
    what, directory, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, world, what, directory, *sys.argv[4:])) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))

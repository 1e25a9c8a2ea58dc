# SPDX-License-Identifier: Apache-2.0
"""The ranks of tests/parallel/test_context_parallel.py: `python -m tests.parallel.context_ranks <folder>`.

Every case: a small model's loss and gradients on whole sequences, computed by each rank alone, against those of the
context-parallel ranks together. Each rank writes its results as <folder>/<rank>.json. The ranks are forks of one
process, which imports Megatron once for all of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from zaya_plugin import patches

patches.apply_torch()
patches.apply()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from tests.model.conftest import perturb  # noqa: E402
from zaya_plugin.hosts.adapter import micro_batch  # noqa: E402
from zaya_plugin.model.build import build_zaya_model  # noqa: E402
from zaya_plugin.model.config import ZayaConfig  # noqa: E402
from zaya_plugin.parallel.context_exchange import BoundaryExchange  # noqa: E402
from zaya_plugin.parallel.context_order import ContextShard  # noqa: E402

EOD, RANKS = 0, 4


@dataclass(frozen=True)
class Case:
    """One comparison. With size 2 of 4 ranks there are two replicas, which must agree too."""

    name: str
    size: int
    order: str = "zigzag"
    length: int = 24
    dtype: str = "float64"
    packing: bool = False
    reset: bool = False
    deaf: bool = False  # the boundary rows that arrive are dropped: what the comparison must notice
    config: dict = field(default_factory=dict)


FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"])
CASES = (
    Case("cp2", 2, dtype="float32"),
    Case("cp4", 4, dtype="float32"),
    Case("cp2-contiguous", 2, "contiguous", dtype="float32"),
    Case("cp4-chunks-of-two-rows", 4, length=16),
    Case("cp4-contiguous-chunks-of-two-rows", 4, "contiguous", length=8),
    Case("cp4-chunks-of-seven-rows", 4, length=56),
    Case("cp2-contiguous-odd-chunks", 2, "contiguous", length=26),
    Case("cp4-packed", 4, packing=True, length=40),
    Case("cp2-contiguous-packed-reset", 2, "contiguous", packing=True, reset=True),
    Case("cp2-full-recompute-packed", 2, packing=True, reset=True, config=FULL),
    Case("cp4-selective-recompute", 4, config=SELECTIVE),
    Case("cp4-chunks-of-two-rows-packed", 4, length=16, packing=True, reset=True),
    Case("cp2-deaf", 2, deaf=True),
    Case("cp4-window", 4, length=40, config=dict(sliding_window=3, window_attn_skip_freq=2)),
    Case("cp4-window-of-three-chunks-packed", 4, length=40, packing=True, config=dict(sliding_window=12)),
    Case("cp4-window-gathered", 4, length=40, config=dict(sliding_window=30, window_attn_skip_freq=2)),
    Case(
        "cp2-contiguous-window-packed-reset", 2, "contiguous", packing=True, reset=True, config=dict(sliding_window=4)
    ),
)


def build(case: Case, size: int):
    """Return the case's model for `size` context-parallel ranks, with the same weights for any size."""
    torch.manual_seed(99)
    model_parallel_cuda_manual_seed(99, force_reset_rng=True)
    config = ZayaConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=24,
        moe_ffn_hidden_size=24,
        num_moe_experts=4,
        router_hidden_size=16,
        use_cpu_initialization=True,
        context_parallel_size=size,
        context_parallel_order=case.order,
        params_dtype=getattr(torch, case.dtype),
        **case.config,
    )
    model = build_zaya_model(config, vocab_size=64, max_sequence_length=case.length).to(config.params_dtype)
    perturb(model)
    with torch.no_grad():  # tokens that differ by more than the vectors that all of them get added
        model.embedding.word_embeddings.weight.mul_(10.0)
    for layer in model.decoder.layers:  # routers that tell tokens apart, and the skip class in reach
        router = layer.mlp.router
        with torch.no_grad():
            router.out_proj.weight.mul_(2.0)
            for linear in (router.down_proj, router.fc1, router.fc2):
                linear.bias.zero_()
            router.balancing_biases.zero_()
    return model.train()


def batch(case: Case) -> dict[str, torch.Tensor]:
    """Return two sequences; with packing they have documents of 1, 2, 3, ... tokens, and one that ends at a chunk's
    end.
    """
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(1, 64, (2, case.length), generator=generator) for _ in range(2))
    if case.packing:
        tokens[0, [0, 2, 5, 9, case.length // 4 - 1, case.length // 2 - 1, case.length - 2]] = EOD
        tokens[1, [case.length // 4, case.length // 2]] = EOD
    mask = torch.ones(2, case.length)
    mask[0, -5:] = 0.0  # so that ranks hold unequal numbers of tokens that count
    return dict(tokens=tokens, labels=labels, position_ids=torch.arange(case.length).expand(2, -1), loss_mask=mask)


def loss_and_gradients(case: Case, size: int):
    """Return loss, all tokens' losses [b, S], expert ids [L, S, b] and gradients, joined over the context-parallel
    ranks;
    and this rank's traffic."""
    model, whole = build(case, size), batch(case)
    finish = BoundaryExchange.finish
    BoundaryExchange.finish = (lambda self: tuple(x * 0.0 for x in finish(self))) if case.deaf else finish
    group = parallel_state.get_context_parallel_group()
    shard = ContextShard.of(group, case.order)
    part = micro_batch(whole, "cpu", shard, EOD if case.packing else None, case.reset)
    ids = []
    for layer in model.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda module, inputs, output: ids.append(output[1].detach()))
    with counted() as traffic:
        losses = model(part.tokens, part.positions, None, labels=part.labels, packed_seq_params=part.packed)
        first_ids = torch.stack(ids)
        loss = (losses * part.loss_mask).sum() / whole["loss_mask"].sum()
        loss.backward()
    BoundaryExchange.finish = finish
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    if size > 1:
        for tensor in (loss.detach(), *gradients.values()):
            torch.distributed.all_reduce(tensor, group=group)
        losses, first_ids = (gather(x.detach(), shard, group, dim) for x, dim in ((losses, 1), (first_ids, 1)))
    return loss.detach(), losses.detach(), first_ids, gradients, traffic


@contextlib.contextmanager
def counted():
    """Count the bytes that this rank's gathers and exchanges receive and its scatters send, by collective."""
    found = {"all_gather_into_tensor": 0, "reduce_scatter_tensor": 0, "all_to_all_single": 0}
    originals = {name: getattr(torch.distributed, name) for name in found}

    def counting(name):
        def call(output, given, *args, **kwargs):
            found[name] += output.nbytes if name == "all_to_all_single" else abs(output.nbytes - given.nbytes)
            return originals[name](output, given, *args, **kwargs)

        return call

    for name in found:
        setattr(torch.distributed, name, counting(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)


def gather(x, shard, group, dim):
    parts = [torch.empty_like(x.contiguous()) for _ in range(shard.size)]
    torch.distributed.all_gather(parts, x.contiguous(), group=group)
    return shard.join(parts, dim)


def compare(case: Case, one, many) -> dict:
    far = {n: ((g - one[3][n]).norm() / one[3][n].norm().clamp_min(1e-30)).item() for n, g in many[3].items()}
    worst = max(far, key=far.get)
    return dict(
        asdict(case),
        loss=one[0].item(),
        loss_difference=(one[0] - many[0]).abs().item(),
        token_difference=(one[1] - many[1]).abs().max().item(),
        flips=(one[2] != many[2]).sum().item(),
        skipped=(one[2] == 4).sum().item(),
        gradient=far[worst],
        worst=worst,
        traffic=many[4],
        experts=len(one[2].unique()),
    )


def main(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = {}
    for size in (1, 2, 4):  # Megatron's process groups are made three times only: gloo starts threads for each
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        for case in CASES:
            if size in (1, case.size):
                found[case.name, size] = loss_and_gradients(case, size)
    results = [compare(case, found[case.name, 1], found[case.name, case.size]) for case in CASES]
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.multiprocessing.start_processes(main, (sys.argv[1],), nprocs=RANKS, start_method="fork")

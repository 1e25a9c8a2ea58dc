# SPDX-License-Identifier: Apache-2.0
"""Up to four gloo ranks that train one small ZAYA in several layouts: `main(DIRECTORY, LAYOUTS)`.

One rank takes a step and writes a checkpoint, model and optimizer. Every layout loads it or another layout's copy, some
write it again as it is, and takes two steps; <layout>.pt keeps their losses, gradients by checkpoint key and expert
counts, and the tensors of the copy. Ranks are forked, since importing torch costs more than all of the rest; and this
is no main module, for the process that a checkpoint's writer spawns would import that again.
"""

import gc
import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import torch

from zaya_plugin import patches

patches.apply()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from tests.distributed.layout_run import join_gradients, local_gradients  # noqa: E402
from zaya_plugin.model.build import build_zaya_model  # noqa: E402
from zaya_plugin.model.config import ZayaConfig  # noqa: E402
from zaya_plugin.model.router import ZayaRouter  # noqa: E402
from zaya_plugin.optim.balancing import update_biases  # noqa: E402
from zaya_plugin.optim.factory import build_muon_adamw  # noqa: E402
from zaya_plugin.optim.muon import MuonSettings  # noqa: E402
from zaya_plugin.optim.parameter_role import tag_parameters  # noqa: E402

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
METADATA |= {"chained_optim_avoid_prefix": True}  # as megatron.training.checkpointing sets it
SEQUENCES, LENGTH, VOCABULARY = 8, 16, 64


@dataclass(frozen=True)
class Layout:
    """ranks, and how they share the model; muon: with Muon instead of AdamW; copy: writes again what it loaded.

    first: writes the checkpoint that the others load. copy_of: the layout whose copy is loaded instead. after: the
    layout whose checkpoint after its second step is loaded instead; only the third step is then taken.
    """

    name: str
    ranks: int = 1
    tensor: int = 1
    expert: int = 1
    dispatcher: str = "alltoall"
    muon: bool = False
    copy: bool = False
    first: bool = False
    copy_of: str = ""
    after: str = ""
    transformer_impl: str = "local"

    @property
    def start(self) -> str:
        """The checkpoint that it loads at the start."""
        if self.copy_of:
            return f"copy_{self.copy_of}"
        if self.after:
            return f"after_{self.after}"
        return "start_muon" if self.muon else "start"


LAYOUTS = (
    Layout("one", copy=True, first=True),
    Layout("one_muon", muon=True, copy=True, first=True),
    Layout("ep2_muon", 2, expert=2, muon=True, copy=True),
    Layout("ep2", 4, expert=2),
    Layout("ep4", 4, expert=4, dispatcher="allgather"),
    Layout("tp2", 2, tensor=2, copy=True),
    Layout("tp2_ep4", 4, tensor=2, expert=4),
)
TE = "transformer_engine"
TRANSFORMER_ENGINE_LAYOUTS = (
    Layout("one", copy=True, first=True),
    Layout("one_muon", muon=True, copy=True, first=True),
    Layout("te", copy=True, transformer_impl=TE),
    Layout("te_muon", muon=True, copy=True, transformer_impl=TE),
    Layout("te_tp2", 2, tensor=2, copy=True, transformer_impl=TE),
    Layout("local_again", copy=True, copy_of="te_tp2"),
    Layout("te_resumed", after="te", transformer_impl=TE),
    Layout("te_tp2_resumed", 2, tensor=2, after="te_tp2", transformer_impl=TE),
    Layout("local_resumed", after="one"),
)


def config_of(**fields) -> ZayaConfig:
    """Return a small configuration with these further fields."""
    sizes = dict(
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=24,
        moe_ffn_hidden_size=24,
        num_moe_experts=8,
        router_hidden_size=16,
    )
    return ZayaConfig(**sizes, use_cpu_initialization=True, **fields)


def build(layout: Layout):
    """Return the model under DDP, its optimizer and the model itself."""
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    config = config_of(
        num_layers=2,
        init_method_std=0.2,
        router_init_std=0.5,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type=layout.dispatcher,
        transformer_impl=layout.transformer_impl,
    )
    model = build_zaya_model(config, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    tag_parameters(model, default="muon" if layout.muon else "adamw")
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, options, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        adam_eps=1e-6,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    return ddp, build_muon_adamw(get_megatron_optimizer, settings, [ddp], MuonSettings(dtype="fp32")), model


@torch.no_grad()
def perturb(model) -> None:
    """Change vectors from their initial ones and zeros, and let the skip class win some tokens. For one rank, which has
    the whole model.
    """
    generator = torch.Generator().manual_seed(7)
    for p in model.parameters():
        if p.dim() == 1:
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    for router in routers(model):
        router.balancing_biases[-1] = 0.2


def routers(model) -> list[ZayaRouter]:
    return [module for module in model.modules() if isinstance(module, ZayaRouter)]


def step(ddp, optimizer, model, number: int) -> dict:
    """One step on the same global batch in every layout, in micro-batches of two sequences."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    replicas = parallel_state.get_data_parallel_world_size()
    mine = tokens.chunk(replicas)[parallel_state.get_data_parallel_rank()]
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    total = torch.zeros(())
    for sequence in mine.split(2):
        losses = ddp(sequence[:, :-1], torch.arange(LENGTH).expand(len(sequence), -1), None, labels=sequence[:, 1:])
        (losses.sum() / (mine.shape[0] * LENGTH)).backward()
        total += losses.detach().sum()
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    finalize_model_grads([ddp])
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    statistics = update_biases(routers(model), model.config, group)
    gradients = local_gradients([ddp])
    succeeded, norm, _ = optimizer.step()
    assert succeeded
    return {
        "loss": total.item() / tokens[:, 1:].numel(),
        "norm": norm,
        "gradients": gradients,
        "counts": statistics.tokens_per_expert,
    }


def state(model, optimizer, is_loading=False) -> dict:
    sharded = model.sharded_state_dict(metadata=dict(METADATA))
    return {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading, metadata=dict(METADATA))}


def save(model, optimizer, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state(model, optimizer), str(directory))


def run(layout: Layout, directory: Path, layouts: tuple[Layout, ...]) -> dict:
    ddp, optimizer, model = build(layout)
    if layout.first:
        perturb(model)
        optimizer.reload_model_params()
        step(ddp, optimizer, model, 1)
        save(model, optimizer, directory / layout.start)
        torch.save(
            dist_checkpointing.load_plain_tensors(str(directory / layout.start)), directory / f"{layout.start}.pt"
        )
    loaded = dist_checkpointing.load(state(model, optimizer, is_loading=True), str(directory / layout.start))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    result = {}
    if layout.copy:
        save(model, optimizer, directory / f"copy_{layout.name}")
        result["copy"] = dist_checkpointing.load_plain_tensors(str(directory / f"copy_{layout.name}"))
    result["steps"] = [step(ddp, optimizer, model, 2)] if not layout.after else []
    if any(each.after == layout.name for each in layouts):
        save(model, optimizer, directory / f"after_{layout.name}")
    result["steps"].append(step(ddp, optimizer, model, 3))
    for taken in result["steps"]:
        ranks = [None] * layout.ranks
        torch.distributed.all_gather_object(ranks, taken["gradients"])
        taken["gradients"], taken["replicas"] = join_gradients(ranks)
    return result


def twice(directory: Path) -> None:
    """Call a Transformer Engine linear twice before one backward pass, and keep its gradient in twice.pt."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    config = config_of(num_layers=1, params_dtype=torch.bfloat16, bf16=True, transformer_impl=TE)
    linear = build_zaya_model(config, vocab_size=VOCABULARY, max_sequence_length=LENGTH).decoder.layers[0]
    linear = linear.self_attention.linear_q
    weight = linear.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    inputs = [torch.randn(4, 1, 32).bfloat16() for _ in range(2)]
    out = [linear(x)[0] for x in inputs]
    sum(x.sum() for x in out).backward()
    # exact: the gradient of each output is 1
    expected = torch.ones(len(weight), 8) @ torch.cat(inputs).flatten(0, 1).float()
    error = (weight.main_grad - expected).abs().max() / expected.abs().max()
    found = {"fused": weight.grad_added_to_main_grad, "error": error.item()}
    torch.save(found, directory / "twice.pt")
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def rank_main(rank: int, directory: Path, layouts: tuple[Layout, ...]) -> None:
    torch.set_num_threads(1)
    for layout in layouts:
        if rank >= layout.ranks:
            continue
        store = torch.distributed.FileStore(str(directory / f"store_{layout.name}"), layout.ranks)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=layout.ranks)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1,
        )
        result = run(layout, directory, layouts)
        if rank == 0:
            torch.save(result, directory / f"{layout.name}.pt")
        parallel_state.destroy_model_parallel()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main(directory: Path, layouts: tuple[Layout, ...] = LAYOUTS) -> int:
    """Run all layouts in turn; return the exit status of the rank that failed, or 0."""
    gc.freeze()  # Megatron collects garbage at every checkpoint, and need not look at what was imported
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(rank, directory, layouts)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    pending = list(ranks)
    while pending and all(rank.exitcode in (None, 0) for rank in ranks):
        pending[0].join(1.0)
        pending = [rank for rank in pending if rank.exitcode is None]
    for rank in pending:  # the others wait for the one that failed
        rank.terminate()
    return max(abs(rank.exitcode or 0) for rank in ranks)

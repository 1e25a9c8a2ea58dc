# SPDX-License-Identifier: Apache-2.0
"""The experts of one layer: SwiGLU MLPs over rows sorted by expert (transformers `ZayaExperts`).

Every expert's matrix is a named 2-D parameter of its own, so that an optimizer such as Muon sees matrices. All matrices
of a kind lie one after another in one block of memory, so that `hip_ops.grouped_rows` reads them in place, without a
copy. Megatron's DDP moves parameters into its own buffer; `zaya_plugin.optim.sharding.placement` keeps the block whole
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank
from torch import Tensor, nn

import hip_ops
from hip_ops.runtime.main_grad import handed_over_block, main_grad_of
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.low_rank import adapters, add_low_rank_rows_, expert_gradient, scaling
from zaya_plugin.model.parameters import gathered, initial_device, initialize
from zaya_plugin.optim.parameter_role import ExpertBlock, role_of


def as_block(weights: Sequence[Tensor]) -> Tensor:
    """Matrices [out, in] of all experts as one tensor [E, out, in]: a view if they lie in order, else a copy."""
    first = weights[0].detach()
    # A weight that starts between two weights of one storage lies in that storage.
    if not first.is_meta and first.untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr():
        place, size = first.data_ptr(), first.nbytes
        for weight in weights:
            if weight.data_ptr() != place or not weight.is_contiguous():
                break
            place += size
        else:
            rows, columns = first.shape
            return first.as_strided((len(weights), rows, columns), (rows * columns, columns, 1))
    return torch.stack([w.detach() for w in weights])


def weight_gradients(
    matrices: Sequence[Tensor], block: Tensor, a: Tensor, b: Tensor, offsets: Tensor
) -> tuple[Tensor | None, ...]:
    """Add a[rows of e]^T b[rows of e] to the main gradient of every expert's matrix [out, in]. Return what the backward
    function returns for the matrices: `handed_over_block`, or the products where the main gradients form no block.

    block: `as_block` of the matrices. Under Megatron's DDP the parameters' fp32 gradients (`main_grad`) form one block
    too. The backward pass adds the products to it, and `grad_added_to_main_grad` is set for DDP. If the block's
    `gradient_is_unwritten` (zaya_plugin/optim/gradient_buffers.py), the products are written there instead.
    """
    main_grads, expert_block = [main_grad_of(matrix) for matrix in matrices], role_of(matrices[0]).block
    unwritten = expert_block is not None and expert_block.gradient_is_unwritten
    if unwritten:
        expert_block.gradient_is_unwritten = False
    if not any(main_grad is None for main_grad in main_grads):
        main_grad_block = as_block(main_grads)
        if main_grad_block.data_ptr() == main_grads[0].data_ptr():
            hip_ops.grouped_outer_(main_grad_block, a, b, offsets, not unwritten)
            return handed_over_block(matrices, block)
    assert not unwritten, "the main gradients of a block that writes first lie apart"
    return hip_ops.grouped_outer_(torch.empty_like(block), a, b, offsets, False).unbind()


class ExpertMLP(torch.autograd.Function):
    """y = W2_e (swiglu(W1_e x) * weight) for rows sorted by expert.

    Padding rows (hip_ops/ops/expert_permutation/reference.py) are not read. In y and in the gradient of x they stay
    uninitialised: `hip_ops.unpermute_from_experts` and the backward pass of `hip_ops.permute_to_experts` ignore them.
    Their gradient of weights is 0.

    Saves x and the gate and up activations; the SwiGLU output is recomputed in the backward pass. recompute_rows: a
    function that computes x again, or None; with it x is not saved.

    adapters: of low_rank.py, lora_A [E, r, in] and lora_B [E, out, r] of W1, then of W2, E = 1 for all experts together;
    () for none. scale: of them.
    """

    @staticmethod
    def forward(ctx, x, weights, offsets, num_experts, recompute_rows, scale, *matrices):
        ctx.matrices = matrices[:num_experts], matrices[num_experts : 2 * num_experts]
        ctx.adapters, ctx.scale = matrices[2 * num_experts :], scale
        fc1, fc2 = map(as_block, ctx.matrices)
        a1, b1, a2, b2 = (matrix.detach().mT for matrix in ctx.adapters) if ctx.adapters else [None] * 4
        ends = offsets if a1 is None else offsets[-len(a1) :]
        low1 = low2 = None
        gate_up = hip_ops.grouped_rows(x, fc1.transpose(1, 2), offsets)
        if ctx.adapters:
            low1 = add_low_rank_rows_(gate_up, x, a1, b1, scale, ends)
        hidden = hip_ops.weighted_swiglu(gate_up, weights, offsets)
        y = hip_ops.grouped_rows(hidden, fc2.transpose(1, 2), offsets)
        if ctx.adapters:
            low2 = add_low_rank_rows_(y, hidden, a2, b2, scale, ends)
        ctx.save_for_backward(None if recompute_rows else x, weights, offsets, gate_up, fc1, fc2, low1, low2)
        ctx.recompute_rows = recompute_rows
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):
        x, weights, offsets, gate_up, fc1, fc2, low1, low2 = ctx.saved_tensors
        if ctx.recompute_rows is not None:
            x = ctx.recompute_rows()
        grad_y = grad_y.contiguous()
        a1, b1, a2, b2 = ctx.adapters or [None] * 4
        ends = offsets if a1 is None else offsets[-len(a1) :]
        grad_hidden = hip_ops.grouped_rows(grad_y, fc2, offsets)
        if ctx.adapters:
            grad_low2 = add_low_rank_rows_(grad_hidden, grad_y, b2.detach(), a2.detach(), ctx.scale, ends)
        grad_gate_up, grad_weights, hidden = hip_ops.weighted_swiglu_backward(grad_hidden, gate_up, weights, offsets)
        fc1_matrices, fc2_matrices = ctx.matrices
        grad_fc1 = grad_fc2 = [None] * len(fc1_matrices)
        if any(ctx.needs_input_grad[6 : 6 + 2 * len(fc1_matrices)]):  # frozen together, or not at all
            grad_fc2 = weight_gradients(fc2_matrices, fc2, grad_y, hidden, offsets)
            grad_fc1 = weight_gradients(fc1_matrices, fc1, grad_gate_up, x, offsets)
        grad_x, grad_adapters = hip_ops.grouped_rows(grad_gate_up, fc1, offsets), ()
        if ctx.adapters:
            grad_low1 = add_low_rank_rows_(grad_x, grad_gate_up, b1.detach(), a1.detach(), ctx.scale, ends)
            pairs = (a1, grad_low1, x), (b1, grad_gate_up, low1), (a2, grad_low2, hidden), (b2, grad_y, low2)
            grad_adapters = (expert_gradient(*pair, ends) for pair in pairs)
        return grad_x, grad_weights, *[None] * 4, *grad_fc1, *grad_fc2, *grad_adapters


class GroupedWeight(nn.Module):
    """Matrices [output_size, input_size] of this rank's experts as parameters weight0 .. over one block of memory.

    Args: config; local_experts, global indices of the experts of this rank; sizes; init_method. Every rank draws the
    initial values of all experts, so that they do not depend on the layout.
    """

    def __init__(self, config: ZayaConfig, local_experts: range, output_size: int, input_size: int, init_method):
        super().__init__()
        self.num_experts = len(local_experts)
        self.names = tuple(f"weight{expert}" for expert in range(self.num_experts))
        shape = (self.num_experts, output_size, input_size)
        block = torch.empty(shape, dtype=config.params_dtype, device=initial_device(config))
        remote = torch.empty_like(block[0]) if self.num_experts < config.num_moe_experts else None

        def draw(block):
            # Matrix by matrix: an initialiser that looks at fan-in must not see three dimensions.
            for expert in range(config.num_moe_experts):
                init_method(block[local_experts.index(expert)] if expert in local_experts else remote)

        initialize(config, block, draw)
        # Megatron lays parameters out in reverse order of registration, so this puts them ascending there.
        for expert in reversed(range(self.num_experts)):
            self.register_parameter(f"weight{expert}", nn.Parameter(block[expert]))
            # Megatron sums its gradient over the ranks that hold the same expert. Set also where all ranks hold it:
            # optimizer and checkpoint then have a part for experts in every layout, and state can move between layouts.
            self._parameters[f"weight{expert}"].allreduce = False

    def forward(self) -> list[nn.Parameter]:
        """Return `matrices`. The call runs DDP's hook, which waits for parameters that are being gathered."""
        return self.matrices()

    def matrices(self) -> list[nn.Parameter]:
        """Return the parameters in ascending order of experts."""
        parameters = self._parameters
        return [parameters[name] for name in self.names]

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # A cast or a move gives every matrix its own storage: lay them out as one block again.
        matrices = self.matrices()
        block = as_block(matrices)
        for expert, matrix in enumerate(matrices):
            matrix.data = block[expert]
        return self


class GroupedExperts(MegatronModule):
    """All experts of a layer on hip_ops' grouped products.

    Args: num_local_experts, the experts on this rank (E / expert-parallel ranks); config; pg_collection with ep,
    expt_tp and expt_dp.
    """

    def __init__(self, num_local_experts: int, config: ZayaConfig, pg_collection=None):
        super().__init__(config)
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.pg_collection = pg_collection
        self.num_local_experts = num_local_experts
        self.first_expert = get_pg_rank(pg_collection.ep) * num_local_experts
        local = range(self.first_expert, self.first_expert + num_local_experts)
        h, f = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = GroupedWeight(config, local, 2 * f, h, config.init_method)
        self.linear_fc2 = GroupedWeight(config, local, h, f, config.output_init_method)
        self.adapters = adapters(config, "experts", {"linear_fc1": (2 * f, h), "linear_fc2": (h, f)}, local)

    def set_layer_number(self, layer_number: int) -> None:
        """Give the matrices their roles as members of the layer's two blocks. layer_number: in the whole model, from
        1.
        """
        for weight in (self.linear_fc1, self.linear_fc2):
            block = ExpertBlock(layer_number, weight.num_experts)
            for index, matrix in enumerate(weight.matrices()):
                matrix.zaya_role = replace(role_of(matrix), block=block, index=index)

    def forward(
        self, x: Tensor, weights: Tensor, offsets: Tensor, recompute_rows: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """x [T, h] sorted by expert, weights [T], offsets int32 [E] (end of each expert's rows) -> [T, h].

        Rows at and beyond offsets[-1] are padding rows and stay uninitialised. recompute_rows: returns x once more in
        the backward pass, so that it is not kept until then.
        """
        matrices, scale = self.linear_fc1() + self.linear_fc2(), 1.0
        if self.adapters is not None:
            scale = scaling(self.config)
            matrices += [matrix for layer in self.adapters.values() for matrix in gathered(layer).parameters()]
        return ExpertMLP.apply(x, weights, offsets, self.num_local_experts, recompute_rows, scale, *matrices)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """One checkpoint key per expert and matrix, with the expert's global index."""
        return expert_sharded_state_dict(self, prefix, sharded_offsets, metadata)


def expert_sharded_state_dict(experts: MegatronModule, prefix: str, sharded_offsets: tuple, metadata: dict | None):
    """Sharded state dict of a module with linear_fc1 and linear_fc2 that hold weight0 .. weight{local experts - 1}.

    The keys are the same for every implementation of the experts and every layout, so a checkpoint moves between them.
    One of the ranks that hold the same expert writes it.
    """
    groups = experts.pg_collection
    sharded = {}
    for name in ("linear_fc1", "linear_fc2"):
        module = getattr(experts, name)
        for local in range(experts.num_local_experts):
            key = f"{prefix}{name}.weight{experts.first_expert + local}"
            tensors = make_sharded_tensors_for_checkpoint(
                {key: getattr(module, f"weight{local}")},
                "",
                {},
                sharded_offsets,
                tp_group=groups.expt_tp,
                dp_cp_group=groups.expt_dp,
            )
            sharded[f"{prefix}{name}.weight{local}"] = tensors[key]
    if getattr(experts, "adapters", None) is not None:
        is_shared = experts.config.lora_experts == "shared"
        sharded |= make_sharded_tensors_for_checkpoint(
            state := experts.adapters.state_dict(keep_vars=True),
            f"{prefix}adapters.",
            # Expert-parallel ranks hold consecutive experts. A shared adapter is on all data-parallel ranks, which divide
            # its optimizer state among them.
            {} if is_shared else dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=groups.expt_tp if is_shared else groups.ep,
            dp_cp_group=metadata["dp_cp_group"] if is_shared else groups.expt_dp,
        )
    return sharded

# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention with Megatron's core-attention interface, on context-parallel ranks and packed documents
too.

`config.core_attention` names one of `VERSIONS`. All have one interface: this rank's queries against the keys and values
of the sequence up to the last query, the mask aligned at the end (lower right). At its first use on a device a version
is compared with attention written out, gradients included; a version that fails is replaced by `sdpa` with a warning.
`sdpa` and `cudnn` compute a context-parallel rank's chunks in blocks where that is faster (block_attention.py). Packed
documents use torch's flex_attention on an accelerator and a mask of all pairs elsewhere, with any version.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from zaya_plugin.errors import mistake
from zaya_plugin.model.aiter_attention import aiter_flash
from zaya_plugin.model.attention_check import check_attention
from zaya_plugin.model.block_attention import block_attention, block_kernel
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.key_value_gather import gather_key_value
from zaya_plugin.parallel.packed_documents import PackedDocuments

logger = logging.getLogger(__name__)
# (query [s, b, n, d], key and value [t, b, g, d], scale) -> [s, b, n * d]; the queries are the last s of t tokens
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute softmax(scale * q k^T + mask) v with grouped key-value heads; the queries are the last s of t tokens.

    Args: query [s, b, n, d], key and value [t, b, g, d] with n a multiple of g and t >= s. Returns [s, b, n * d].
    """
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
    grouped = query.shape[1] != key.shape[1]
    s, t = query.shape[2], key.shape[2]
    if s == t:
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        mask = causal_lower_right(s, t) if query.is_cuda else lower_right_mask(s, t, query.device)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return context.permute(2, 0, 1, 3).flatten(2)


def lower_right_mask(s: int, t: int, device: torch.device) -> Tensor:
    """Return bool [s, t]: query i sees keys up to i + t - s."""
    return torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`causal_attention` with cuDNN's kernel; with fewer queries than keys, which it does not support, torch chooses."""
    if len(query) != len(key):
        return causal_attention(query, key, value, scale)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return causal_attention(query, key, value, scale)


def document_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, packed: PackedDocuments) -> Tensor:
    """Compute causal attention inside each document: this rank's queries [s, b, n, d], all keys and values [S, b, g,
    d].
    """
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda:
        context = _flex_attention()(query, key, value, block_mask=packed.block_mask, scale=scale, enable_gqa=grouped)
    else:
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=packed.dense_mask, scale=scale, enable_gqa=grouped
        )
    return context.permute(2, 0, 1, 3).flatten(2)


@functools.cache
def _flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flash_package(name: str, module: str) -> Attention:
    """Return attention by a module with FlashAttention-2's flash_attn_func.

    Raises:
        ValueError: it cannot be imported.
    """
    try:
        flash = importlib.import_module(module).flash_attn_func
    except Exception as missing:  # ImportError; OSError of a library that cannot be loaded; and others of a package
        raise _unavailable(name, f"{module} with flash_attn_func cannot be imported here ({missing})") from missing
    return folded(flash)


def folded(flash: Callable) -> Attention:
    """Return attention by a function with FlashAttention-2's arguments: flash(q, k, v, *, softmax_scale, causal,
    deterministic).
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # All sequences become heads of one sequence, query heads beside their group's, which keeps the layout of the
        # memory. With batch first the packages would return another layout, which the projection behind would copy.
        batch = query.shape[1:3]
        query, key, value = (x.flatten(1, 2).unsqueeze(0) for x in (query, key, value))  # [1, s, b * heads, d]
        # Without `deterministic` the gradients are sums by atomics; the packages' defaults differ.
        exact = torch.are_deterministic_algorithms_enabled()
        context = flash(query, key, value, softmax_scale=scale, causal=True, deterministic=exact)
        # flash_attn_4 returns a tuple
        context = context[0] if isinstance(context, tuple) else context
        return context.squeeze(0).unflatten(1, batch).flatten(2)

    return attend


def transformer_engine_attention(name: str) -> Attention:
    """Return Transformer Engine's DotProductAttention, which chooses among cuDNN, FlashAttention and, on ROCm, CK and
    AITER itself.

    Raises:
        ValueError: it cannot be imported.
    """
    try:
        from transformer_engine.pytorch import DotProductAttention
    except Exception as missing:  # ImportError; RuntimeError without its compiled part; OSError of a missing library
        raise _unavailable(name, f"transformer_engine.pytorch cannot be imported here ({missing})") from missing

    @functools.cache
    def module(heads: int, groups: int, head_dim: int, scale: float, exact: bool) -> nn.Module:
        # Not a part of the model: it has no parameters, and its `_extra_state` stays out of checkpoints. It reads
        # torch's switch of deterministic algorithms (`exact`) when it is made.
        return DotProductAttention(
            heads, head_dim, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd", softmax_scale=scale
        )

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        exact = torch.are_deterministic_algorithms_enabled()
        own = module(query.shape[2], key.shape[2], query.shape[3], scale, exact)
        return own(query, key, value, attn_mask_type="causal" if len(query) == len(key) else "causal_bottom_right")

    return attend


def torch_cudnn(name: str) -> Attention:
    """Return `cudnn_attention`. Raises ValueError where torch has no cuDNN."""
    if torch.version.cuda is None:
        raise _unavailable(name, "this torch is not built with cuDNN")
    return cudnn_attention


def _unavailable(name: str, problem: str) -> ValueError:
    return mistake(
        "core_attention", name, problem=problem, allowed="sdpa without that package", fix="cluster.core_attention=sdpa"
    )


# Modules with FlashAttention-2's function; flash_attn_4 is flash-attn-4, for Hopper and later.
PACKAGES = {"flash_attn": "flash_attn", "flash_attn_4": "flash_attn.cute"}
# The values of cluster.core_attention, and the function that makes the version of that name.
VERSIONS: dict[str, Callable[[str], Attention]] = {
    "sdpa": lambda name: causal_attention,
    "cudnn": torch_cudnn,
    **{name: functools.partial(flash_package, module=module) for name, module in PACKAGES.items()},
    "aiter": lambda name: folded(aiter_flash()),
    "transformer_engine": transformer_engine_attention,
}
# Queries of the check. AITER's training kernel starts at 129 queries, another backward kernel at 257 keys.
ROWS = 320
IN_BLOCKS = (causal_attention, cudnn_attention)  # chunks of a sequence: by block_attention, where it has a kernel


@functools.cache
def core_attention(name: str) -> Attention:
    """Return the version called `name`, unchecked.

    Raises:
        ValueError: there is no such version, or its package cannot be imported.
    """
    if name not in VERSIONS:
        raise mistake(
            "core_attention",
            name,
            problem="no such version",
            allowed=", ".join(VERSIONS),
            fix="cluster.core_attention=sdpa",
        )
    return VERSIONS[name](name)


def checked_attention(name: str, query: Tensor, key: Tensor) -> Attention:
    """Return the version called `name` for queries [s, b, n, d] and keys [t, b, g, d], or sdpa if it fails the check.

    Raises:
        RuntimeError: sdpa itself fails.
    """
    sizes = (query.shape[2], key.shape[2], query.shape[3])
    return _attention_for(name, query.device, query.dtype, *sizes, len(query) == len(key))


def _attention_for(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, groups: int, head_dim: int, square: bool
) -> Attention:
    if name == "sdpa" and device.type != "cuda":  # torch's plain attention
        return causal_attention
    exact = torch.are_deterministic_algorithms_enabled()
    return _checked(name, device, dtype, heads, groups, head_dim, square, exact)


def running(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, groups: int, head_dim: int, in_chunks: bool
) -> tuple[str, ...]:
    """Check what the version called `name` runs for these heads of a rank, and return the names: for whole sequences,
    and with `in_chunks` for a context-parallel rank's chunks.

    Raises:
        ValueError, RuntimeError: see `core_attention` and `checked_attention`.
    """
    if in_chunks and core_attention(name) in IN_BLOCKS:
        query, key = (torch.empty(128, 1, count, head_dim, dtype=dtype, device=device) for count in (heads, groups))
        if block_kernel(query, key) is not None:
            return (f"{name} in blocks",)
    found = (
        _attention_for(name, device, dtype, heads, groups, head_dim, square)
        for square in ((True, False) if in_chunks else (True,))
    )
    return tuple(name if attend is core_attention(name) else "sdpa" for attend in found)


@functools.cache
def _checked(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    head_dim: int,
    square: bool,
    exact: bool,  # deterministic algorithms choose another kernel
) -> Attention:
    attend, start = core_attention(name), 0 if square else ROWS
    queries = "whole sequences" if square else "queries at the end of the keys"
    # Before the check: should a kernel end the process, the log names it.
    logger.info("core attention: checking %s for %s of %d and %d heads in %s", name, queries, heads, groups, dtype)
    found = check_attention(
        attend, device=device, dtype=dtype, heads=heads, groups=groups, head_dim=head_dim, rows=ROWS, starts=(start,)
    )
    if not found:
        logger.info("core attention: %s for %s", name, queries)
        return attend
    if name == "sdpa":
        raise RuntimeError(
            f"core_attention=sdpa: torch's attention is wrong on {device} for {queries} in {dtype}: {found}. "
            f"Allowed: another version here, of {', '.join(VERSIONS)}. Fix: cluster.core_attention=flash_attn"
        )
    logger.warning("core_attention=%s is not used for %s: %s. sdpa is used.", name, queries, found)
    return _checked("sdpa", device, dtype, heads, groups, head_dim, square, exact)


def chunk_by_chunk(
    attend: Attention, query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], scale: float
) -> Tensor:
    """Compute attention of each chunk of queries to the keys up to the chunk's end."""
    parts = query.chunk(len(starts))
    ends = [start + len(parts[0]) for start in starts]
    return torch.cat([attend(part, key[:end], value[:end], scale) for part, end in zip(parts, ends, strict=True)])


class ZayaCoreAttention(nn.Module):
    """Core attention without dropout; the mask is causal and `attention_mask` is not read.

    Under context parallelism it gathers the other ranks' keys and values itself, so that recomputing it repeats the
    collective and the gathered tensors are not kept.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert not (attention_dropout or config.attention_dropout)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.context_group = pg_collection.cp
        self.shard = ContextShard.of(self.context_group, config.context_parallel_order)
        self.name = config.core_attention
        core_attention(self.name)  # a missing package ends the run here, not in the first step
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments | None = None,
    ) -> Tensor:
        """query [s, b, n, d], key and value [s, b, g, d], this rank's rows of the sequence -> [s, b, n * d]."""
        assert attention_bias is None
        if self.shard.size > 1:
            key, value = gather_key_value(key, value, self.shard, self.context_group)
        if packed_seq_params is not None:
            return document_attention(query, key, value, self.softmax_scale, packed_seq_params)
        if self.shard.size == 1:
            return self._attend(query, key, value, self.softmax_scale)
        starts = self.shard.starts(len(query))
        kernel = block_kernel(query, key) if core_attention(self.name) in IN_BLOCKS else None
        if kernel is not None:
            return block_attention(query, key, value, starts, self.softmax_scale, kernel)
        return chunk_by_chunk(self._attend, query, key, value, starts, self.softmax_scale)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return checked_attention(self.name, query, key)(query, key, value, scale)

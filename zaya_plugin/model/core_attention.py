# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention with Megatron's core-attention interface, on context-parallel ranks and packed documents
too.

One interface for all back ends: this rank's queries against the keys and values of the sequence up to the last query,
the mask aligned at the end (lower right), so that a flash kernel needs no mask in memory. `sdpa` is torch's own (flash,
cuDNN or plain, as torch chooses), for a context-parallel rank's chunks in blocks where that is faster
(block_attention.py); `flash_attn`, `flash_attn_4` and `aiter` are those packages where the environment has them. Packed
documents go through torch's flex_attention on an accelerator and through a mask of all pairs elsewhere, whatever the
back end.
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
from torch.nn.attention.bias import causal_lower_right

from zaya_plugin.errors import mistake
from zaya_plugin.model.block_attention import block_attention, block_kernel
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.key_value_gather import gather_key_value
from zaya_plugin.parallel.packed_documents import PackedDocuments

logger = logging.getLogger(__name__)


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
        if query.is_cuda:
            require_lower_right(query.device, query.dtype, query.shape[-1], grouped)
            mask = causal_lower_right(s, t)
        else:
            mask = lower_right_mask(s, t, query.device)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return context.permute(2, 0, 1, 3).flatten(2)


def lower_right_mask(s: int, t: int, device: torch.device) -> Tensor:
    """Return bool [s, t]: query i sees keys up to i + t - s."""
    return torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)


@functools.cache
def require_lower_right(device: torch.device, dtype: torch.dtype, head_dim: int, grouped: bool) -> None:
    """Compare torch's lower-right causal attention with an explicit mask, once; kernels differ in the alignment.

    Raises:
        RuntimeError: the kernel aligns the mask elsewhere.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 4, 16, head_dim), *((1, 2 if grouped else 4, 48, head_dim),) * 2)
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    causal = causal_lower_right(16, 48)
    got = F.scaled_dot_product_attention(query, key, value, attn_mask=causal, enable_gqa=grouped).float()
    mask = lower_right_mask(16, 48, device)
    expected = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=mask, enable_gqa=grouped
    )
    if not (got - expected).abs().max() < 0.05:
        raise RuntimeError(
            f"torch's causal attention for {dtype} on {torch.cuda.get_device_name(device)} does not align the mask at the end "
            "of the keys, which context parallelism needs; set cluster.core_attention to aiter or flash_attn"
        )


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


class Sdpa:
    """torch's scaled_dot_product_attention: flash, cuDNN or plain, as torch chooses."""

    def whole(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """`causal_attention`: query [s, b, n, d], key and value [t, b, g, d] -> [s, b, n * d]."""
        return causal_attention(query, key, value, scale)

    def chunks(self, query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], scale: float) -> Tensor:
        """Compute attention for equal chunks of queries that begin at positions `starts` of the keys' sequence; in
        blocks if a kernel exists.
        """
        kernel = block_kernel(query, key)
        if kernel is None:
            return chunk_by_chunk(self.whole, query, key, value, starts, scale)
        return block_attention(query, key, value, starts, scale, kernel)


class FlashPackage:
    """A package with FlashAttention-2's flash_attn_func. Raises ValueError where it cannot be imported."""

    def __init__(self, name: str, module: str):
        try:
            self.flash = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError) as missing:
            raise mistake(
                "core_attention",
                name,
                problem=f"{module} with flash_attn_func cannot be imported here ({missing})",
                allowed="sdpa without that package",
                fix="cluster.core_attention=sdpa",
            ) from missing

    def whole(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As `Sdpa.whole`."""
        # All sequences become heads of one sequence, query heads beside their group's, which keeps the layout of the
        # memory. With batch first the packages would return another layout, which the projection behind would copy.
        batch = query.shape[1:3]
        query, key, value = (x.flatten(1, 2).unsqueeze(0) for x in (query, key, value))  # [1, s, b * heads, d]
        # Without `deterministic` the gradients are sums by atomics; the packages' defaults differ.
        exact = torch.are_deterministic_algorithms_enabled()
        context = self.flash(query, key, value, softmax_scale=scale, causal=True, deterministic=exact)
        # flash_attn_4 and some versions of aiter return a tuple
        context = context[0] if isinstance(context, tuple) else context
        return context.squeeze(0).unflatten(1, batch).flatten(2)

    def chunks(self, query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], scale: float) -> Tensor:
        """As `Sdpa.chunks`."""
        return chunk_by_chunk(self.whole, query, key, value, starts, scale)


def chunk_by_chunk(
    whole: Callable, query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], scale: float
) -> Tensor:
    """Compute attention of each chunk of queries to the keys up to the chunk's end."""
    parts = query.chunk(len(starts))
    ends = [start + len(parts[0]) for start in starts]
    return torch.cat([whole(part, key[:end], value[:end], scale) for part, end in zip(parts, ends, strict=True)])


# Packages with FlashAttention-2's function, by the value of cluster.core_attention; flash_attn_4 is flash-attn-4, for
# Hopper and later.
PACKAGES = {"flash_attn": "flash_attn", "flash_attn_4": "flash_attn.cute", "aiter": "aiter"}
VERSIONS: dict[str, Callable[[], Sdpa | FlashPackage]] = {
    "sdpa": Sdpa,
    **{name: functools.partial(FlashPackage, name, module) for name, module in PACKAGES.items()},
}


@functools.cache
def core_attention(name: str) -> Sdpa | FlashPackage:
    """Return the version called `name`; logged at its first use. Raises ValueError if it does not exist or cannot be
    imported.
    """
    if name not in VERSIONS:
        raise mistake(
            "core_attention",
            name,
            problem="no such version",
            allowed=", ".join(VERSIONS),
            fix="cluster.core_attention=sdpa",
        )
    made = VERSIONS[name]()
    logger.info("core attention: %s", name)
    return made


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
        self.version = core_attention(config.core_attention)
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
            return self.version.whole(query, key, value, self.softmax_scale)
        return self.version.chunks(query, key, value, self.shard.starts(len(query)), self.softmax_scale)

# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention with Megatron's core-attention interface, on context-parallel ranks and packed documents
too.

`config.core_attention` names a version of `CoreAttention`, or `auto`. All versions have one interface: this rank's
queries against the keys and values of the sequence up to the last query, the mask aligned at the end (lower right). At
its first use on a device a version is compared with attention written out, gradients included, except torch's own on a
CPU and for documents. hip_ops' class `Versions` chooses, compares and reports, as for its own operators. CoreAttention
is not an `Operator`: it is not registered with torch, does not check its arguments, and records gradients by the
versions' own autograd. cluster.kernels and HIP_OPS_KERNELS do not select its version,
and no version is a kernel of hip_ops.

The way of a call: `ZayaCoreAttention.forward`, `core_attention` (one CoreAttention for all layers),
`CoreAttention.__call__`, `Versions.implementations`, the function of `CoreAttention._function_of`. A call has one of
four forms:

    whole      all queries of a sequence: every version; `auto` tries those of AUTO_ORDER, fastest first
    chunks     a context-parallel rank's chunks of queries: with auto, sdpa and cudnn in blocks (block_attention.py)
               where torch has a kernel for them, otherwise chunk by chunk by the version itself (cudnn: by sdpa; auto:
               by AITER on AMD GPUs, else by sdpa)
    documents  packed documents: by torch with every value of the key, flex_attention on an accelerator and sdpa with a
               mask of all pairs elsewhere; the log says so where another version is requested. The packages' kernels
               for sequences of several lengths (varlen) are not used: their arguments depend on the number of
               documents, which the host would have to read in every step

    window     a sliding window, of whole sequences or of a chunk's queries: the versions that take one, of torch's
               flex_attention on an accelerator and sdpa with a mask of all pairs elsewhere. cudnn, which torch gives no
               window, raises. In packed documents the mask of `documents` has the window too

Under context parallelism a layer with a window calls the last two forms once for each chunk of queries. A layer whose
window is not shorter than the sequence has the first three forms.

A version that is requested by name and is not available, or is wrong, raises (cudnn for chunks: torch's attention takes
what blocks do not); `auto` takes the next one. AITER, which was not run by this project, is the first of `auto` on
MI300X and MI355X where it is installed. With a warning that says why, the next version runs where AITER cannot be
imported, where its result or one of its gradients fails the check, and with auto next to a Transformer Engine whose
library breaks AITER's backward pass.
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

from hip_ops.errors import warn_once
from hip_ops.runtime import aiter
from hip_ops.runtime.choice import Versions
from hip_ops.runtime.launch import architecture
from hip_ops.versions import Request
from zaya_plugin.ground.errors import mistake
from zaya_plugin.model.aiter_attention import aiter_flash
from zaya_plugin.model.block_attention import block_attention, takes_blocks
from zaya_plugin.parallel.context_exchange import gather_key_value, key_value_in_reach
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.packed_documents import PackedDocuments, block_mask_of

logger = logging.getLogger(__name__)
# (query [s, b, n, d], key and value [t, b, g, d], scale, window=None) -> [s, b, n * d]; the queries are the last s of t
# tokens, and each sees `window` tokens before itself, or all of them
Attention = Callable[..., Tensor]
# The order of `auto` by architecture, in half precision: fastest first. sdpa follows, and is the only one elsewhere. On
# sm_90 as measured in steps of ZAYA1-base (docs/log.md, 2026-11-22: FlashAttention-4). On gfx942 not measured by this
# project: docs/predictions.md has the public rates of AITER and of AOTriton, which sdpa calls.
AUTO_ORDER = {"sm_90": ("flash_attn_4", "cudnn"), "gfx942": ("aiter",), "gfx950": ("aiter",)}
# Modules with FlashAttention-2's function; flash_attn_4 is flash-attn-4, for Hopper and later.
PACKAGES = {"flash_attn": "flash_attn", "flash_attn_4": "flash_attn.cute"}
VERSIONS = ("cudnn", *PACKAGES, "aiter", "transformer_engine", "sdpa")
FORMS = {
    "whole": VERSIONS,
    "chunks": ("blocks", *(version for version in VERSIONS if version != "cudnn")),  # blocks are cuDNN's kernel
    "documents": ("flex_attention", "sdpa"),
    "window": (*(version for version in VERSIONS[:-1] if version != "cudnn"), "flex_attention", "sdpa"),
}
# What a version that a form lacks does not compute.
UNSUPPORTED_CALLS = {"chunks": "chunks of a sequence other than in blocks", "documents": "packed documents"}
CHECKED_WINDOW = 100  # previous tokens, in the check
# Queries of the check, half as many a chunk. AITER's training kernel starts at 129 queries, another backward kernel at
# 257 keys.
CHECKED_ROWS = 320
MAGNITUDES = (1.0, 6.0)  # of queries and keys: the second makes scores of about 36, where the softmax is nearly one-hot
# Largest relative error (Frobenius norm) of the result and of each gradient; fp32 products may be TF32.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def by_torch(function: Callable, query: Tensor, key: Tensor, value: Tensor, scale: float, **mask) -> Tensor:
    """Return [s, b, n * d] by one of torch's functions, which take heads before rows; shapes as `causal_attention`."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
    context = function(query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1], **mask)
    return context.permute(2, 0, 1, 3).flatten(2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Compute softmax(scale * q k^T + mask) v with grouped key-value heads; the queries are the last s of t tokens.

    Args: query [s, b, n, d], key and value [t, b, g, d] with n a multiple of g and t >= s; window: previous tokens that
    a token sees, None: all. Returns [s, b, n * d].
    """
    s, t = len(query), len(key)
    if s == t and window is None:
        mask = dict(is_causal=True)
    elif query.is_cuda and window is None:
        mask = dict(attn_mask=causal_lower_right(s, t))
    else:
        mask = dict(attn_mask=lower_right_mask(s, t, query.device, window))
    return by_torch(F.scaled_dot_product_attention, query, key, value, scale, **mask)


def lower_right_mask(s: int, t: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return bool [s, t]: query i sees keys up to i + t - s; with a window that key and `window` keys before it."""
    seen = torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)
    return seen if window is None else seen.triu(t - s - window)


def flex_window_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """`causal_attention` with a window by torch's flex_attention, which skips blocks of keys outside of it."""
    mask = window_mask(len(query), len(key), window, query.device)
    return by_torch(_flex_attention(query.is_cuda), query, key, value, scale, block_mask=mask)


@functools.lru_cache(maxsize=16)  # of the lengths of a run: training, validation, a rank's chunks
def window_mask(s: int, t: int, window: int, device: torch.device):
    """Return `lower_right_mask` as a BlockMask."""

    def permitted(batch, head, query, key):
        row = query + (t - s)
        return (row >= key) & (row - key <= window)

    return block_mask_of(permitted, None, s, t, device)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`causal_attention` with cuDNN's kernel; with fewer queries than keys, which it does not support,
    torch chooses.
    """
    if len(query) != len(key):
        return causal_attention(query, key, value, scale)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return causal_attention(query, key, value, scale)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, packed: PackedDocuments, *part
) -> Tensor:
    """Compute causal attention inside each document: this rank's queries [s, b, n, d], all keys and values [S, b, g,
    d]; with `part` the queries and keys that `PackedDocuments.mask` describes.
    """
    if query.is_cuda:
        return by_torch(_flex_attention(True), query, key, value, scale, block_mask=packed.mask(True, *part))
    mask = packed.mask(False, *part)
    return by_torch(F.scaled_dot_product_attention, query, key, value, scale, attn_mask=mask)


@functools.cache
def _flex_attention(compiled: bool) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    # By its kernel for long queries: the one for fewer than 128 of them fails with 33 or more rows and groups of four heads.
    long_queries = functools.partial(flex_attention, kernel_options={"FORCE_USE_FLEX_ATTENTION": True})
    return torch.compile(long_queries, dynamic=False)


def folded(flash: Callable) -> Attention:
    """Return attention by a function with FlashAttention-2's arguments: flash(q, k, v, *, softmax_scale, causal,
    deterministic), and window_size=(previous tokens, 0) where there is a window.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        sliding = {} if window is None else {"window_size": (window, 0)}
        # All sequences become heads of one sequence, query heads next to their group's, which keeps the layout of the
        # memory. With batch first the packages would return another layout, which the projection behind would copy.
        batch = query.shape[1:3]
        query, key, value = (x.flatten(1, 2).unsqueeze(0) for x in (query, key, value))  # [1, s, b * heads, d]
        # Without `deterministic` the gradients are sums by atomics; the packages' defaults differ.
        exact = torch.are_deterministic_algorithms_enabled()
        context = flash(query, key, value, softmax_scale=scale, causal=True, deterministic=exact, **sliding)
        # flash_attn_4 returns a tuple
        context = context[0] if isinstance(context, tuple) else context
        return context.squeeze(0).unflatten(1, batch).flatten(2)

    return attend


def transformer_engine_attention() -> Attention:
    """Return Transformer Engine's DotProductAttention, which chooses among cuDNN, FlashAttention and, on ROCm, CK and
    AITER itself.
    """
    from transformer_engine.pytorch import DotProductAttention

    @functools.cache
    def module(heads: int, groups: int, head_dim: int, scale: float, exact: bool) -> nn.Module:
        # Not a part of the model: it has no parameters, and its `_extra_state` stays out of checkpoints. It reads
        # torch's switch of deterministic algorithms (`exact`) when it is made.
        return DotProductAttention(
            heads, head_dim, num_gqa_groups=groups, attention_dropout=0.0, qkv_format="sbhd", softmax_scale=scale
        )

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        exact = torch.are_deterministic_algorithms_enabled()
        own = module(query.shape[2], key.shape[2], query.shape[3], scale, exact)
        mask = "causal" if len(query) == len(key) else "causal_bottom_right"
        return own(query, key, value, attn_mask_type=mask, window_size=None if window is None else (window, 0))

    return attend


@functools.cache
def attention_of(version: str) -> Attention:
    """Return the version of that name for whole sequences, or queries at the end of the keys, unchecked.

    Raises the error of a package that cannot be imported, and ValueError for one that does not fit.
    """
    if version in PACKAGES:
        return folded(importlib.import_module(PACKAGES[version]).flash_attn_func)
    if version == "aiter":
        return folded(aiter_flash())
    if version == "transformer_engine":
        return transformer_engine_attention()
    if version == "cudnn" and torch.version.cuda is None:
        raise ValueError("this torch is not built with cuDNN")
    if version == "flex_attention":
        return flex_window_attention
    return cudnn_attention if version == "cudnn" else causal_attention


@functools.cache
def _missing(version: str, _: torch.device) -> str | None:
    """Return why the package of `version` cannot be used, or None: a function of `available`, which `Versions._missing`
    calls. Every layer asks, and Python would try the import of a missing package each time.
    """
    try:
        attention_of(version)
    except ValueError as error:
        return str(error)
    except Exception as error:  # ImportError; OSError of a library that cannot be loaded; and others of a package
        return f"its package cannot be imported ({error})"
    return None


def chunk_by_chunk(
    attend: Attention, query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Sequence[int]
) -> Tensor:
    """Compute attention of each chunk of queries to the keys up to the chunk's end."""
    parts = query.chunk(len(starts))
    ends = [start + len(parts[0]) for start in starts]
    return torch.cat([attend(part, key[:end], value[:end], scale) for part, end in zip(parts, ends, strict=True)])


def attention_written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    starts: Sequence[int] | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention in fp64 with every score in memory. starts: of chunks of queries; None: the queries are
    the last ones. window: previous tokens that a token sees, None: all.
    """
    query, key, value = (x.double().permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    starts = (key.shape[2] - query.shape[2],) if starts is None else starts
    rows = query.shape[2] // len(starts)
    positions = torch.cat([torch.arange(start, start + rows, device=query.device) for start in starts])
    distance = positions[:, None] - torch.arange(key.shape[2], device=query.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance > window)
    scores = (query @ key.mT * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2)


def window_written_out(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """`attention_written_out` with the arguments of the form `window`."""
    return attention_written_out(query, key, value, scale, window=window)


def with_gradients(attend: Callable) -> Callable:
    """Return a function of the gradient of `attend`'s result and `attend`'s arguments, which returns the result and the
    gradients of query, key and value. The check runs it; gradients are on, since the first call may be inside no_grad.
    """

    def call(d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *more) -> list[Tensor | None]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (query, key, value)]
            out = attend(*inputs, *more)
            return [out.detach(), *torch.autograd.grad(out, inputs, d_out.to(out.dtype), allow_unused=True)]

    return call


def written_out(*arguments, attend: Callable = attention_written_out) -> list[Tensor]:
    """Return what `with_gradients` returns of attention written out, with fp64 inputs, so that gradients stay fp64."""
    exact = (x.double() if isinstance(x, Tensor) else x for x in arguments)
    return with_gradients(attend)(*exact)


def _compare(got: list, want: list, tolerance: float | None) -> str | None:
    names = ("the result", *(f"the gradient of {name}" for name in ("query", "key", "value")))
    for name, mine, theirs in zip(names, got[0], want[0], strict=True):
        if mine is None:
            return f"{name} is missing"
        if not mine.isfinite().all():
            return f"{name} is not finite"
        error = ((mine.double() - theirs).norm() / theirs.norm()).item()
        if not error < tolerance:
            return f"{name} differs by {error:.2g} from attention written out (allowed: {tolerance:.2g})"
    return None


class CoreAttention(Versions):
    """Core attention of one form for the heads of a rank: (query, key, value, scale) -> [s, b, n * d], with the starts
    of the chunks, the PackedDocuments or the window behind. `core_attention` returns the one for a call.

    exact: whether torch's deterministic algorithms are on, which choose other kernels.
    """

    last = "sdpa"

    def __init__(
        self, requested: str, form: str, dtype: torch.dtype, heads: int, groups: int, head_dim: int, exact: bool
    ):
        self.form, self.dtype, self.exact = form, dtype, exact
        self.half = dtype in (torch.bfloat16, torch.float16)
        self.heads, self.groups, self.head_dim = heads, groups, head_dim
        self.requested = Request(requested, f"cluster.core_attention={requested}")
        queries, keys, place = {
            "chunks": (CHECKED_ROWS, 3 * CHECKED_ROWS // 2, ((0, CHECKED_ROWS),)),
            "window": (CHECKED_ROWS, 3 * CHECKED_ROWS // 2, (CHECKED_WINDOW,)),
        }.get(form, (CHECKED_ROWS, CHECKED_ROWS, ()))

        def example(magnitude: float, device: torch.device) -> tuple:
            """Make arguments of `with_gradients`: the gradient of the result, query, key, value, scale and `place`."""
            query, key, value = (
                torch.randn(shape) for shape in ((queries, 2, heads, head_dim), *((keys, 2, groups, head_dim),) * 2)
            )
            tensors = torch.randn(queries, 2, heads * head_dim), query * magnitude, key * magnitude, value
            return *(x.to(device, dtype) for x in tensors), head_dim**-0.5, *place

        super().__init__(
            "core_attention",
            "core_attention",
            FORMS[form],
            reference=functools.partial(written_out, attend=window_written_out) if form == "window" else written_out,
            example=tuple(functools.partial(example, magnitude) for magnitude in MAGNITUDES),
            compare=_compare,
            tolerance=TOLERANCES[dtype],
            fits={"blocks": takes_blocks} if form == "chunks" else {},
            available={
                version: self._blocks_missing if version == "blocks" else functools.partial(_missing, version)
                for version in FORMS[form]
            },
        )
        self.setting = "core_attention"
        if form == "window" and requested == "cudnn":
            raise mistake(
                "cluster.core_attention",
                requested,
                problem="torch's call of cuDNN has no sliding window",
                allowed=", ".join(("auto", *(version for version in VERSIONS if version != "cudnn"))),
                fix="cluster.core_attention=auto",
            )
        if requested not in ("auto", *self.versions):
            text = "cluster.core_attention=%s: this version takes no %s; torch's attention computes them"
            logger.warning(text, requested, UNSUPPORTED_CALLS[form])

    def request(self) -> Request:
        return self.requested

    def __call__(self, query: Tensor, *arguments) -> Tensor:
        for fits, attend in self.implementations(query.device):
            if fits is None or fits(query, *arguments):
                return attend(query, *arguments)
        raise AssertionError("the last version takes every call")

    def _order(self, device: torch.device, request: Request) -> tuple[str, ...]:
        """Return the requested version, or with auto those of AUTO_ORDER, then sdpa. For chunks `blocks` is before them
        with auto, sdpa and cudnn, and of AUTO_ORDER AITER alone follows.
        """
        if self.form == "documents":
            return ("flex_attention",) if device.type == "cuda" else ("sdpa",)
        order = () if request.version in ("auto", "sdpa") else (request.version,)
        if request.version == "auto" and self.half and not self.exact:
            order = AUTO_ORDER.get(architecture(device), ())
        if self.form == "chunks" and request.version in ("auto", "sdpa", "cudnn"):
            order = ("blocks", *(version for version in order if version == "aiter"))
        last = "flex_attention" if self.form == "window" and device.type == "cuda" else "sdpa"
        return tuple(dict.fromkeys(version for version in (*order, last) if version in self.versions))

    def _missing(self, version: str, device: torch.device, named: bool) -> str | None:
        """Also leave out an AITER that `auto` must not take, and warn where it is installed and cannot be used."""
        if named or version != "aiter":
            return super()._missing(version, device, named)
        unread = aiter.not_read(aiter.installed())
        reason = (
            aiter.stale_backward(*aiter.installed_versions())
            or (unread and f"{unread}. To request it: cluster.core_attention=aiter")
            or super()._missing(version, device, named)
        )
        if reason and aiter.installed():
            warn_once((device, reason), "core attention: the installed AITER is not used: %s", reason)
        return reason

    def _blocks_missing(self, device: torch.device) -> str | None:
        sizes, options = (self.heads, self.groups), dict(dtype=self.dtype, device=device)
        query, key = (torch.empty(128, 1, count, self.head_dim, **options) for count in sizes)
        return None if takes_blocks(query, key) else "torch would not choose cuDNN's kernel"

    def _failure(self, version: str, device: torch.device, check: bool) -> str | None:
        if self.form == "documents" or (version == "sdpa" and device.type == "cpu"):  # torch's plain attention
            return None
        if check and (device, version) not in self.results:
            # Before the check: should a kernel end the process, the log names it.
            logger.info("core attention: checking %s for %s on %s", version, self.form, device)
        return super()._failure(version, device, check)

    def _candidate(self, version: str) -> Callable:
        """Return the version with its gradients, which the self-check compares too."""
        return with_gradients(self._function_of(version))

    def _function_of(self, version: str) -> Callable:
        if self.form == "documents":
            return document_attention
        if version == "blocks":
            return block_attention
        attend = attention_of(version)
        return functools.partial(chunk_by_chunk, attend) if self.form == "chunks" else attend


@functools.cache
def core_attention(*arguments) -> CoreAttention:
    """Return the operator for the arguments of `CoreAttention`; one for all layers."""
    return CoreAttention(*arguments)


class ZayaCoreAttention(nn.Module):
    """Core attention without dropout; the mask is causal, with the layer's sliding window if it has one, and
    `attention_mask` is not read.

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
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.context_group = pg_collection.cp
        self.shard = ContextShard.of(self.context_group, config.context_parallel_order)
        self.name = config.core_attention
        sizes = config.num_attention_heads, config.num_query_groups, config.kv_channels
        # A missing package ends the run at this point, not in the first step.
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        device = torch.device("cpu" if on_cpu else "cuda")
        core_attention(self.name, "whole", config.params_dtype, *sizes, False).choice(device, check=False)
        self.window = config.window_of(layer_number)
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
        """Call the `CoreAttention` of this form, dtype and sizes: query [s, b, n, d], key and value [s, b, g, d], this
        rank's rows of the sequence -> [s, b, n * d].
        """
        assert attention_bias is None
        if self.window is not None and len(query) * self.shard.size > self.window + 1:
            return self._in_window(query, key, value, packed_seq_params)
        form, positions = "whole", ()
        if self.shard.size > 1:
            key, value = gather_key_value(key, value, self.shard, self.context_group)
            form, positions = "chunks", (self.shard.starts(len(query)),)
        if packed_seq_params is not None:
            form, positions = "documents", (packed_seq_params,)
        return self._attend(form, query, key, value, *positions)

    def _in_window(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedDocuments | None) -> Tensor:
        """`forward` with a window that is shorter than the sequence: each chunk of queries with the keys that it
        reaches.
        """
        contexts, starts = [], self.shard.starts(len(query))
        in_reach = key_value_in_reach(key, value, self.window, self.shard, self.context_group)
        for part, start, (keys, values) in zip(query.chunk(len(starts)), starts, in_reach, strict=True):
            form, place = "window", (self.window,)
            if packed is not None:
                end = start + len(part)
                form, place = "documents", (packed, (start, end, end - len(keys)), self.window)
            contexts.append(self._attend(form, part, keys, values, *place))
        return torch.cat(contexts) if len(contexts) > 1 else contexts[0]

    def _attend(self, form: str, query: Tensor, key: Tensor, value: Tensor, *place) -> Tensor:
        exact = torch.are_deterministic_algorithms_enabled()
        sizes = (query.shape[2], key.shape[2], query.shape[3])
        attend = core_attention(self.name, form, query.dtype, *sizes, exact)
        return attend(query, key, value, self.softmax_scale, *place)

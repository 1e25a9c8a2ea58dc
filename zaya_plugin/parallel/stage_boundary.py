# SPDX-License-Identifier: Apache-2.0
"""The tensor sent between pipeline stages: the residual stream and the router state, joined.

Megatron's schedules send one tensor of [s, b, hidden_size] between stages. A ZAYA layer also needs the router state of
the layer before it (exponential depth averaging, arXiv 2605.05365 equation 2), and its gradient is sent back. So the
last layer of a stage appends the state to the stream, and the first layer of the next stage splits them. The stream is
fp32; a bf16 state is converted to fp32 and back without loss.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_stream_and_state(stream: Tensor, state: Tensor | None) -> Tensor:
    """Join stream [s, b, h] and router state [s, b, r] to [s, b, h + r] in the stream's dtype; return the stream if
    state is None.
    """
    return stream if state is None else torch.cat((stream, state.to(stream.dtype)), dim=-1)


def split_stream_and_state(joined: Tensor, hidden_size: int, state_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split [s, b, h + r] into the stream [s, b, h] and the router state [s, b, r] in state_dtype, None if r is 0."""
    stream, state = joined.split((hidden_size, joined.shape[-1] - hidden_size), dim=-1)
    return stream.contiguous(), state.to(state_dtype).contiguous() if state.shape[-1] else None

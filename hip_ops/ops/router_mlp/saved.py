# SPDX-License-Identifier: Apache-2.0
"""Bytes that the router keeps for its backward pass. Plain arithmetic, without torch."""

INT64 = 8


def columns(classes: int) -> int:
    """Columns of the logits and of their gradient: a power of two of at least 16, as matrix units require; zeros after
    the classes.
    """
    return max(16, 1 << (classes - 1).bit_length())


def saved_bytes(tokens: float, width: int, classes: int, element_bytes: int) -> dict[str, float]:
    """Returns bytes by tensor of the results of `router_mlp` that `router_mlp_backward` reads, for `width` channels and
    `classes` classes.

    Not counted: the parameters, and state and previous. A layer's state is `previous` of the next layer; count one per
    layer.
    """
    hidden = float(element_bytes * width * tokens)
    logits = float(element_bytes * columns(classes) * tokens)
    return {"hidden1": hidden, "hidden2": hidden, "logits": logits, "ids": float(INT64 * tokens)}

# SPDX-License-Identifier: Apache-2.0
"""Sizes of a linear head with its cross-entropy: chunks, parts of rows, and bytes. Plain arithmetic without torch."""

BUFFER_BYTES = 5 * 2**28  # maximum of a chunk's logits
# classes that a wave keeps in registers between maximum and exponentials; fastest on an H200
LARGEST_PART = 2048
FLOAT32, INT64 = 4, 8


def chunk_for(tokens: int, classes: int, element_bytes: int) -> int:
    """Returns the tokens of a chunk whose logits fit into BUFFER_BYTES.

    A multiple of 2048 if that is possible: on an H100 the gradient of 2048 tokens by 2048 channels is one round of
    128 x 256 tiles on 132 processors, and 2752 tokens took 1.7 times as long (docs/log.md).
    """
    fitting = BUFFER_BYTES // (max(1, classes) * element_bytes)
    for step in (2048, 256, 1):
        if fitting >= step:
            return max(1, min(tokens, fitting // step * step))
    return 1


def parts_of_exponentials(classes: int) -> int:
    """Returns the number of parts of a row, each of at most LARGEST_PART classes."""
    return max(1, -(-classes // LARGEST_PART))


def saved_bytes(tokens: int, hidden_size: int, element_bytes: int, promised: bool = True) -> dict[str, float]:
    """Returns bytes by tensor that `_Promised` or `_Recomputed` of hip_ops/ops/linear_cross_entropy/__init__.py keep for
    the backward pass.

    For calls with main_grad; without it a promised call also keeps the weight's gradient, [classes, h] in fp32. hidden
    and weight, which a call without a promise keeps, are not counted: they are the final norm's output and the
    parameter.
    """
    if promised:
        return {"gradient of hidden": element_bytes * hidden_size * tokens, "promised gradient": FLOAT32 * tokens}
    return {"labels": INT64 * tokens, "maximum and sum of rows": 2 * FLOAT32 * tokens}


def working_bytes(tokens: int, hidden_size: int, classes: int, element_bytes: int, ranks: int = 1) -> float:
    """Returns the bytes that exist while a promised call runs, beside those it keeps. classes: of this rank; ranks:
    sharing the vocabulary.

    They are the hidden states of all tokens and, for one chunk, the logits, the gradient of hidden in fp32 and three
    numbers per part of a row, twice where ranks join theirs.
    """
    chunk = chunk_for(tokens, classes, element_bytes)
    numbers = 3 * parts_of_exponentials(classes) * (1 + (ranks > 1))
    return element_bytes * (hidden_size * tokens + classes * chunk) + FLOAT32 * chunk * (hidden_size + numbers)

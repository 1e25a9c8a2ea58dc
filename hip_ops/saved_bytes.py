# SPDX-License-Identifier: Apache-2.0
"""The bytes that operators keep for their backward passes: one function an operator, which returns bytes by tensor.

Memory plans are made on login nodes, so this is plain arithmetic without torch. Parameters are not counted.
"""

FLOAT32, INT32, INT64 = 4, 4, 8
# Of linear_cross_entropy: the bytes of a chunk's logits, and the classes that a wave keeps in registers between maximum
# and exponentials; fastest on an H200
MAX_CHUNK_BYTES = 5 * 2**28
MAX_PART_CLASSES = 2048


def rms_norm(
    rows: int, hidden: int, output_bytes: int, residual_bytes: int, centered: bool = False
) -> dict[str, float]:
    """Return the bytes of a merge with its norm: of the inputs output and residual (the stream), which no other
    operator keeps, and of the statistics: rstd, and LayerNorm's mean. centered: of LayerNorm.
    """
    return {
        "output": output_bytes * hidden * rows,
        "residual": residual_bytes * hidden * rows,
        "statistics": FLOAT32 * rows * (1 + centered),
    }


def cca_prologue(tokens: float, heads: int, groups: int, head_dim: int, element_bytes: int) -> dict[str, float]:
    """Return the bytes for `heads` query heads and `groups` key heads of `head_dim` channels.

    query and key are also kept by attention; count them once. Left out: the rope table and starts, which all layers
    share, and the halos of a few rows.
    """
    row = float(element_bytes * head_dim * tokens)
    return {
        "projected": (heads + 2 * groups) * row,
        "query": heads * row,
        "key": groups * row,
        "inverse_norm": float(FLOAT32 * (heads + groups) * tokens),
    }


def router_columns(classes: int) -> int:
    """Return the columns of the router's logits and of their gradient: a power of two of at least 16, as matrix units
    require; zeros after the classes.
    """
    return max(16, 1 << (classes - 1).bit_length())


def router_mlp(tokens: float, width: int, classes: int, element_bytes: int) -> dict[str, float]:
    """Return the bytes of the results that `router_mlp_backward` reads, for `width` channels and `classes` classes.

    Not counted: state and previous. A layer's state is `previous` of the next layer; count one per layer.
    """
    hidden = float(element_bytes * width * tokens)
    logits = float(element_bytes * router_columns(classes) * tokens)
    return {"hidden1": hidden, "hidden2": hidden, "logits": logits, "ids": float(INT64 * tokens)}


def expert_permutation(tokens: int) -> dict[str, float]:
    """Return the bytes of both int32 maps, which permute_to_experts and unpermute_from_experts share."""
    return {"order of the tokens": 2 * INT32 * tokens}


def grouped_product(tokens: int, hidden: int, dtype_bytes: int) -> dict[str, float]:
    """Return the bytes of the experts' first product: its operand, unless "permute" is recomputed.

    Its result is weighted_swiglu's input and is counted there. The second product's operand is computed again.
    """
    return {"rows sorted by expert": dtype_bytes * hidden * tokens}


def weighted_swiglu(rows: int, width: int, experts: int, dtype_bytes: int) -> dict[str, float]:
    """Return the bytes of gate_up, fp32 probs and int32 offsets. experts: of this rank. The output is recomputed."""
    return {"gate and up": dtype_bytes * 2 * width * rows, "weights": FLOAT32 * rows, "offsets": INT32 * experts}


def linear_cross_entropy(tokens: int, hidden_size: int, element_bytes: int, promised: bool = True) -> dict[str, float]:
    """Return the bytes of a call with main_grad; without it a promised call also keeps the weight's gradient,
    [classes, h] in fp32.

    hidden and weight, which a call without a promise keeps, are not counted: they are the final norm's output and the
    parameter.
    """
    if promised:
        return {"gradient of hidden": element_bytes * hidden_size * tokens, "promised gradient": FLOAT32 * tokens}
    return {"labels": INT64 * tokens, "maximum and sum of rows": 2 * FLOAT32 * tokens}


def linear_cross_entropy_work(tokens: int, hidden_size: int, classes: int, element_bytes: int, ranks: int = 1) -> float:
    """Return the bytes that exist while a promised call runs, in addition to those it keeps. classes: of this rank;
    ranks: sharing the vocabulary.

    They are the hidden states of all tokens and, for one chunk, the logits, the gradient of hidden in fp32 and three
    numbers per part of a row, twice where ranks join theirs.
    """
    chunk = chunk_for(tokens, classes, element_bytes)
    numbers = 3 * parts_of_exponentials(classes) * (1 + (ranks > 1))
    return element_bytes * (hidden_size * tokens + classes * chunk) + FLOAT32 * chunk * (hidden_size + numbers)


def chunk_for(tokens: int, classes: int, element_bytes: int) -> int:
    """Return the tokens of a chunk of linear_cross_entropy whose logits fit into MAX_CHUNK_BYTES.

    A multiple of 2048 if that is possible: on an H100 the gradient of 2048 tokens by 2048 channels is one round of
    128 x 256 tiles on 132 processors, and 2752 tokens took 1.7 times as long (docs/log.md).
    """
    fitting = MAX_CHUNK_BYTES // (max(1, classes) * element_bytes)
    for step in (2048, 256, 1):
        if fitting >= step:
            return max(1, min(tokens, fitting // step * step))
    return 1


def parts_of_exponentials(classes: int) -> int:
    """Return the number of parts of a row of logits, each of at most MAX_PART_CLASSES classes."""
    return max(1, -(-classes // MAX_PART_CLASSES))

# SPDX-License-Identifier: Apache-2.0
"""ZAYA1 as Megatron-core module specs; `build.build_zaya_model` builds the model.

Letters of shapes, in docstrings and, in moe.py, at the end of names: `tokens_Th` is [T, h].

    s   rows of the sequence on this rank          n   query heads         r   channels of the router state
    b   sequences of a micro-batch                 g   key-value heads     c   classes: experts and the skip class
    T   tokens, s * b                              d   channels of a head  E   experts
    h   channels of the residual stream            C   (n + g) * d         f   channels of an expert
    t   keys that a query may see, or, as in       V   rows of the vocabulary
        C / t, tensor-parallel ranks
"""

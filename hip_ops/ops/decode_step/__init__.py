# SPDX-License-Identifier: Apache-2.0
"""One token a sequence through a ZAYA1 layer: kernels without a reference of their own, which follow those of the
operators and are launched by zaya_plugin/inference/decode_step.py.
"""

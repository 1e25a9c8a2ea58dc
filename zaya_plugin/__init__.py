# SPDX-License-Identifier: Apache-2.0
"""ZAYA1 pretraining as a Megatron-core plugin."""

__version__ = "0.1.0"

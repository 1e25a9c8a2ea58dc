# SPDX-License-Identifier: Apache-2.0
"""Predictions: memory, bytes that ranks send, the time of a step, what checkpoints cost. No torch import."""

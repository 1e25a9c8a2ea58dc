# SPDX-License-Identifier: Apache-2.0
"""ZAYA1-base, written out apart from its recipe."""

from zaya_plugin.plan.flops import Shape

ZAYA1_BASE = Shape(40, 2048, 8, 2, 128, 16, 2048, 256, 262_272)

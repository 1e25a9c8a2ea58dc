# SPDX-License-Identifier: Apache-2.0
"""Weights in and out: the layouts in which ZAYA1 models are published, import into a checkpoint, export from one."""

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the map between this package's parameter names and transformers'."""

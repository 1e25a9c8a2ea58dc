# SPDX-License-Identifier: Apache-2.0
"""Kernels for ZAYA1 that need only torch."""

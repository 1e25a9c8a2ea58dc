# SPDX-License-Identifier: Apache-2.0
"""Shared by all operators: declaration, choice among versions, self-check, and building and loading of HIP kernels."""

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: inspection on disk, and conversion to and from transformers' parameter names."""

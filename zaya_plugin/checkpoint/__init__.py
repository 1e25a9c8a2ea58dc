# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saves without a stall, loads, inspection on disk, and conversion to and from transformers' names."""

# SPDX-License-Identifier: Apache-2.0
"""A rank begins in this room: one adapter for `zaya train`, Megatron-LM's pretrain_gpt.py and Primus."""

# SPDX-License-Identifier: Apache-2.0
"""The start of a rank, and one adapter for `zaya train`, Megatron-LM's pretrain_gpt.py and Primus."""

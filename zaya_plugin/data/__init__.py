# SPDX-License-Identifier: Apache-2.0
"""Corpora: text to Megatron's indexed dataset (`prepare`), checks before training and the datasets of a run (`dataset`).

Nothing here imports torch or megatron.core at import time; only `dataset.build_gpt_datasets` does, when it is called.
"""

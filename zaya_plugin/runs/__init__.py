# SPDX-License-Identifier: Apache-2.0
"""Reads runs from their files: metrics.jsonl, recipe.yaml and the journal; lists and draws them."""

# SPDX-License-Identifier: Apache-2.0
"""What a run reads: datasets found (`sources`, `prefixes`), checked (`check`) and built (`dataset`), and its place in them (`ledger`).

Corpora are made in `zaya_plugin.corpus`. torch and megatron.core are imported by `dataset` and what it builds, when they are needed.
"""

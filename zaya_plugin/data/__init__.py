# SPDX-License-Identifier: Apache-2.0
"""The data of a run. A batch goes from the recipe down: `sources` resolves paths, `dataset` builds Megatron's datasets.

`dataset` uses `stream_dataset` for data.order=continuing; both read the tokens of `indexed_dataset`. On the way down
lie `blend` (entries, prefixes, weights), `ledger` (the place in each source) and `prepared` (manifest and checks).
Corpora are made in `zaya_plugin.corpus`. Only `dataset` and `stream_dataset` import torch; `sources` imports them when
they are needed.
"""

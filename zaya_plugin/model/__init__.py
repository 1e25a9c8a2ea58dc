# SPDX-License-Identifier: Apache-2.0
"""ZAYA1 as Megatron-core module specs; `build.build_zaya_model` builds the model."""

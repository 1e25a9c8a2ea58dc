# SPDX-License-Identifier: Apache-2.0
"""ZAYA1 as Megatron-core module specs; `build.build_zaya_model` and `spec.zaya_layer_spec` are the two ways in."""

# SPDX-License-Identifier: Apache-2.0
"""Installs as `zaya_plugin.recipes`: the Hydra groups, found as `pkg://zaya_plugin.recipes`."""

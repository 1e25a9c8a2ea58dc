# SPDX-License-Identifier: Apache-2.0
"""Muon and AdamW by parameter, balancing of the experts, and the layout of their state."""

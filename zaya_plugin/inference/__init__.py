# SPDX-License-Identifier: Apache-2.0
"""Answers and scores of a trained model: `zaya generate`, `zaya eval`."""

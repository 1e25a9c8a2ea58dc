# SPDX-License-Identifier: Apache-2.0
"""The collectors of a node: one file a source of evidence, each polled in a thread of its own (runner.py)."""

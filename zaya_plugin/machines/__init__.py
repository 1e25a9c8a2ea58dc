# SPDX-License-Identifier: Apache-2.0
"""The checks of `zaya doctor` and `zaya verify`: one table, one process a check."""

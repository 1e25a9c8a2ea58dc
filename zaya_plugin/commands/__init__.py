# SPDX-License-Identifier: Apache-2.0
"""The subcommands of `zaya`: a row of table.py and a function each, and what they print. The rooms below do the work."""

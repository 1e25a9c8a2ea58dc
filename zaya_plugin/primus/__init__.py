# SPDX-License-Identifier: Apache-2.0
"""ZAYA in Primus without a change to Primus: a launcher script, a trainer stage, experiment files. See docs/hosts.md."""

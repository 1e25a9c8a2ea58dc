# SPDX-License-Identifier: Apache-2.0
"""Aegis: starts the ranks of a run, watches them, names the first cause of a failure, and acts. No torch import.

An agent on every node starts the ranks and collects evidence; one decider puts it on one clock, decides, and keeps a
journal.
"""

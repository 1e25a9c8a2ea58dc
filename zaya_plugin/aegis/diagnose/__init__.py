# SPDX-License-Identifier: Apache-2.0
"""From evidence to a decision: rules, evidence, the first cause, and what is done about it. No process, no socket."""

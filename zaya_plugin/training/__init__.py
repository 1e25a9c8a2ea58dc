# SPDX-License-Identifier: Apache-2.0
"""Inside the loop: metrics and their sinks, console, signals, heartbeat, loss guard."""

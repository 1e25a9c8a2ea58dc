# SPDX-License-Identifier: Apache-2.0
"""The stage that Primus trains, and the guards of its settings."""

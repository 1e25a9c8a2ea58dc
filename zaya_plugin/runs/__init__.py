# SPDX-License-Identifier: Apache-2.0
"""Runs as lists, pictures and a live terminal, from their files alone. No torch import."""

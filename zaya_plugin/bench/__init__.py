# SPDX-License-Identifier: Apache-2.0
"""Measure a step part by part, and the rates of memory, products, collectives, storage and a recipe's loader."""

# SPDX-License-Identifier: Apache-2.0
"""Measure a step part by part, and predict it for another machine."""

# SPDX-License-Identifier: Apache-2.0
"""The operators in Triton, for any GPU that it supports."""

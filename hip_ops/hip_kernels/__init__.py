# SPDX-License-Identifier: Apache-2.0
"""The operators through the built kernels of csrc/: what is passed to which launcher."""

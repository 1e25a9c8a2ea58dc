# SPDX-License-Identifier: Apache-2.0
"""What operators share: their declaration, the choice among their versions, self-check, and building and loading of HIP kernels."""

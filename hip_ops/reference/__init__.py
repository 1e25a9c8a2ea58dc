# SPDX-License-Identifier: Apache-2.0
"""The operators in plain torch: what every other version is compared with, and the fallback."""

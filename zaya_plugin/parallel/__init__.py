# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for CCA, and documents packed into one sequence."""

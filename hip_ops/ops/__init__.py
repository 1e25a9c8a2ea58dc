# SPDX-License-Identifier: Apache-2.0
"""One folder an operator: the reference in torch, its declaration and public functions, and its versions."""

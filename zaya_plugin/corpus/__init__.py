# SPDX-License-Identifier: Apache-2.0
"""`zaya data`: text to datasets, packed bins and reports, offline."""

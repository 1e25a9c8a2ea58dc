# SPDX-License-Identifier: Apache-2.0
"""SLURM's notation of node lists."""

import pytest

from zaya_plugin.ground.node_list import node_names


@pytest.mark.parametrize(
    ("node_list", "names"),
    [
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("b,a[01-02]", ["b", "a01", "a02"]),
        ("node7", ["node7"]),
        ("r[0-1]n[3,5]", ["r0n3", "r0n5", "r1n3", "r1n5"]),
        ("gpu-[9,11-12].cluster.local", ["gpu-9.cluster.local", "gpu-11.cluster.local", "gpu-12.cluster.local"]),
    ],
)
def test_names_of_a_list(node_list, names):
    assert node_names(node_list) == names


@pytest.mark.parametrize("node_list", ["", "a[1", "a]1", "[", ",b", "a[3-1]", "a[0-999999999]"])
def test_other_text_is_refused(node_list):
    with pytest.raises(ValueError, match="must be a"):
        node_names(node_list)

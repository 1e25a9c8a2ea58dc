# SPDX-License-Identifier: Apache-2.0
"""Somebody who looks at operators by their names, so that those of hip_ops go through torch's dispatch."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorsSeen(TorchDispatchMode):
    """names: of the operators called, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.name())
        return function(*arguments, **(keywords or {}))

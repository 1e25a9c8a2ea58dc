# SPDX-License-Identifier: Apache-2.0
"""A mode that records operators by name. Under it those of hip_ops go through torch's dispatcher."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorsSeen(TorchDispatchMode):
    """names: of the operators called, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.name())
        return function(*arguments, **(keywords or {}))

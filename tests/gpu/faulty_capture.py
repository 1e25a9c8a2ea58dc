# SPDX-License-Identifier: Apache-2.0
"""`torchrun ... tests/gpu/faulty_capture.py train ...`: `zaya train` whose step reads from the device while it is
captured, which CUDA and HIP refuse. The launch and everything else of the rank are real.
"""

import sys


def rank(argv: list[str]) -> int:
    from zaya_plugin.hosts import worker  # isort: skip  # it prepares torch

    import torch
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    call = FullCudaGraphWrapper.__init__

    def with_a_read(self, forward_backward_func, *positional, **named):
        def reading(*inputs, **keywords):
            if torch.cuda.is_current_stream_capturing():
                torch.ones(1, device="cuda").item()
            return forward_backward_func(*inputs, **keywords)

        call(self, reading, *positional, **named)

    FullCudaGraphWrapper.__init__ = with_a_read
    return worker.main(argv)


def main(argv: list[str]) -> int:
    from zaya_plugin import cli
    from zaya_plugin.run import launch, rank_plan

    rank_plan.WORKER = launch.WORKER = "tests.gpu.faulty_capture"
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit((main if sys.argv[1] == "train" else rank)(sys.argv[1:]))

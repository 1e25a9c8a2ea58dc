# SPDX-License-Identifier: Apache-2.0
"""The losses of 10 steps of the demo in fp32 on synthetic tokens, and the recipe that gives them.

Made on a CPU, with MADE_WITH: they are `figures.losses` of the record of `zaya verify --only demo_losses --device cpu`.
Initial weights and tokens come from the CPU's generators, so they are the same on every device. Rounding
differs between devices: on an H100 the first 10 steps of the demo differed by at most 2e-7 from a CPU's
(tests/gpu/test_demo.py).
"""

from __future__ import annotations

STEPS = 10
VOCABULARY = 2048
TOLERANCE = 1e-5  # relative
MADE_WITH = "torch 2.13.0, megatron-core 0.19.2, one rank"
LOSSES = (8.0557480, 8.0289412, 7.9570646, 7.8610363, 7.6601100, 7.4888754, 7.4284096, 7.3949585, 7.3379517, 7.3219862)
# Everything that affects the numbers and is not the demo's; without dropout no step draws random numbers.
RECIPE = (
    "experiment=cpu_demo",
    "data.path=none",
    "nproc=1",
    f"stage.train_iters={STEPS}",
    "stage.global_batch_size=8",
    "stage.eval_iters=0",
    "optim.lr_warmup_iters=2",
    "optim.lr_decay_style=constant",
    "checkpoint.save_interval=null",
    "logger=none",
)
ON_CPU = ("cluster=cpu",)
# The kernels that training uses, where they take fp32; TF32 would round the factors of products.
ON_GPU = (
    "cluster=gpu",
    "cluster.kernels=auto",
    "cluster.dtype=fp32",
    "cluster.use_cpu_initialization=true",
    "cluster.environment.NVIDIA_TF32_OVERRIDE=0",
)

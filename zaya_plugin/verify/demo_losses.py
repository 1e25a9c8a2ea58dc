# SPDX-License-Identifier: Apache-2.0
"""The losses of 10 steps of the demo in fp32 on synthetic tokens, and the recipe that gives them.

Made on a CPU, with RECORDED_WITH: they are `figures.losses` of the record of `zaya verify --only demo_losses --device cpu`.
Initial weights and tokens come from the CPU's generators, seeded just before (loss_rank.py), so they are the same on
every device. Rounding differs between devices: on one H200 the ten losses differed by at most 1.3e-7 (2026-11-23).
"""

from __future__ import annotations

STEPS = 10
VOCABULARY = 2048
TOLERANCE = 1e-5  # relative
RECORDED_WITH = "torch 2.13.0, megatron-core 0.19.2, one rank"
LOSSES = (8.0144796, 8.0048695, 7.9231834, 7.7914352, 7.6592951, 7.4915419, 7.4224911, 7.3697824, 7.3522863, 7.3342419)
# Everything that affects the numbers and is not the demo's; without dropout no step draws random numbers.
RECIPE = (
    "experiment=cpu_demo",
    "data.path=none",
    "nproc=1",
    "optim=adamw",
    "optim.lr=2.0e-3",
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

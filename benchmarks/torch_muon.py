# SPDX-License-Identifier: Apache-2.0
"""Run `zaya train` with torch.optim.Muon on the matrices and all else unchanged, for muon_vs_adamw.py; one rank.

    python -m torch.distributed.run --standalone benchmarks/torch_muon.py experiment=cpu_demo optim=muon nproc=1

Momentum, Nesterov, weight decay, rates and the rounds of matrices are the recipe's; the products are torch's, matrix by
matrix in bf16. Its momentum is in no checkpoint.
"""

from __future__ import annotations

import sys

from zaya_plugin import patches

patches.apply_torch()

import torch  # noqa: E402

from zaya_plugin import cli  # noqa: E402
from zaya_plugin.optim import muon  # noqa: E402

OPTIMIZERS: dict[tuple[int, ...], torch.optim.Muon] = {}  # by the parameters of a round


@torch.no_grad()
def update_matrices(self: muon.MuonAdamW, context: muon.StepContext, group: dict, params: list[torch.Tensor]) -> None:
    """Update `params` by torch.optim.Muon, in place of `MuonAdamW.update_matrices`."""
    settings, round_key = self.muon, tuple(map(id, params))
    if round_key not in OPTIMIZERS:
        OPTIMIZERS[round_key] = torch.optim.Muon(
            muon._matrices(params, params),
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            ns_steps=settings.steps,
            adjust_lr_fn="match_rms_adamw",
        )
    (theirs,) = OPTIMIZERS[round_key].param_groups
    theirs.update(lr=group["lr"], weight_decay=group["weight_decay"])
    grads = [p.grad for p in params]
    if context.scale is not None:
        grads = torch._foreach_mul(grads, context.scale)
    for weight, grad in zip(theirs["params"], muon._matrices(params, grads), strict=True):
        weight.grad = grad
    OPTIMIZERS[round_key].step()
    if (targets := muon._targets(context, params)) is not None:
        torch._foreach_copy_(targets, [p.detach() for p in params])


if __name__ == "__main__":
    muon.MuonAdamW.update_matrices = update_matrices
    sys.exit(cli.main(["train", *sys.argv[1:]]))

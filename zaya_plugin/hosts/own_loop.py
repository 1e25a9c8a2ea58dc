# SPDX-License-Identifier: Apache-2.0
"""Muon and balancing for a training loop of the user's own on megatron-core; docs/own-loop.md has a script.

`megatron.training` is not imported: such a loop needs only megatron.core.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import unwrap_model
from torch import nn

from zaya_plugin.config.entries import Override
from zaya_plugin.ground.errors import mistake
from zaya_plugin.optim.balancing import RouterStatistics
from zaya_plugin.optim.chained import ChainedMuonAdamW
from zaya_plugin.optim.factory import build_muon_adamw
from zaya_plugin.optim.muon import MuonSettings
from zaya_plugin.optim.parameter_role import tag_parameters
from zaya_plugin.training.balancer import Balancer


class BalancedMuonAdamW(ChainedMuonAdamW):
    """Megatron's chain of optimizers over MuonAdamW; a step balances the experts first."""

    def __init__(self, chained_optimizers: list, model_chunks: list[nn.Module], *settings):
        super().__init__(chained_optimizers, model_chunks, *settings)
        self.balanced_chunks, self.balancer = model_chunks, Balancer()

    def step(self) -> tuple[bool, float | None, int | None]:
        """Move the experts' biases and update the weights. Return as Megatron's optimizers: whether weights were
        updated, the norm of all gradients, and their number of zeros.
        """
        self.balancer.balance(self.balanced_chunks)
        return super().step()


def balance_experts(model_chunks: list[nn.Module]) -> RouterStatistics:
    """Move the experts' biases by the routers' counts of all ranks, and start the counts of the next step.

    Call it on every rank once a step, after the backward passes of all micro-batches. model_chunks: this rank's models,
    with or without DDP.
    """
    return Balancer().balance(model_chunks)


def muon_optimizer(
    config: OptimizerConfig,
    model_chunks: list[nn.Module],
    *,
    overrides: Iterable[str] = (),
    muon: MuonSettings | None = None,
    **named,
) -> BalancedMuonAdamW:
    """Build Muon for matrices and AdamW for all other parameters, in Megatron's wrappers; `step()` also balances the
    experts.

    Args:
        config: Megatron's; optimizer="adam", whose learning rate, weight decay and betas apply. The learning rate is
            Muon's too.
        model_chunks: this rank's models as Megatron's DDP wraps them.
        overrides: entries of `optim.overrides` in a recipe, such as "*.router.* optimizer=adamw lr_mult=0.5".
        muon: Muon's settings, None for the defaults.
        named: further arguments of Megatron's get_megatron_optimizer.

    Raises:
        ValueError: another optimizer in `config`, `config_overrides`, a model without DDP, or an override that does not
            fit the model. At a step: NonFiniteGradientsError, before any weight changes.
    """
    if config.optimizer != "adam":
        raise mistake(
            "optimizer",
            config.optimizer,
            problem="Muon and AdamW are built where Megatron builds its Adam",
            allowed="adam",
            fix="OptimizerConfig(optimizer='adam', ...)",
        )
    if named.get("config_overrides"):
        raise mistake(
            "config_overrides",
            problem="groups of parameters come from Muon's rules and from `overrides`",
            allowed="None",
            fix='overrides=["<pattern> lr_mult=... weight_decay_mult=..."]',
        )
    parsed = [Override.parse(entry) for entry in overrides]
    for chunk in model_chunks:
        if not hasattr(chunk, "ddp_config"):
            raise mistake(
                "model_chunks",
                type(chunk).__name__,
                problem="Megatron's optimizers read DDP's gradient buffers",
                allowed="models under DDP",
                fix="wrap it in DistributedDataParallel",
            )
        tag_parameters(unwrap_model(chunk), parsed)
    muon = muon or MuonSettings()
    return build_muon_adamw(
        get_megatron_optimizer, config, model_chunks, muon, non_finite="stop", chain=BalancedMuonAdamW, **named
    )

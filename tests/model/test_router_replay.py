# SPDX-License-Identifier: Apache-2.0
"""Megatron's RouterReplay on ZAYA's routers: what is recorded, and replays that change no bit."""

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction


@pytest.fixture
def model(make_model, request):
    RouterReplay.clear_global_router_replay_instances()
    yield make_model(moe_enable_routing_replay=True, **getattr(request, "param", {})).train()
    RouterReplay.clear_global_router_replay_instances()


def run(model, batch, action):
    """Loss of every token and all gradients under a replay action; backward passes replay as forward ones do."""
    RouterReplay.set_global_router_replay_action(action)
    model.zero_grad(set_to_none=True)
    ids, positions, labels = batch
    losses = model(ids, positions, None, labels=labels)
    losses.mean().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


RECOMPUTE = dict(recompute_granularity="selective", recompute_modules=["moe"])


@pytest.mark.parametrize("model", [{}, RECOMPUTE], indirect=True, ids=["plain", "recompute"])
def test_own_routing_replayed_is_equal_to_the_bit(model, batch):
    losses, gradients = run(model, batch(), RouterReplayAction.RECORD)
    routed = RouterReplay.get_recorded_data()
    assert [tuple(ids.shape) for ids in routed] == [(24, 1)] * 4 and len(torch.cat(routed).unique()) > 2
    model.decoder.layers[1].mlp.router.balancing_biases[3] = 9.0  # a free router would choose this expert
    RouterReplay.set_replay_data([ids.clone() for ids in routed])
    replayed, again = run(model, batch(), RouterReplayAction.REPLAY_FORWARD)
    assert torch.equal(replayed, losses)
    assert all(torch.equal(again[name], gradients[name]) for name in gradients)
    free = [torch.full_like(ids, -1) for ids in routed]
    RouterReplay.set_replay_data([*routed[:1], *free[1:]])
    other, _ = run(model, batch(), RouterReplayAction.REPLAY_FORWARD)
    assert not torch.equal(other, losses), "-1 leaves the router free, and its biases have changed"


def test_another_number_of_tokens_is_refused_and_the_backward_list_is_read_in_order(model, batch):
    run(model, batch(), RouterReplayAction.RECORD)
    routed = RouterReplay.get_recorded_data()
    one, other = ([ids.clone() for ids in routed], [(ids + 1) % 4 for ids in routed])
    RouterReplay.clear_global_indices()
    RouterReplay.set_replay_data(one)
    RouterReplay.set_replay_data(other)
    by_list = [run(model, batch(), RouterReplayAction.REPLAY_BACKWARD)[0] for _ in range(2)]
    RouterReplay.set_replay_data(one)
    assert torch.equal(by_list[0], run(model, batch(), RouterReplayAction.REPLAY_FORWARD)[0])
    RouterReplay.set_replay_data(other)
    assert torch.equal(by_list[1], run(model, batch(), RouterReplayAction.REPLAY_FORWARD)[0])
    RouterReplay.set_replay_data([ids[:-1] for ids in one])
    with pytest.raises(ValueError, match=r"RouterReplay.set_replay_data=\[23, 1\]: this rank's tokens are 12 x 2. "):
        run(model, batch(), RouterReplayAction.REPLAY_FORWARD)
    RouterReplay.set_replay_data([ids + model.config.num_router_classes for ids in one])
    with pytest.raises(ValueError, match="routed_experts=.* is no routing of this model"):
        run(model, batch(), RouterReplayAction.REPLAY_FORWARD)

# SPDX-License-Identifier: Apache-2.0
"""stage.record_routing and stage.replay_routing in runs of `zaya train`, on one rank and on two."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.checkpoint.convert.published import publish
from tests.running import train
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import with_values
from zaya_plugin.config.validate import validate
from zaya_plugin.parallel.context_order import ContextShard

SHORT = ("stage.train_iters=3", "stage.eval_iters=1", "optim.lr_warmup_iters=1")
MODEL = Description(4, 64, 8, 2, 8, 16, 48, 16, 512, max_position_embeddings=32)
LAYOUTS = {
    "context": ("nproc=2", "parallel.context_parallel_size=2"),
    "expert": ("nproc=2", "parallel.expert_model_parallel_size=2"),
}


def smaller(tensors: dict) -> None:
    """Make random weights as small as trained ones."""
    for tensor in tensors.values():
        tensor.mul_(0.1 if tensor.ndim > 1 else 1)


def losses(run) -> list[float]:
    return [row["loss"] for _, row in sorted(run.steps().items())]


@pytest.mark.slow
def test_a_run_that_replays_its_own_routing_has_its_losses(tmp_path, corpus):
    file, again = tmp_path / "own.npy", tmp_path / "again.npy"
    words = (*SHORT, f"handover.from_hf={publish(tmp_path / 'model', model=MODEL, change=smaller)}")  # in all layouts
    first = train(tmp_path / "first", corpus, *words, f"stage.record_routing={file}")
    stored = np.load(file)
    assert stored.dtype == np.int16 and stored.shape[1:] == (4, 1) and stored.min() >= 0 and stored.max() <= 16
    assert len(np.unique(stored)) > 4
    replay = train(tmp_path / "second", corpus, *words, f"stage.replay_routing={file}", f"stage.record_routing={again}")
    assert losses(replay) == losses(first), "equal to the bit"
    assert np.array_equal(np.load(again), stored)
    other = np.where(np.arange(stored.size).reshape(stored.shape) % 3 == 0, (stored + 1) % 17, stored).astype(np.int16)
    np.save(tmp_path / "other.npy", other)
    by_layout = {}
    for layout, ranks in LAYOUTS.items():
        name = tmp_path / f"{layout}.npy"
        files = (f"stage.replay_routing={tmp_path / 'other.npy'}", f"stage.record_routing={name}")
        run = train(tmp_path / layout, corpus, *words, *ranks, *files)
        assert np.array_equal(np.load(name), other), f"{layout}: each rank replays and records its own rows"
        assert losses(run)[0] != losses(first)[0]
        by_layout[layout] = losses(run)
    assert by_layout["context"] == pytest.approx(by_layout["expert"], rel=2e-5)
    np.save(tmp_path / "large.npy", np.full_like(other, 17))
    large = train(tmp_path / "y", corpus, *words, f"stage.replay_routing={tmp_path / 'large.npy'}", check=False)
    assert large.code and "routed_experts=17 to 17: is no routing of this model" in large.output
    np.save(tmp_path / "short.npy", other[:-1])
    refused = train(tmp_path / "x", corpus, *words, f"stage.replay_routing={tmp_path / 'short.npy'}", check=False)
    assert refused.code == 2 and "stage.replay_routing=" in refused.output and "holds int16" in refused.output


def test_layouts_that_cut_layers_or_rows_otherwise_are_refused():
    recipe = compose(["experiment=cpu_demo"])
    for key in ("stage.record_routing", "stage.replay_routing"):
        routed = with_values(recipe, {key: "routing.npy"})
        validate(routed, 2)
        for name in ("tensor", "pipeline"):
            with pytest.raises(ValueError, match=rf"parallel.{name}_model_parallel_size=2: .* Allowed: 1 with {key}"):
                validate(with_values(routed, {f"parallel.{name}_model_parallel_size": 2}), 2)
    both = with_values(recipe, {"stage.record_routing": "routing.npy", "stage.replay_routing": "routing.npy"})
    with pytest.raises(ValueError, match="stage.record_routing=routing.npy: is replayed too"):
        validate(both, 2)


def test_a_batch_with_a_class_that_the_model_lacks_is_refused(monkeypatch):
    from zaya_plugin.hosts import adapter

    monkeypatch.setattr(adapter, "get_args", SimpleNamespace)
    model = SimpleNamespace(config=SimpleNamespace(num_router_classes=17))
    for wrong in (17, -2):
        batch = {"routed_experts": torch.tensor([[[[0], [wrong]]]])}
        with pytest.raises(ValueError, match=r"^routed_experts=.*stage.replay_routing.* Allowed: -1, .* to 16\.$"):
            adapter.forward_step(iter([batch]), model)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_a_rank_takes_the_routing_of_its_rows(order):
    from zaya_plugin.hosts.adapter import micro_batch

    tokens = torch.arange(32).view(2, 16)
    layers = torch.arange(3)
    batch = dict(tokens=tokens, labels=tokens, position_ids=tokens, loss_mask=tokens.float())
    batch["routed_experts"] = (tokens[:, :, None] * 3 + layers).unsqueeze(-1).to(torch.int16)
    for rank in (0, 1):
        rows = micro_batch(batch, "cpu", ContextShard(order, 2, rank))
        assert rows.forced.dtype == torch.int64
        assert torch.equal(rows.forced, rows.tokens.t() * 3 + layers[:, None, None])

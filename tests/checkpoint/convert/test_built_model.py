# SPDX-License-Identifier: Apache-2.0
"""zaya_from_hf, load_hf and save_hf: on models split among ranks, and on one that holds another model."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.convert.published import TINY, publish
from zaya_plugin.checkpoint.convert import verification
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.checkpoint.convert.values import whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "expert", "pipeline"])
def test_two_ranks_read_and_write_published_weights(tmp_path, layout):
    folder, output = publish(tmp_path / "published"), tmp_path / "export"
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words += ["-m", "tests.checkpoint.convert.two_ranks", layout, str(folder), str(output)]
    done = subprocess.run(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
    different = verification.differences(open_source(folder), open_source(output))
    assert [line for line in different if "balancing_biases: torch.bfloat16" not in line] == []
    assert not (tmp_path / "export.parts").exists()


def test_another_model_is_refused_before_a_weight_changes(tmp_path):
    from zaya_plugin import build_zaya_model, config_from_hf, load_hf

    folder = publish(tmp_path / "published")
    config, rest = config_from_hf(folder, use_cpu_initialization=True)
    assert rest == dict(vocab_size=64, max_sequence_length=64, rotary_base=1_000_000, rotary_percent=0.5)
    config.router_norm_epsilon = 1e-4
    model = build_zaya_model(config, **rest)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None}
    with pytest.raises(
        ValueError, match=r"holds another model \(built and published\): router_norm_epsilon 0.0001 and None"
    ):
        load_hf(model, folder)
    config.router_norm_epsilon = None
    model.rotary_base = 10_000
    with pytest.raises(ValueError, match=r"^rotary_base=10000: published was trained with another. Allowed: 1000000"):
        load_hf(model, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items() if name in before)
    assert TINY.num_layers == config.num_layers


def test_a_model_is_written_as_it_was_read_and_errors_leave_nothing(tmp_path):
    from zaya_plugin import save_hf, zaya_from_hf

    folder = publish(tmp_path / "published")
    model = zaya_from_hf(folder, params_dtype=torch.bfloat16)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    save_hf(model, tmp_path / "export")
    different = verification.differences(open_source(folder), open_source(tmp_path / "export"))
    assert [line for line in different if "balancing_biases: torch.bfloat16" not in line] == []
    for option, value in (("layout", "primus"), ("dtype", "fp64")):
        with pytest.raises(ValueError, match=rf"^--{option}={value}: "):
            save_hf(model, tmp_path / "other", **{option: value})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "published"]


@pytest.mark.parametrize("layout", ["native", "legacy"])
def test_weights_are_streamed_as_they_are_written(tmp_path, layout):
    """In buckets, and the second time those alone that have changed."""
    from zaya_plugin import save_hf, stream_hf, zaya_from_hf

    model = zaya_from_hf(publish(tmp_path / "published"), params_dtype=torch.bfloat16)
    save_hf(model, tmp_path / "export", layout=layout)
    written = load_file(tmp_path / "export" / "model.safetensors")
    buckets, sent = [], {}

    def keep(bucket: dict):
        buckets.append(bucket)
        return lambda: None  # cannot be pickled, and need not be

    stream_hf(model, keep, layout=layout, bucket_bytes=3000, sent=sent)
    got = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    assert got.keys() == written.keys() == sent.keys() and sum(map(len, buckets)) == len(got)
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in written.items())
    sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
    assert len(sizes) > 3 and all(size <= 3000 or len(bucket) == 1 for size, bucket in zip(sizes, buckets, strict=True))
    with torch.no_grad():
        model.decoder.layers[1].mlp.router.fc1.bias += 1
    changed, before = [], dict(sent)

    def broken(bucket: dict) -> None:
        raise ConnectionError("once")

    with pytest.raises(ConnectionError, match="once"):
        stream_hf(model, broken, layout=layout, sent=sent)
    assert sent == before, "what was not delivered is handed over the next time"
    stream_hf(model, changed.append, layout=layout, sent=sent)
    assert [len(bucket) for bucket in changed] == [1]
    ((name, tensor),) = changed[0].items()
    assert torch.equal(tensor, written[name] + 1)


def test_rows_of_padding_are_zero(tmp_path):
    from zaya_plugin import build_zaya_model, config_from_hf, load_hf

    folder = publish(tmp_path / "published")
    config, rest = config_from_hf(folder, use_cpu_initialization=True)
    model = build_zaya_model(config, **rest | {"vocab_size": 128})
    load_hf(model, folder)
    table = model.embedding.word_embeddings.weight
    assert table[:64].any(1).all() and not table[64:].any()


def test_biases_start_from_the_published_ones_and_their_optimizer_from_zero(tmp_path):
    """The first update after it is AdamW's first: each bias moves by balancing_lr against the sign of its gradient."""
    from zaya_plugin import build_zaya_model, config_from_hf, load_hf
    from zaya_plugin.optim.balancing import update_biases

    published = open_source(publish(tmp_path / "published"))
    config, rest = config_from_hf(tmp_path / "published", use_cpu_initialization=True, balancing_lr=1e-3)
    model = build_zaya_model(config, **rest)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    for router in routers:  # of an earlier run
        router.balancing_exp_avg.fill_(3.0)
        router.balancing_exp_avg_sq.fill_(5.0)
        router.balancing_step.fill_(7)
    load_hf(model, tmp_path / "published")
    loads = torch.tensor([8, 1, 1, 4, 0, 0, 2, 2, 3, 0, 9, 6, 0])  # the last: the skip class; 36 of 12 experts
    for number, router in enumerate(routers):
        name = f"decoder.layers.{number}.mlp.router.balancing_biases"
        wanted = whole(published.tensors[name]).float()
        assert router.balancing_biases.dtype == torch.float32 and torch.equal(router.balancing_biases, wanted)
        assert not router.balancing_exp_avg.any() and not router.balancing_exp_avg_sq.any()
        assert int(router.balancing_step) == 0
        router.tokens_per_expert.copy_(loads)
    before = [router.balancing_biases.clone() for router in routers]
    update_biases(routers, config, torch.distributed.group.WORLD)
    against = -torch.sign(loads.float() / 36 - 1 / 12)
    against[-1] = 0  # the skip class's bias stays
    against[8] = 0  # 3 of 36 tokens are a twelfth
    for router, bias in zip(routers, before, strict=True):
        moved = router.balancing_biases - bias
        moved[8] = 0.0  # the rounding of 3/36 - 1/12 decides its sign
        assert torch.allclose(moved, 1e-3 * against, atol=2e-7) and int(router.balancing_step) == 1

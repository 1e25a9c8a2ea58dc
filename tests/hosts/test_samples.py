# SPDX-License-Identifier: Apache-2.0
"""Continuations of stage.sample_prompts during the training."""

import json

import pytest
import torch

from tests.inference.small import open_given, publish_small
from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures)
from tests.running import train, zaya
from zaya_plugin.config.schema import Recipe, StageConfig
from zaya_plugin.data.prompts import Prompts
from zaya_plugin.inference.sampling import Sampling, generate


def test_the_model_and_the_random_numbers_stay(tmp_path, single_rank):  # noqa: F811
    from zaya_plugin.hosts import samples

    opened = open_given(publish_small(tmp_path / "model"))
    model, texts = opened.decoder.model, ["the cat", "one two three"]
    prompts = Prompts(texts, [opened.tokens_of(text) for text in texts], opened.tokenizer)
    model.train()
    random = torch.get_rng_state()
    for temperature in (0.0, 1.0):
        stage = StageConfig(name="s", sample_tokens=12, sample_temperature=temperature)
        written = samples.continuations(Recipe(stage=stage, seed=3), prompts, model, end=opened.stop[0])
        assert all(module.training for module in model.modules()) and torch.equal(torch.get_rng_state(), random)
        model.eval()
        answers = generate(opened.decoder, prompts.tokens, 12, Sampling(temperature, seed=3), stop=opened.stop)
        model.train()
        assert written == [opened.text_of(answer) for answer in answers] and len({*written}) == 2


@pytest.mark.slow
def test_a_run_with_samples_is_the_same_run(tmp_path, corpus):
    """To the bit, on two ranks that gather their parameters while the model runs; the greedy texts are those of
    `zaya generate`.
    """
    (tmp_path / "prompts.txt").write_text("def read(\nimport os\nclass A\n")
    sampled = (f"stage.sample_prompts={tmp_path / 'prompts.txt'}", "stage.sample_tokens=8")
    overrides = ["nproc=2", "stage.train_iters=6", "stage.eval_interval=3", "checkpoint.save_interval=6", "optim=muon"]
    overrides += ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
    plain = train(tmp_path / "plain", corpus, *overrides)
    run = train(tmp_path / "sampled", corpus, *overrides, *sampled)
    for key in ("loss", "grad_norm", "router_entropy", "expert_load"):
        assert [row[key] for row in run.steps().values()] == [row[key] for row in plain.steps().values()]
    assert len(run.steps()) == 6 and run.validation() == plain.validation()
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    samples = {row["step"]: row["samples"] for row in rows if "samples" in row}
    assert list(samples) == [3, 6] and "step 6: 'def read(' -> " in run.output
    words = ("--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "8", "--json")
    generated = zaya("generate", str(run.run_dir), *words).stdout.splitlines()
    answers = [json.loads(line) for line in generated if line.startswith("{")]
    assert samples[6] == [{"prompt": answer["prompt"], "text": answer["text"]} for answer in answers]

# SPDX-License-Identifier: Apache-2.0
"""`zaya train ... explain_optim=true`: every parameter of the real model, and nothing launched."""

import pytest

from tests.running import zaya


# The second: what is `auto` is settled before a model is built.
@pytest.mark.slow  # the test below reads the full model too
@pytest.mark.parametrize("words", [(), ("cluster=h100_8", "dry_run=true")], ids=["run", "dry_run"])
def test_the_full_model_is_explained_and_nothing_is_created(tmp_path, words):
    run_dir = tmp_path / "run"
    done = zaya(
        "train",
        "experiment=zaya1_base",
        "explain_optim=true",
        "data.path=none",
        f"run_dir={run_dir}",
        "optim.overrides=['*.router.out_proj.weight optimizer=adamw lr_mult=0.5']",
        *words,
    )
    assert done.returncode == 0 and not run_dir.exists()
    rows = {
        line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith(("decoder", "embedding"))
    }
    fc1 = "decoder.layers.*.mlp.experts.linear_fc1.weight*"
    assert rows[fc1][1] == "640" and "muon 4096 x 2048, scale 12.8" in " ".join(rows[fc1]) and rows[fc1][-1] == "0.1"
    assert rows["decoder.layers.*.mlp.router.out_proj.weight"][-3:] == ["adamw", "0.0003", "0.1"]
    assert rows["embedding.word_embeddings.weight"][-3:] == ["adamw", "0.0006", "0.1"]
    assert rows["decoder.final_layernorm.weight"][-1] == "0"
    totals = [line.split() for line in done.stdout.splitlines() if line.startswith(("muon ", "adamw "))]
    elements = sum(int(words[3].replace(",", "")) for words in totals)
    assert elements == 8_840_488_784


@pytest.mark.slow  # tests/optim/test_parameter_role.py has the message, tests/cli other mistakes of users
def test_an_override_that_fits_nothing_is_a_mistake_of_the_user():
    done = zaya("train", "experiment=cpu_demo", "explain_optim=true", "optim.overrides=['*.qkv.* lr_mult=2']")
    assert done.returncode == 2 and "no parameter matches *.qkv.*" in done.stdout

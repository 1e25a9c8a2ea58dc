# SPDX-License-Identifier: Apache-2.0
"""Test that planted secrets do not reach verify.json or the support bundle, and that figures stay."""

import json
import tarfile

import pytest

from zaya_plugin.verify import bundle
from zaya_plugin.verify.secrets import REMOVED, cleaned, is_secret, of_data

SECRET = "S3cr3tValue0123456789"
PLANTED = {
    "shell": f"export WANDB_API_KEY={SECRET}",
    "yaml": f"  environment:\n    HF_TOKEN: {SECRET}\n",
    "json": f'{{"aws_secret_access_key": "{SECRET}"}}',
    "python": f"{{'password': '{SECRET}', 'port': 1}}",
    "url": f"git clone https://me:{SECRET}@example.com/team/repo",
    "url of a token": f"https://{SECRET}@github.com/team/repo",
    "header": f"Authorization: Bearer {SECRET}",
    "other header": f"authorization: token {SECRET}",
    "flag": f"zaya train --api-key {SECRET} seed=1",
    "camel case": f'"apiKey": "{SECRET}"',
    "netrc": f"machine api.wandb.ai login user password {SECRET}",
    "key block": f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    "signed link": f"https://example.com/data?X-Amz-Signature={SECRET}&x=1",
    "hugging face": "downloading with hf_S3cr3tValue0123456789",
    "github": "remote: ghp_S3cr3tValue0123456789",
    "wandb": "wandb: using key 0123456789abcdef0123456789abcdef01234567",
    "user": "File /home/S3cr3tValue0123456789/zaya/train.py, line 3",
}
KEPT = (
    "tokens_per_s: 4200, total_tokens=16384, --random-tokens=262272, tokenizer: data/tok",
    "num_key_value_heads: 2",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "https://github.com/pytorch/pytorch/pull/175377",
    "step 3/90  loss 8.0198  lr 1.00e-04  2.6k tok/s",
    "user@host:/opt/rocm/lib",
)


@pytest.mark.parametrize("form", PLANTED)
def test_a_planted_secret_is_removed(form):
    text = cleaned(PLANTED[form])
    assert SECRET not in text and "0123456789" not in text, text


@pytest.mark.parametrize("text", KEPT)
def test_figures_stay(text):
    assert cleaned(text) == text


def test_cleaning_twice_changes_nothing():
    for text in PLANTED.values():
        assert cleaned(cleaned(text)) == cleaned(text)


def test_data_and_variables():
    assert is_secret("AWS_SECRET_ACCESS_KEY") and is_secret("hf_token") and not is_secret("TOKENIZERS_PARALLELISM")
    given = {"MY_PASSWORD": "123", "NCCL_DEBUG": "WARN", "HTTPS_PROXY": f"http://u:{SECRET}@proxy:80"}
    found = of_data({"recipe": [given], "tokens": 4, "ulps": float("inf")})
    expected = {"MY_PASSWORD": REMOVED, "NCCL_DEBUG": "WARN", "HTTPS_PROXY": f"http://{REMOVED}@proxy:80"}
    assert found == {"recipe": [expected], "tokens": 4, "ulps": "inf"}


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A run with a secret in its recipe, its logs, the environment, doctor's report and the record; its bundle."""
    run = tmp_path / "runs" / "mine"
    (run / "logs" / "launch_x" / "0").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "recipe.yaml").write_text(f"name: mine\ncluster:\n  environment:\n    WANDB_API_KEY: {SECRET}\n")
    (run / "logs" / "rank0.log").write_text(f"a long log\n{PLANTED['url']}\n{PLANTED['header']}\n")
    (run / "logs" / "launch_x" / "0" / "stderr.log").write_text(PLANTED["key block"])
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 8.0, "tokens_per_s": 4200.0}\n')
    (run / "checkpoints" / "common.pt").write_bytes(b"weights")
    record = tmp_path / "verify.json"
    record.write_text(json.dumps({"schema": "zaya verify/1", "note": f"HF_TOKEN={SECRET}"}))
    monkeypatch.setattr(bundle, "doctor_report", lambda: {"python": f"/home/{SECRET}/bin/python"})
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    monkeypatch.setattr(bundle, "OF_A_FILE", 10_000)
    (run / "logs" / "rank1.log").write_text(f"password: {SECRET}\n" + "x" * 9_000 + f"\nlast line {PLANTED['flag']}\n")
    with tarfile.open(bundle.bundle(run, record)) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def test_a_bundle_holds_what_a_question_needs_and_no_secret(packed):
    assert {"verify.json", "doctor.json", "environment.json", "run/recipe.yaml", "run/metrics.jsonl"} < set(packed)
    assert {"run/logs/rank0.log", "run/logs/launch_x/0/stderr.log"} < set(packed)
    assert not any("checkpoints" in name for name in packed)
    assert json.loads(packed["run/metrics.jsonl"])["tokens_per_s"] == 4200.0
    assert "WANDB_API_KEY" in packed["run/recipe.yaml"] and "last line" in packed["run/logs/rank1.log"]
    assert all(name in packed["contents.txt"] for name in packed if name != "contents.txt")
    leaks = {name: text for name, text in packed.items() if SECRET in text}
    assert leaks == {}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^--bundle=.*no run directory.*Fix: --bundle runs/<name>\.$"):
        bundle.bundle(tmp_path, tmp_path / "verify.json")

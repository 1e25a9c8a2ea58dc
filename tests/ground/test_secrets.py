# SPDX-License-Identifier: Apache-2.0
"""Test that planted secrets do not reach verify.json or the support bundle, and that figures stay."""

import json
import tarfile
import time

import pytest

from tests.cpu_speed import allowed
from zaya_plugin.ground.secrets import REMOVED, cleaned, is_secret, of_data
from zaya_plugin.machines import support_bundle

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
    "user of a scratch folder": "/scratch/S3cr3tValue0123456789/run",
    "no separator": f"PGPASSWORD={SECRET} MYSQL_PWD={SECRET} SSHPASS={SECRET} APIKEY={SECRET} GITHUB_PAT={SECRET}",
    "camel case of a connection": f"AccountName=a;AccountKey={SECRET}==;EndpointSuffix=b",
    "words in quotes": f'password: "correct horse {SECRET}"',
    "words without quotes": f"password: correct horse {SECRET}\nseed: 1",
    "comma in quotes": f"api_key: 'ab,{SECRET}'",
    "quote in quotes": f"api_key: 'it''s,{SECRET}'",
    "escaped quote": rf'"password": "ab\"cd {SECRET}"',
    "quote in a word": f'password=ab"{SECRET}',
    "JSON in JSON": rf'{{"text": "{{\"api_key\": \"ab {SECRET}\"}}"}}',
    "flag, next line": f"--wandb-api-key\n{SECRET}\n--seed\n1",
    "flag, next of a list": f"['--wandb-api-key', '{SECRET}', '--seed']",
    "flag in quotes": f'--db-password "correct horse {SECRET}"',
    "list": f'{{"api_keys": ["a", "{SECRET}"]}}',
    "list of YAML": f"api_keys:\n  - a\n  - {SECRET}\nseed: 1",
    "at sign in a password": f"https://me:p@ss{SECRET}@example.com/team",
}
KEPT_TEXTS = (
    "tokens_per_s: 4200, total_tokens=16384, --random-tokens=262272, tokenizer: data/tok",
    "num_key_value_heads: 2",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "https://github.com/pytorch/pytorch/pull/175377",
    "step 3/90  loss 8.0198  lr 1.00e-04  2.6k tok/s",
    "user@host:/opt/rocm/lib",
    '{"bos_token": 5, "eos_token": "</s>", "token": 7, "key": 1.5e-3, "use_auth": true, "api_key": null}',
    "missing_keys: layer.0.weight",
    "--num-key-value-heads 2 --pad-token <pad>",
    "HIP_COMPAT=on TORCH_BYPASS=on",
    "KeyError: 'experts'",
)
SECRET_NAMES = (
    *("PGPASSWORD", "MYSQL_PWD", "SSHPASS", "DB_PASS", "APIKEY", "WANDB_APIKEY", "MYTOKEN", "GITHUB_PAT", "AccountKey"),
    *("api_keys", "AWS_ACCESS_KEY_ID", "OAUTH", "X-Amz-Signature", "githubPat", "cluster.environment.HF_TOKEN"),
)
HARMLESS_NAMES = (
    *("bos_token", "eos_token_id", "num_tokens", "total_tokens", "tokenizer", "tokens_per_s", "key_value", "path"),
    *("num_key_value_heads", "missing_keys", "compat", "COMPAT", "bypass", "design", "keyword"),
)
JSON_LINES = (
    '{"bos_token": 5, "secret": 5, "seed": 1}',
    '{"api_keys": ["a", "b"], "seed": 1}',
    '{"credentials": {"user": "a", "pw": "b"}, "seed": 1}',
    '{"command": "zaya train api_key=abc", "seed": 1}',
    r'{"text": "password: a\\b\nstep \"2\"", "seed": 1}',
    r'{"text": "{\"api_key\": \"a b\"}", "seed": 1}',
    '{"argv": ["--api-key", "abc", "--seed", "2"], "seed": 1}',
)


@pytest.mark.parametrize("form", PLANTED)
def test_a_planted_secret_is_removed(form):
    text = cleaned(PLANTED[form])
    assert SECRET not in text and "0123456789" not in text, text


@pytest.mark.parametrize("text", KEPT_TEXTS)
def test_figures_stay(text):
    assert cleaned(text) == text


def test_cleaning_twice_changes_nothing():
    for text in (*PLANTED.values(), *JSON_LINES):
        assert cleaned(cleaned(text)) == cleaned(text)


def test_a_short_password_of_netrc():
    assert cleaned("machine a login b password c1\n") == f"machine a login b password {REMOVED}\n"


def test_what_follows_a_secret_stays():
    assert cleaned(PLANTED["words without quotes"]) == f"password: {REMOVED}\nseed: 1"
    assert cleaned(PLANTED["flag, next line"]) == f"--wandb-api-key\n{REMOVED}\n--seed\n1"
    assert cleaned(PLANTED["list of YAML"]).endswith(f"{REMOVED}\nseed: 1")
    assert cleaned("--use-auth --seed 12") == "--use-auth --seed 12"


def test_names():
    assert [name for name in SECRET_NAMES if not is_secret(name)] == []
    assert [name for name in HARMLESS_NAMES if is_secret(name)] == []


@pytest.mark.parametrize("text", JSON_LINES)
def test_json_stays_valid(text):
    found = json.loads(cleaned(text))
    assert found["seed"] == 1 and found.keys() == json.loads(text).keys()


REPEATED = (
    "1.2-",
    "-",
    "a",
    "key=[",
    'key="',
    "key='x ",
    "--key ",
    "http://",
    "a:",
    "login ",
    "token\n- ",
    "\\",
    "api ",
)


@pytest.mark.parametrize("piece", [*REPEATED, "-----BEGIN ", "sk-", "KEY", "\\'key=\\\""])
def test_the_time_grows_with_the_length(piece):
    text = piece * (100_000 // len(piece))
    started = time.process_time()
    cleaned(text)
    assert time.process_time() - started < allowed(1)


def test_data_and_variables():
    assert is_secret("AWS_SECRET_ACCESS_KEY") and is_secret("hf_token") and not is_secret("TOKENIZERS_PARALLELISM")
    given = {"MY_PASSWORD": "123", "NCCL_DEBUG": "WARN", "HTTPS_PROXY": f"http://u:{SECRET}@proxy:80"}
    found = of_data({"recipe": [given], "tokens": 4, "ulps": float("inf")})
    expected = {"MY_PASSWORD": REMOVED, "NCCL_DEBUG": "WARN", "HTTPS_PROXY": f"http://{REMOVED}@proxy:80"}
    assert found == {"recipe": [expected], "tokens": 4, "ulps": "inf"}
    given = {"argv": ["--api-key", SECRET, "--seed", "1"], "api_keys": [SECRET], "password": 1234, "bos_token": "<s>"}
    expected = {"argv": ["--api-key", REMOVED, "--seed", "1"], "api_keys": REMOVED, "password": REMOVED}
    assert of_data(given) == expected | {"bos_token": "<s>"}


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
    record.write_text(json.dumps({"schema": "zaya verify/2", "note": f"HF_TOKEN={SECRET}"}))
    monkeypatch.setattr(support_bundle, "examine", lambda *_: {"python": f"/home/{SECRET}/bin/python"})
    for name in ("SOME_TOKEN", "USER", "LOGNAME", "SLURM_JOB_USER", "SSH_CONNECTION", "NCCL_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    for name in ("NCCL_DEBUG", "SLURM_JOB_ID", "OMP_NUM_THREADS", "MASTER_ADDR"):
        monkeypatch.setenv(name, "kept")
    monkeypatch.setattr(support_bundle, "MAX_FILE_BYTES", 10_000)
    (run / "logs" / "rank1.log").write_text(f"password: {SECRET}\n" + "x" * 9_000 + f"\nlast line {PLANTED['flag']}\n")
    with tarfile.open(support_bundle.pack(run, record)) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def test_a_bundle_holds_what_a_question_needs_and_no_secret(packed):
    assert {"verify.json", "doctor.json", "environment.json", "run/recipe.yaml", "run/metrics.jsonl"} < set(packed)
    assert {"run/logs/rank0.log", "run/logs/launch_x/0/stderr.log"} < set(packed)
    assert not any("checkpoints" in name for name in packed)
    assert json.loads(packed["run/metrics.jsonl"])["tokens_per_s"] == 4200.0
    assert "WANDB_API_KEY" in packed["run/recipe.yaml"] and "last line" in packed["run/logs/rank1.log"]
    assert all(name in packed["contents.txt"] for name in packed if name != "contents.txt")
    environment = json.loads(packed["environment.json"])
    assert {"NCCL_DEBUG", "SLURM_JOB_ID", "OMP_NUM_THREADS", "MASTER_ADDR"} <= environment.keys()
    assert {"SOME_TOKEN", "USER", "LOGNAME", "SLURM_JOB_USER", "SSH_CONNECTION"}.isdisjoint(environment)
    leaks = {name: text for name, text in packed.items() if SECRET in text}
    assert leaks == {}


def test_a_file_that_cannot_be_read_and_a_link_to_elsewhere_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(support_bundle, "examine", lambda *_: {})
    (run := tmp_path / "run" / "logs").mkdir(parents=True)
    (run.parent / "recipe.yaml").write_text("name: mine\n")
    (tmp_path / "id_rsa").write_text("x")
    (run / "elsewhere.log").symlink_to(tmp_path / "id_rsa")
    (run / "gone.log").symlink_to("nothing")
    (run / "same.log").symlink_to("a.log")
    (run / "a.log").write_text("hello")
    with tarfile.open(support_bundle.pack(run.parent, tmp_path / "verify.json")) as archive:
        assert {"run/logs/a.log", "run/logs/same.log"} < {*archive.getnames()}
        notes = archive.extractfile("contents.txt").read().decode()
        assert "run/logs/elsewhere.log" not in archive.getnames()
    assert "not readable: run/logs/elsewhere.log (a link out of the run's folder)" in notes
    assert "not readable: run/logs/gone.log (not a regular file)" in notes


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^--bundle=.*not a run directory.*Fix: --bundle runs/<name>\.$"):
        support_bundle.pack(tmp_path, tmp_path / "verify.json")

# SPDX-License-Identifier: Apache-2.0
"""docs/verification.md is made of docs/evidence.yaml, and marks what is older than its code."""

import subprocess

import pytest

from tools import evidence


def test_a_row_that_is_not_evidence_is_refused():
    rows = evidence.load()
    assert len(rows["claims"]) > 30 < len(rows["runs"])
    row = rows["claims"][0]
    for wrong, message in (
        ({**row, "where": "CPU"}, "its keys must be claim, device"),
        ({**row, "device": ""}, "no device"),
        ({**row, "covers": ["hip_ops"]}, "covers needs a commit"),
        ({**row, "commit": "bebc6f1", "covers": ["hip_ops/gone"]}, "hip_ops/gone, which does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            evidence.tables({**rows, "claims": [wrong]}, {})


def test_a_claim_that_is_older_than_its_code_is_marked(tmp_path, monkeypatch):
    def commit(file: str, text: str, days: int = 0) -> str:
        (tmp_path / file).write_text(text)
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"{1_800_000_000 + 86_400 * days} +0000")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", text], check=True)
        return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()

    def row(at: str) -> dict:
        return {"claim": "fast", "device": "CPU", "commit": at, "figure": "1", "covers": ["kernel.py"]}

    def older(at: str) -> dict:
        return evidence.older_rows({"claims": [row(at)], "figures": [], "runs": []})

    def expired(at: str) -> dict:
        return evidence.too_old({"claims": [row(at)], "figures": [], "runs": []}, older(at))

    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    (tmp_path / ".git-blame-ignore-revs").write_text("")
    assert older("1234567") == {"fast": None}, "there is no history yet"
    assert expired("1234567") == {}
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    first = commit("kernel.py", "x = 1")
    commit("other.py", "y = 1")
    assert older(first) == {}
    second = commit("kernel.py", "x = 2")
    assert older(first) == {"fast": [second]} and older(f"{first[:7]}; {second[:7]}") == {}
    third = commit("kernel.py", "x = 2  # two")
    assert older(second) == {"fast": [third]}
    (tmp_path / ".git-blame-ignore-revs").write_text(f"# a comment\n{third}\n")
    assert older(second) == {} and older("1234567") == {"fast": None}
    commit("kernel.py", "x = 3", days=29)
    assert expired(second) == {}
    fourth = commit("kernel.py", "x = 4", days=32)
    assert expired(second) == {"fast": 32}
    assert expired(f"{second}, again at {fourth}") == {}
    rows = {"claims": [row(first)], "figures": [], "runs": []}
    assert f"| {first}{evidence.MARK} |" in evidence.tables(rows, older(first))
    assert evidence.MARK not in evidence.tables(rows, {"fast": None})

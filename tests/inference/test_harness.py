# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness on a task of local files: our figures against its own class for transformers."""

import json
import shutil

import pytest

from tests.inference.small import TEXTS, open_given
from zaya_plugin import cli

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """\
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WRITTEN = """\
task: local_written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""
GROUP = """\
group: local_group
task: [local_choice, local_half]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""
BROKEN = WRITTEN.replace("local_written", "local_broken") + "process_docs: !function needs_a_package.rows\n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": text[: 4 + 3 * n], "choices": [text[4 + 3 * n :], " dog", " five six"], "label": n % 3}
        for n in range(4)
        for text in TEXTS
    ]
    (folder / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("text", TEXT), ("written", WRITTEN)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.json")))
    return folder


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def models(published, theirs):
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    from zaya_plugin.inference.harness import ZayaLM

    tokenizer = AutoTokenizer.from_pretrained(published)
    return ZayaLM(open_given(published, dtype="fp32"), 4), HFLM(
        pretrained=theirs, tokenizer=tokenizer, batch_size=4, device="cpu"
    )


def requests(kind, pairs):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, pair, number) for number, pair in enumerate(pairs)]


def test_loglikelihoods_are_those_of_transformers(models):
    ours, theirs = models
    pairs = [(text[:n], text[n:]) for text in TEXTS for n in (0, 1, 4, 9)] + [("the cat ", "sat on"), ("a" * 400, " b")]
    mine = ours.loglikelihood(requests("loglikelihood", pairs))
    # One by one: HFLM computes requests of the same tokens with another border between both parts as one request.
    expected = [theirs.loglikelihood(requests("loglikelihood", [pair]), disable_tqdm=True)[0] for pair in pairs]
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in expected]
    assert max(abs(a - b) for (a, _), (b, _) in zip(mine, expected, strict=True)) < 1e-4


def test_rolling_and_texts_are_those_of_transformers(models):
    ours, theirs = models
    texts = [(text,) for text in (*TEXTS, "the dog " * 200)]
    mine, expected = (model.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) for model in (ours, theirs))
    assert max(abs(a - b) / abs(b) for a, b in zip(mine, expected, strict=True)) < 1e-6
    asked = [(text[:9], {"until": ["e", "o"], "max_gen_toks": 24}) for text in TEXTS]
    mine, expected = (model.generate_until(requests("generate_until", asked)) for model in (ours, theirs))
    assert mine == expected


@pytest.mark.slow
def test_local_tasks(published, tasks, offline, tmp_path, capsys):
    out = tmp_path / "found.json"
    names = "local_choice,local_text,local_written"
    code = cli.main(["eval", str(published), "--tasks", names, "--include", str(tasks), "--output", str(out)])
    results = json.loads(out.read_text())["results"]
    assert code == 0 and results.keys() == set(names.split(","))
    assert results["local_choice"]["acc"] * 12 == pytest.approx(round(results["local_choice"]["acc"] * 12))
    assert results["local_text"]["word_perplexity"] > 1 and "exact_match" in results["local_written"]
    assert "local_choice" in capsys.readouterr().out
    assert cli.main(["eval", str(published), "--tasks", "no_such_task"]) == 2
    assert "--tasks=no_such_task: no such task" in capsys.readouterr().err


SUITE = """\
group: local
task: [local_choice, local_half, local_group, local_written, local_broken, local_text]
metadata:
  models: [Published]
  notes: [local stand-ins]
  benchmarks:
    - {title: Choice, kind: knowledge, task: local_choice, shots: 0, metric: acc, published: {Published: 25.0}}
    - {title: Half, kind: knowledge, task: local_half, shots: 0, metric: acc}
    - {title: Group, kind: knowledge, task: local_group, shots: 0, metric: acc}
    - {title: Written, kind: mathematics, task: local_written, shots: 0, metric: exact_match}
    - {title: Broken, kind: mathematics, task: local_broken, shots: 0, metric: exact_match}
    - {title: Text, kind: text, task: local_text, shots: 0, metric: bits_per_byte, scale: 1}
"""


def test_a_suite_on_local_copies_of_each_type_of_task(published, tasks, offline, tmp_path, monkeypatch, capsys):
    """Multiple choice, a group of two such tasks, texts with exact match, one that requires a package, rolling
    log-likelihoods; first without the last one's file.
    """
    from zaya_plugin.commands import evaluation_suite
    from zaya_plugin.inference.harness import task_manager

    suites, copies, out = tmp_path / "suites", tmp_path / "copies", tmp_path / "found.json"
    suites.mkdir()
    (suites / "local.yaml").write_text(SUITE)
    monkeypatch.setattr(evaluation_suite, "SUITES", suites)
    shutil.copytree(tasks, copies)
    half = tmp_path / "half.json"
    half.write_text("".join((tasks / "rows.json").read_text().splitlines(keepends=True)[::2]))
    (copies / "half.yaml").write_text(CHOICE.replace("FILE", str(half)).replace("local_choice", "local_half"))
    (copies / "group.yaml").write_text(GROUP)
    (copies / "broken.yaml").write_text(BROKEN.replace("FILE", str(half)))
    (copies / "needs_a_package.py").write_text("import no_such_package\n\n\ndef rows(dataset):\n    return dataset\n")
    (copies / "text.yaml").rename(tmp_path / "text.yaml")
    words = ["eval", str(published), "--suite", "local", "--tasks-dir", str(copies), "--output", str(out)]
    assert cli.main(words) == 0
    table = capsys.readouterr().out
    assert f"\n--tasks-dir {copies}: tasks are those of that folder" in table
    assert "Text: left out, no such task there" in table
    assert "Broken: left out, ModuleNotFoundError: No module named 'no_such_package'" in table
    first = json.loads(out.read_text())["results"]
    assert first.keys() == {"local_choice", "local_half", "local_group", "local_written"}
    whole, part, both = (first[f"local_{name}"]["acc"] for name in ("choice", "half", "group"))
    assert both == pytest.approx((2 * whole + part) / 3) and whole != part, "a mean over documents"
    (tmp_path / "text.yaml").rename(copies / "text.yaml")
    (copies / "needs_a_package.py").write_text("def rows(dataset):\n    return dataset\n")
    assert cli.main(words) == 0
    done = capsys.readouterr()
    results = json.loads(out.read_text())["results"]
    assert f"local_choice: from {out}" in done.err and results["local_choice"] == first["local_choice"]
    row = next(line.split() for line in done.out.splitlines() if " Choice " in line)
    assert row[4] == f"{100 * first['local_choice']['acc']:.1f}" and row[-1] == "25.0"
    assert results["local_broken"].keys() >= {"exact_match"} and "left out" not in done.out
    assert results["local_text"]["bits_per_byte"] > 0 and out.with_suffix(".txt").read_text() == done.out
    # lm_eval's own command line takes both folders: the group, and the tasks
    assert task_manager(str(suites), defaults=False).match_tasks(["local"]) == ["local"]


def test_lm_eval_reads_the_packaged_suite_as_a_group():
    from zaya_plugin.commands.evaluation_suite import SUITES, read_suite
    from zaya_plugin.inference.harness import task_manager

    manager = task_manager(str(SUITES))
    names = ["zaya1", *(row["task"] for row in read_suite("zaya1")["benchmarks"] if row["task"])]
    assert sorted(manager.match_tasks(names)) == sorted(names)

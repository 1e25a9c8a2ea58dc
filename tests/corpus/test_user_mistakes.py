# SPDX-License-Identifier: Apache-2.0
"""A user's mistake in any `zaya data` command: exit code 2, one message that names the cause, and nothing is created.

Permissions are tested with files in the place of directories and with /proc, which refuses root too.
"""

import gzip
import json
import os
import shutil

import pytest

from zaya_plugin import cli

BPE = ("--train-bpe", "300", "--workers", "1")


@pytest.fixture
def place(tmp_path, prepared):
    """Things of the wrong kind, by name."""
    at = tmp_path / "place"
    at.mkdir()
    (at / "file").write_text("x")
    (at / "empty").mkdir()
    (at / "text.txt").write_text("some text\n" * 50)
    (at / "nothing.txt").write_text("")
    (at / "lines.jsonl").write_text('{"text": "one"}\n{"text": \n[]\nnull\n{"other": 1}\n' * 3)
    (at / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(10_000))[:500])
    (at / "no.txt.gz").write_bytes(b"no gzip")
    (at / "no.jsonl.zst").write_bytes(b"no zstandard")
    (at / "no.parquet").write_bytes(b"no parquet")
    (at / "bad.jinja").write_text("{% for %}")
    for name, change in {
        "cut": lambda to: os.truncate(to / "train.bin", 100),
        "index": lambda to: (to / "train.idx").write_bytes(b"no index"),
        "short index": lambda to: os.truncate(to / "train.idx", 40),
        "manifest": lambda to: (to / "manifest.json").write_text("{"),
        "other manifest": lambda to: (to / "manifest.json").write_text("[]"),
        "without bin": lambda to: (to / "train.bin").unlink(),
        "without tokenizer": lambda to: shutil.rmtree(to / "tokenizer"),
        "without manifest": lambda to: (to / "manifest.json").unlink(),
    }.items():
        shutil.copytree(prepared, at / name)
        change(at / name)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (at / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return at


# The words of a command; {at} is the fixture's folder, {data} an intact dataset, {out} a name that is free. Then what
# the message names.
CASES = [
    *(
        (f"prepare --input {{at}}/{given} --output {{out}}", named)
        for given, named in (
            ("nowhere", "nowhere"),
            ("empty", "empty"),
            ("nothing.txt", "nothing.txt: the documents hold no text"),
            ("lines.jsonl", "lines.jsonl"),
            ("cut.txt.gz", "cut.txt.gz"),
            ("no.txt.gz", "no.txt.gz"),
            ("no.jsonl.zst", "no.jsonl.zst"),
            ("no.parquet", "no.parquet"),
            ("file/below", "file/below"),
        )
    ),
    ("prepare --input {at}/text.txt --output {at}/file/out", "{at}/file"),
    ("prepare --input {at}/text.txt --output /proc/out", "/proc"),
    ("prepare --input {at}/text.txt --output {at}/file", "--output"),
    ("prepare --input {at}/text.txt --output {at}/empty/../text.txt", "--output"),
    ("prepare --input /proc/self/mem --output {out}", "/proc/self/mem"),
    ("prepare --input {at}/text.txt --field nothing --chat --output {out}", ""),
    ("prepare --input {at}/empty --glob [ --output {out}", "{at}/empty"),
    ("prepare --input {at} --glob *.nothing --output {out}", "*.nothing"),
    ("prepare --input {at}/text.txt --tokenizer {at}/nowhere --output {out}", "nowhere"),
    ("prepare --input {at}/text.txt --tokenizer {at}/empty --output {out}", "{at}/empty"),
    ("prepare --input {at}/text.txt --tokenizer {at}/file --output {out}", "{at}/file"),
    ("prepare --input {at}/chats.jsonl --chat --tokenizer {data}/tokenizer --output {out}", "template"),
    (
        "prepare --input {at}/chats.jsonl --chat --tokenizer {data}/tokenizer --chat-template {at}/bad.jinja --output {out}",
        "the chat template fails",
    ),
    (
        "prepare --input {at}/chats.jsonl --chat --tokenizer {data}/tokenizer --chat-template {at}/nowhere --output {out}",
        "nowhere",
    ),
    ("prepare --input {at}/text.txt --valid-fraction 1.5 --output {out}", "--valid-fraction"),
    *(
        (f"{command} {{at}}/{given}{more}", given)
        for command, more in (
            ("pack", " --sequence-length 64 --output {out}"),
            ("check", ""),
            ("inspect", ""),
            ("bundle", " --output {out}"),
        )
        for given in ("nowhere", "file", "empty", "manifest", "other manifest", "index", "short index", "without bin")
    ),
    *(
        (f"{command} {{at}}/cut{more}", "cut")
        for command, more in (
            ("pack", " --sequence-length 64 --output {out}"),
            ("check", ""),
            ("bundle", " --output {out}"),
        )
    ),
    ("pack {data} --sequence-length 64 --output {data}", "--output"),
    ("pack {data} --sequence-length 64 --output {at}/file/out", "{at}/file"),
    ("pack {data} --sequence-length 64 --output /proc/out", "/proc"),
    ("pack {data} --sequence-length 64 --output {at}/file", "--output"),
    ("pack {data} --sequence-length 2 --long drop --output {out}", ""),
    ("pack {at}/without@tokenizer --sequence-length 64 --output {out}", "tokenizer"),
    ("pack {at}/without@manifest --sequence-length 64 --output {out}", "manifest"),
    ("check {data}/train --tokenizer {at}/nowhere", "nowhere"),
    ("check experiment=cpu_demo data.path={at}/nowhere", "nowhere"),
    ("check experiment=cpu_demo data.pathh=x", "data.pathh"),
    ("check experiment=cpu_demo --config-dir {at}/nowhere", "nowhere"),
    ("inspect {data} --start 1000000000", "--start"),
    ("inspect {data} --split nothing", "--split"),
    ("inspect {at}/without@tokenizer", "tokenizer"),
    ("inspect {at}/without@manifest/train", "tokenizer"),
    ("bundle {data} {data} --output {out}", "{data}"),
    ("bundle {data} --output {at}/file/out", "{at}/file"),
    ("bundle {data} --output /proc/out", "/proc"),
    ("bundle {data} --output {data}", "--output"),
    ("warm experiment=cpu_demo data.path={data} --steps 5 --node 99", "--node"),
    ("warm {data} --steps 5", "--steps"),
    ("warm {at}/nowhere", "nowhere"),
    ("warm {at}/empty", "{at}/empty"),
    ("warm {at}/manifest", "manifest"),
    ("warm experiment=nothing", "experiment=nothing"),
    ("mixture {data}", ""),
    ("mixture experiment=cpu_demo", "data/stdlib"),
    ("mixture experiment=cpu_demo data.path={data} data.consumed=[x]", "data.consumed"),
    ("mixture experiment=cpu_demo data.path={data} data.blend=['1 {at}/nowhere']", "nowhere"),
    ("mixture experiment=cpu_demo data.path={data} stage.train_iters=0", "stage.train_iters"),
]


def test_a_folder_without_manifest_is_named_with_what_is_allowed_and_a_fix(place, prepared, tmp_path, capfd):
    allowed = " Allowed: a directory of `zaya data prepare`, or the prefix of a Megatron dataset ({0}.bin and {0}.idx)."
    for words, key, fix in (
        (["check", "{0}/empty"], "", "zaya data prepare --output {0}/empty --input FILES"),
        (["inspect", "{0}/empty/"], "", "zaya data prepare --output {0}/empty --input FILES; or correct the path"),
        (["pack", "{0}/empty", "--sequence-length", "9", "--output", "{1}"], "", "zaya data prepare"),
        (
            ["bundle", "{0}/without manifest", "--output", "{1}"],
            "",
            "give one of its prefixes: {0}/without manifest/train",
        ),
        (
            ["check", "experiment=cpu_demo", "data.path={0}/empty"],
            "data.path=",
            "zaya data prepare --output {0}/empty --input FILES; or correct the path",
        ),
        (
            ["check", "experiment=cpu_demo", "data.path={2}", "data.blend=['1 {0}/empty']"],
            "data.blend=",
            "zaya data prepare",
        ),
        (
            ["check", "experiment=cpu_demo", "data.path={2}", "data.valid_blend=['1 {0}/empty']"],
            "data.valid_blend=",
            "zaya data prepare",
        ),
    ):
        assert cli.main(["data", *(word.format(place, tmp_path / "out", prepared) for word in words)]) == 2
        folder = f"{place}/{'without manifest' if 'bundle' in words else 'empty'}"
        told = capfd.readouterr().err
        assert f"{key}{folder}: is a directory without manifest.json" in told, told
        assert allowed.format(folder) in told and f" Fix: {fix}".format(place) in told, told
    for name, fix in (
        ("empty", ""),
        ("place", "choose another --output"),
        ("manifest", "give --overwrite to replace it"),
    ):
        output = place if name == "place" else place / name
        words = ["prepare", "--input", f"{place}/lines.jsonl", "--valid-fraction", "0", "--output", str(output), *BPE]
        assert cli.main(["data", *words]) == 2 * bool(fix)
        assert not fix or f" Allowed: a free name, an empty directory, or a dataset of `zaya data`. Fix: {fix}" in (
            capfd.readouterr().err
        )


@pytest.mark.parametrize(("words", "named"), CASES, ids=[words for words, _ in CASES])
def test_a_mistake_is_one_message_and_code_2(place, prepared, tmp_path, capfd, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    names = {"at": str(place), "data": str(prepared), "out": str(tmp_path / "out")}
    typed = words
    for kind in ("other manifest", "short index", "without bin"):
        typed = typed.replace(kind, kind.replace(" ", "@"))
    typed = [word.format(**names).replace("@", " ") for word in typed.split(" ")]
    if typed[0] == "prepare" and "--tokenizer" not in typed:
        typed += BPE
    elif typed[0] == "prepare":
        typed += ("--workers", "1")  # without processes that import transformers
    if "data.blend" in words:
        typed = [*typed[:3], f"data.blend=['1 {place}/nowhere']"]
    before = sorted(tmp_path.rglob("*"))
    code = cli.main(["data", *typed])
    told = capfd.readouterr().err
    assert code == 2, (typed, told)
    assert "Traceback" not in told and named.format(**names) in told, told
    assert sum(line.startswith("zaya: ") for line in told.splitlines()) == 1, told
    # What the same command continues from is kept in <output>.partial.
    left = [path for path in tmp_path.rglob("*") if tmp_path / "out.partial" not in (path, *path.parents)]
    assert sorted(left) == before, "nothing is left"

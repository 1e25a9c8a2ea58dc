# SPDX-License-Identifier: Apache-2.0
"""`zaya data prepare --chat` and its packing: which tokens are answers, what is refused, the same bytes each time."""

import json

import numpy as np
import pytest

from tests.chat_files import MARKING, PLAIN, TURN, chat, write_chats
from zaya_plugin import cli
from zaya_plugin.data.indexed_dataset import IndexedReader
from zaya_plugin.data.prepared import ANSWER, END, check_dataset, load_manifest, marks_of, packed_loss_mask

LENGTH = 160


@pytest.fixture
def prepare_chats(tmp_path, run, prepared):
    def call(source, *options, template=PLAIN, name="chats", fraction=0):
        (tmp_path / "template.jinja").write_text(template)
        output = tmp_path / name
        words = ["--chat", "--input", source, "--tokenizer", prepared / "tokenizer", "--output", output]
        words += ["--chat-template", tmp_path / "template.jinja", "--valid-fraction", fraction, *options]
        return run(*words), output

    return call


def answers_of(output, split="text"):
    """For each chat the texts of its stretches of answer tokens."""
    from tokenizers import Tokenizer

    reader = IndexedReader(f"{output}/{split}", marks_of(f"{output}/{split}"))
    tokenizer, found = Tokenizer.from_file(f"{output}/tokenizer/tokenizer.json"), []
    for number in range(len(reader)):
        ids, marks = reader.document(number), reader.document_marks(number)
        assert marks[-1] == END and not (marks[:-1] & END).any() and ids[-1] == 0
        stretches = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(marks & ANSWER)) + 1)
        stretches = [ids[part].tolist() for part in stretches if marks[part[0]] & ANSWER]
        found.append([tokenizer.decode(part, skip_special_tokens=False) for part in stretches])
    return found


@pytest.mark.parametrize("template", [PLAIN, MARKING], ids=["prefixes", "generation"])
def test_answers_and_the_ends_of_their_turns_are_marked(tmp_path, prepare_chats, template):
    chats = write_chats(tmp_path / "in.jsonl")
    status, output = prepare_chats(tmp_path / "in.jsonl", template=template)
    wanted = [[m["content"] + "<|endoftext|>" for m in messages if m["role"] == "assistant"] for messages in chats]
    assert status == 0 and answers_of(output) == wanted
    check_dataset(output, 400, eod_id=0, full=True)
    assert load_manifest(output).arguments["--chat"] is True


def test_shipped_templates_and_chats_of_the_standard_library(tmp_path, run, prepared, capsys):
    """ChatML and, behind bos, zaya1; the end of document follows an answer because it is not <|im_end|>. Both refuse
    tools. Chats of the standard library are names and first paragraphs of docstrings.
    """
    from zaya_plugin.data.tokenizer import chat_prompt, open_tokenizer, template_file

    shared = ["--chat", "--tokenizer", prepared / "tokenizer", "--valid-fraction", 0, "--workers", 1]
    lines = [{"messages": chat("q", "a", "r", "b")}, {"messages": chat("q", "a"), "tools": [{"name": "f"}]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, bos in (("chatml", ""), ("zaya1", "<|endoftext|>")):
        words = [*shared, "--chat-template", name, "--output", tmp_path / name]
        assert run(*words, "--input", tmp_path / "in.jsonl") == 0
        assert "form" in (tmp_path / name / "rejected.jsonl").read_text()
        assert answers_of(tmp_path / name) == [["a<|im_end|><|endoftext|>", "b<|im_end|><|endoftext|>"]]
        reader = IndexedReader(f"{tmp_path / name}/text", marks_of(f"{tmp_path / name}/text"))
        tokenizer = open_tokenizer(str(tmp_path / name / "tokenizer"))
        text = tokenizer.decode(reader.document(0).tolist(), skip_special_tokens=False)
        turn = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        assert text.startswith(f"{bos}{turn}a<|im_end|><|endoftext|>\n<|im_start|>user\nr<|im_end|>\n")
        prompt = chat_prompt(str(tmp_path / name / "tokenizer"), "q")
        assert prompt == reader.document(0)[: len(prompt)].tolist()
        assert tokenizer.decode(prompt, skip_special_tokens=False) == bos + turn
    words = [*shared, "--chat-template", template_file("chatml"), "--output", tmp_path / "stdlib"]
    assert run(*words, "--max-bytes", 60_000) == 0
    lines = load_manifest(tmp_path / "stdlib").documents
    assert lines["read"] > 10 and lines["rejected"] == 0
    assert cli.main(["data", "inspect", str(tmp_path / "stdlib"), "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "  | What is __future__." in shown or "  | What is _" in shown
    assert run(*shared, "--chat-template", "none.jinja", "--output", tmp_path / "x") == 2
    assert "--chat-template=none.jinja: must be a file. Allowed: a Jinja template, or chatml or zaya1" in (
        capsys.readouterr().err
    )


def test_both_ways_find_the_same_answers_in_both_forms_of_chats(tmp_path, prepare_chats):
    chats = write_chats(tmp_path / "in.jsonl")
    shared = {"user": "human", "assistant": "gpt"}
    lines = [[{"from": shared[m["role"]], "value": m["content"]} for m in messages] for messages in chats]
    (tmp_path / "shared.jsonl").write_text("".join(json.dumps({"conversations": line}) + "\n" for line in lines))
    outputs = [
        prepare_chats(tmp_path / "in.jsonl", template=PLAIN, name="a")[1],
        prepare_chats(tmp_path / "in.jsonl", template=MARKING, name="b")[1],
        prepare_chats(tmp_path / "shared.jsonl", template=PLAIN, name="c")[1],
        prepare_chats(tmp_path / "in.jsonl", "--part-bytes", 900, template=PLAIN, name="d")[1],
    ]
    for suffix in ("bin", "idx", "marks"):
        assert len({(output / f"text.{suffix}").read_bytes() for output in outputs}) == 1


@pytest.mark.parametrize("template", [PLAIN, MARKING], ids=["prefixes", "generation"])
def test_answers_that_a_key_takes_out_of_the_loss(tmp_path, prepare_chats, capsys, template):
    """weight (OpenAI), train and training (axolotl) and others, as numbers and booleans, in both forms of chats; null is no
    value. A key that no template and no rule uses is reported.
    """
    values = [("weight", 0), ("weight", 0.0), ("train", False), ("loss", False), ("train", 0)]
    values += [("training", False), ("loss_weight", 0), ("mask", True)]
    values += [("weight", 1), ("train", True), ("loss", None), ("mask", False), ("think", 1)]
    with open(tmp_path / "in.jsonl", "w") as out:
        for name, value in values:
            messages = [*chat("q", "wrong", **{name: value}), *chat("q", "right", weight=1, loss=True)]
            messages[0]["weight"], messages[2]["train"] = None, False
            shared = [
                {**message, "from": {"user": "human", "assistant": "gpt"}[message["role"]]} for message in messages
            ]
            shared = [{**message, "value": message.pop("content")} for message in shared]
            out.write(json.dumps({"messages": messages}) + "\n" + json.dumps({"conversations": shared}) + "\n")
    status, output = prepare_chats(tmp_path / "in.jsonl", "--max-rejects", 0, template=template)
    both = [["wrong<|endoftext|>", "right<|endoftext|>"]] * 10
    assert status == 0 and answers_of(output) == [["right<|endoftext|>"]] * 16 + both
    assert capsys.readouterr().err.splitlines()[-1:] == [
        "note: keys of messages that the chat template does not use, so left out: think (2)"
    ]
    assert cli.main(["data", "inspect", str(output), "--count", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  5 positions in the loss: 41-45; their text behind >",
        "  | <user>q<|endoftext|><assistant>wrong<|endoftext|><user>q<|endoftext|><assistant>",
        "  > right<|endoftext|>",
        "  | <|endoftext|>",
    ]
    assert cli.main(["data", "inspect", str(output), "--count", "1", "--characters", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"][1] == [True, "right<|endoftext|>"]


def test_what_a_template_or_a_text_may_hide_is_reported_at_the_end(tmp_path, prepare_chats, capsys):
    """Marks that cover the generation prompt, and special tokens that messages spell out."""
    covers = (
        MARKING.replace(TURN, "")
        .replace("{% generation %}", "{% generation %}" + TURN)
        .replace("{% else %}", "{% else %}" + TURN)
    )
    warning = "warning: {% generation %} of the chat template begins before the end of the generation prompt"
    lines = [chat("q", "a"), chat("say <|endoftext|>", "<|endoftext|><|padding|>"), chat("<|endoftext", "a")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    for name, template in (("plain", PLAIN), ("marking", MARKING), ("covers", covers)):
        status, output = prepare_chats(tmp_path / "in.jsonl", "--part-bytes", 50, template=template, name=name)
        err = capsys.readouterr().err
        assert status == 0 and (warning in err) == (name == "covers")
        assert "warning: 1 documents spell out special tokens, which become these tokens: <|endoftext|> (2), " in err
        assert "<|padding|> (1)\n" in err
    assert answers_of(output)[0] == ["<assistant>a<|endoftext|>"]


@pytest.mark.slow
def test_workers_make_no_difference(tmp_path, prepare_chats):
    write_chats(tmp_path / "in.jsonl")
    outputs = [
        prepare_chats(tmp_path / "in.jsonl", "--workers", n, "--part-bytes", 900, name=str(n))[1] for n in (1, 2)
    ]
    for suffix in ("bin", "idx", "marks"):
        assert len({(output / f"text.{suffix}").read_bytes() for output in outputs}) == 1


BAD = {
    '{"text": "x"}': "no field 'messages' or 'conversations'; it has 'text'",
    '{"messages": []}': "field 'messages' is not a list with messages but []",
    '{"messages": ["x"]}': "messages[0] is not an object but str",
    json.dumps({"messages": chat("q")}): "messages ends with user, which has no answer",
    json.dumps({"messages": [{"role": "assistant", "content": "a"}]}): "messages[0].role=assistant after the beginning",
    json.dumps({"messages": chat("q", "a") + chat("q", "a")[1:]}): "messages[2].role=assistant after assistant",
    json.dumps({"messages": [{"role": "robot", "content": "a"}]}): "messages[0].role='robot'. Allowed: system, user",
    json.dumps({"messages": chat("q", " ")}): "messages[1].content is an empty answer",
    json.dumps({"messages": [{"role": "user", "content": None}]}): "messages[0].content is not a string but NoneType",
    json.dumps({"messages": chat("q", "a"), "tools": "x"}): "field 'tools' is not a list of objects",
    json.dumps(
        {"messages": chat("q", "a", train=0.5)}
    ): "messages[1].train=0.5 of a message of assistant. Allowed: true",
    json.dumps(
        {"messages": chat("q", "a", weight="0")}
    ): 'messages[1].weight="0" of a message of assistant. Allowed: true',
    json.dumps({"messages": chat("q", "a", loss=False)}): "no answer of messages is in the loss",
    json.dumps({"messages": chat("q", "a"), "weight": 0}): "no answer of messages is in the loss",
    json.dumps({"messages": chat("q", "a"), "mask": True}): "no answer of messages is in the loss",
    json.dumps({"messages": chat("q", "a"), "weight": 0.5}): "weight=0.5 of a chat. Allowed: true, false, 1, 0",
    json.dumps({"messages": [{**chat("q")[0], "mask": False}, *chat("q", "a")[1:]]}): (
        "messages[0].mask=false of a message of user. Allowed: true, 1, since the loss is taken on answers alone"
    ),
    json.dumps({"messages": [{**chat("q")[0], "train": True}, *chat("q", "a")[1:]]}): (
        "messages[0].train=true of a message of user. Allowed: false, 0, since the loss is taken on answers alone"
    ),
    '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "a"}]}': (
        "holds a lone surrogate behind "
    ),
}


def test_every_bad_chat_is_named_with_file_line_key_and_what_is_allowed(tmp_path, prepare_chats, capsys):
    lines = [line for bad in BAD for line in (json.dumps({"messages": chat("q", "a")}), bad)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    status, output = prepare_chats(tmp_path / "in.jsonl")
    listed = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
    assert status == 0 and sorted(reject["line"] for reject in listed) == [2 * n + 2 for n in range(len(BAD))]
    for reject in listed:
        assert reject["reason"].startswith(list(BAD.values())[reject["line"] // 2 - 1])
    counts = load_manifest(output).documents
    assert (counts["read"], counts["rejected"], load_manifest(output).splits["text"].documents) == (38, 19, 19)
    assert prepare_chats(tmp_path / "in.jsonl", "--max-rejects", 18)[0] == 2
    assert "--max-rejects=18: 19 documents are rejected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template fails: TemplateError: no system role"),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "leaves out the answer messages[1]"),
        ("{{ messages[0]['content'] }}{% generation %}{{ messages[1]['content'] }}{% endgeneration %}{{ eos_token }}", None),
        (PLAIN.replace(TURN, "{{ 'end' if loop.last else 'more' }}"), "of the prompt of messages[1] are not the first"),
        (MARKING.replace("{% generation %}", "{% if loop.last %}{% generation %}").replace(
            "{% endgeneration %}", "{% endgeneration %}{% endif %}"), "marks 1 stretches of tokens, and the chat has 2"),
    ],
)  # fmt: skip
def test_templates_that_fail_or_do_not_show_the_answers(tmp_path, prepare_chats, capsys, template, reason):
    messages = chat("q", "a", "r", "b") if reason and ("marks 1" in reason or "prompt of" in reason) else chat("q", "a")
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    status, output = prepare_chats(tmp_path / "in.jsonl", template=template)
    error = capsys.readouterr().err
    if reason is None:
        assert status == 0 and answers_of(output) == [["a"]]
    else:
        assert status == 2 and reason in error and "no document is left" in error and "Traceback" not in error


def test_options_that_exclude_chats_are_refused(tmp_path, run, prepared, prepare_chats, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "a.txt").write_text("text")
    write_chats(tmp_path / "in.jsonl", 3)
    common = ["--chat", "--output", tmp_path / "out", "--input", tmp_path / "in.jsonl"]
    tokenizer = ["--tokenizer", prepared / "tokenizer"]
    for words, message in (
        (common, "--chat: chats are encoded by a tokenizer's chat template"),
        ([*common, "--train-bpe", 300], "--train-bpe=300: excludes --chat"),
        ([*common, *tokenizer, "--no-append-eod"], "--no-append-eod=true: excludes --chat"),
        ([*common, *tokenizer], "has no chat template"),
        ([*common, *tokenizer, "--chat-template", "nowhere"], "--chat-template=nowhere: must be a file"),
        ([*common[:3], "--input", tmp_path / "a.txt", *tokenizer], "a.txt: holds no chats. Allowed: .jsonl"),
        ([*common[:3], "--input", "stdlib", tmp_path / "a.txt", *tokenizer], "a.txt: holds no chats"),
        (["--chat", *tokenizer, "--output", tmp_path / "out"], "has no chat template"),
    ):
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
    assert prepare_chats(tmp_path / "empty.jsonl")[0] == 2 and "no document is left" in capsys.readouterr().err
    assert prepare_chats(tmp_path / "in.jsonl", name="same")[0] == 0
    assert prepare_chats(tmp_path / "in.jsonl", name="same", template=MARKING)[0] == 2
    assert "sha256 of --chat-template: it was made with" in capsys.readouterr().err


def test_bins_hold_whole_chats_and_longer_ones_are_left_out_and_counted(tmp_path, prepare_chats, capsys):
    chats = write_chats(tmp_path / "in.jsonl")
    with open(tmp_path / "in.jsonl", "a") as out:
        out.write(json.dumps({"messages": chat("count", " ".join(map(str, range(200))))}) + "\n")
    _, source = prepare_chats(tmp_path / "in.jsonl", fraction=0.2)
    words = [str(source), "--sequence-length", str(LENGTH), "--output", str(tmp_path / "bins")]
    assert cli.main(["data", "pack", *words, "--long", "split"]) == 2
    assert "--long=split: the pieces of a chat would hold answers without" in capsys.readouterr().err
    assert cli.main(["data", "pack", *words]) == 0
    check_dataset(tmp_path / "bins", 400, eod_id=0, full=True)
    counts, answers = load_manifest(tmp_path / "bins").packing.counts, 0
    for split in ("train", "valid"):
        ids = np.fromfile(tmp_path / "bins" / f"{split}.bin", np.uint16).reshape(-1, LENGTH)
        marks = np.fromfile(tmp_path / "bins" / f"{split}.marks", np.uint8).reshape(ids.shape)
        mask = packed_loss_mask(ids, 0, marks)
        assert mask.sum() == counts[split]["loss tokens"] == ((marks & ANSWER) > 0).sum() and mask.any(axis=1).all()
        assert (marks[:, 1:][mask[:, :-1]] & ANSWER).all()
        answers += counts[split]["documents"] - counts[split]["dropped documents"]
    assert answers == len(chats) and sum(count["dropped documents"] for count in counts.values()) == 1
    assert json.loads((tmp_path / "bins" / "dropped.jsonl").read_text())["reason"] == "too long"
    capsys.readouterr()
    assert cli.main(["data", "inspect", str(tmp_path / "bins"), "--count", "1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    marks = np.fromfile(tmp_path / "bins" / "train.marks", np.uint8)[:LENGTH]
    assert shown["in_loss"] == ((marks & ANSWER) > 0).sum()
    assert len(shown["documents"]) == (marks & END > 0).sum() - shown["filling"]
    twice = [str(source), str(tmp_path / "copy")]
    prepare_chats(tmp_path / "in.jsonl", fraction=0.2, name="copy")
    assert cli.main(["data", "bundle", *twice, "--output", str(tmp_path / "both"), "--quiet"]) == 0
    assert (tmp_path / "both" / "train.marks").read_bytes() == 2 * (source / "train.marks").read_bytes()
    (tmp_path / "bins" / "train.marks").write_bytes(b"\0")
    with pytest.raises(ValueError, match="train.marks: has 1 bytes; it marks the answers of"):
        check_dataset(tmp_path / "bins")


def test_reasoning_is_trimmed_with_its_marks(tmp_path, prepare_chats):
    answer = "<think>" + " ".join(map(str, range(200))) + "</think> done"
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": chat("q", "ok", "r", "so " + answer)}) + "\n")
    _, source = prepare_chats(tmp_path / "in.jsonl")
    words = [str(source), "--sequence-length", str(LENGTH), "--output", str(tmp_path / "bins"), "--quiet"]
    assert cli.main(["data", "pack", *words, "--trim-reasoning", "<think>", "</think>"]) == 0
    from tokenizers import Tokenizer

    ids, marks = (
        np.fromfile(tmp_path / "bins" / f"text.{end}", kind) for end, kind in (("bin", "u2"), ("marks", "u1"))
    )
    tokenizer = Tokenizer.from_file(str(source / "tokenizer" / "tokenizer.json"))
    text = tokenizer.decode(ids[(marks & ANSWER) > 0].tolist(), skip_special_tokens=False)
    assert len(ids) == LENGTH and text.startswith("ok<|endoftext|>so <think>0 1 2")
    assert text.endswith("</think> done<|endoftext|>") and "199" not in text

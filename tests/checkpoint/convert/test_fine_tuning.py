# SPDX-License-Identifier: Apache-2.0
"""CPU-sized twins of continue_4k, continue_32k and finetune_chat: published weights, some steps, an export that
transformers reads with the same loss.
"""

import json

import pytest
import torch

from tests.chat_files import PLAIN, write_chats
from tests.checkpoint.convert.published import publish
from tests.running import MICRO, train, zaya
from zaya_plugin import cli
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.config.compose import compose
from zaya_plugin.data.sources import training_samples

LENGTH = 192
MODEL = Description(4, 64, 8, 2, 8, 16, 48, 16, 512, rotary_base=1_000_000, max_position_embeddings=LENGTH)
STEPS, BATCH, LR, WARM_UP = 12, 8, 4e-3, 4
SIZES = [word for word in MICRO if word.startswith(("model.", "logger."))]


def twin(experiment: str, folder, nproc: int = 1, micro: int = 2) -> list[str]:
    """The words of a recipe with the sizes of a test, and nothing else changed."""
    return [
        *(f"experiment={experiment}", "model=zaya_tiny", "cluster=cpu", f"nproc={nproc}", *SIZES),
        *(f"handover.from_hf={folder}", f"stage.seq_length={LENGTH}", f"stage.global_batch_size={BATCH}"),
        *(f"stage.micro_batch_size={micro}", f"stage.train_iters={STEPS}", "stage.eval_iters=0"),
        *(f"optim.lr={LR}", f"optim.lr_warmup_iters={WARM_UP}", "optim.muon_dtype=fp32", "data.num_workers=0"),
    ]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    def smaller(found):  # the size of trained weights, so that a step's loss is one that can fall
        for _name, tensor in found.items():
            if tensor.ndim > 1:
                tensor.mul_(0.1)

    return publish(tmp_path_factory.mktemp("published") / "model", model=MODEL, change=smaller)


@pytest.fixture(scope="module")
def bins(tmp_path_factory, corpus):
    """Packed chats, by the tokenizer of the corpus; its end of document ends every turn."""
    home = tmp_path_factory.mktemp("chats")
    write_chats(home / "in.jsonl", 200)
    (home / "template.jinja").write_text(PLAIN)
    words = ["--chat", "--input", home / "in.jsonl", "--tokenizer", corpus / "tokenizer", "--valid-fraction", 0.1]
    words += ["--chat-template", home / "template.jinja", "--workers", 1, "--output", home / "chats"]
    assert cli.main(["data", "prepare", *map(str, words)]) == 0
    words = [home / "chats", "--sequence-length", LENGTH, "--output", home / "bins", "--quiet"]
    assert cli.main(["data", "pack", *map(str, words)]) == 0
    return home / "bins"


def transformers_loss(folder, words) -> float:
    """The mean loss of the first batch's tokens in the loss, each document computed by itself in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    samples, total, count = training_samples(compose(words)), 0.0, 0
    apart = compose(words).data.packing == "documents"
    for number in range(BATCH):
        sample = samples[number]
        ends = sample["document_ends"].clone() if apart else torch.zeros(LENGTH, dtype=torch.bool)
        ends[-1] = True
        first = 0
        for last in ends.nonzero().flatten().tolist():
            part = slice(first, last + 1)
            mask, first = sample["loss_mask"][part], last + 1
            if not mask.any():
                continue
            with torch.no_grad():
                logits = model(sample["tokens"][part].unsqueeze(0)).logits[0].double()
            losses = torch.nn.functional.cross_entropy(logits, sample["labels"][part], reduction="none")
            total, count = total + float((losses * mask).sum()), count + int(mask.sum())
    return total / count


def check_first_step_and_fall(run, folder, words, share: float):
    """The first step's loss is that of the published weights; schedule, optimizer and data begin at 0."""
    steps = run.steps()
    assert steps[1]["loss"] == pytest.approx(transformers_loss(folder, words), rel=1e-5)
    assert [steps[n]["lr"] for n in (1, 2, 4)] == pytest.approx([0, LR / WARM_UP, 3 * LR / WARM_UP])
    assert steps[1]["consumed_samples"] == BATCH and steps[1]["total_tokens"] == BATCH * LENGTH
    assert steps[STEPS]["loss"] < share * steps[1]["loss"]


@pytest.mark.slow
def test_chats_are_fine_tuned_on_their_answers(tmp_path, published, bins):
    words = [*twin("finetune_chat", published), f"data.path={bins}", f"run_dir={tmp_path / 'run'}"]
    run = train(tmp_path / "run", bins, recipe=twin("finetune_chat", published))
    check_first_step_and_fall(run, published, words, 0.8)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["continue_4k", "continue_32k", "finetune_chat"])
def test_an_export_has_the_same_loss_in_transformers(tmp_path, published, bins, corpus, experiment):
    data = bins if experiment == "finetune_chat" else corpus
    ranks = 2 if experiment == "continue_32k" else 1  # its ranks share a sequence
    words = [*twin(experiment, published, ranks), f"data.path={data}", f"run_dir={tmp_path / 'run'}"]
    run = train(tmp_path / "run", data, recipe=twin(experiment, published, ranks))
    share = 0.8 if experiment == "finetune_chat" else 0.95  # real text is not learned in twelve steps
    check_first_step_and_fall(run, published, words, share)
    export = tmp_path / "export"
    done = zaya("checkpoint", "export", str(tmp_path / "run"), "--output", str(export), "--dtype", "fp32")
    assert done.returncode == 0, done.stdout
    # the order of the data depends on the number of steps
    again = [*twin(experiment, export, ranks), "stage.train_iters=1", "optim.lr_warmup_iters=0"]
    first = train(tmp_path / "again", data, recipe=again).steps()[1]["loss"]
    words = [*again, f"data.path={data}", f"run_dir={tmp_path / 'again'}"]
    assert first == pytest.approx(transformers_loss(export, words), rel=1e-5)
    assert first < share * run.steps()[1]["loss"]
    if experiment == "finetune_chat":
        assert (export / "chat_template.jinja").read_text() == PLAIN


@pytest.mark.slow
def test_the_loss_does_not_depend_on_ranks_or_micro_batches(tmp_path, published, bins):
    """Bins hold different numbers of answer tokens: a mean of the means of ranks or micro-batches would differ."""
    losses = []
    for name, nproc, micro in (("one", 1, 8), ("split", 1, 1), ("ranks", 2, 2)):
        recipe = twin("finetune_chat", published, nproc, micro)
        run = train(tmp_path / name, bins, "stage.train_iters=3", "optim.lr_warmup_iters=2", recipe=recipe)
        losses.append([run.steps()[n]["loss"] for n in (1, 2, 3)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-5) and losses[2] == pytest.approx(losses[0], rel=2e-5)
    samples = training_samples(compose([*twin("finetune_chat", published), f"data.path={bins}"]))
    assert len({int(samples[n]["loss_mask"].sum()) for n in range(BATCH)}) > 1


@pytest.mark.slow
def test_the_demo_starts_from_an_export_and_its_loss_falls(tmp_path, published, bins):
    """experiment=finetune_demo as it is, two processes and Muon, but for the sizes of a test and its data."""
    words = ["experiment=finetune_demo", f"handover.from_hf={published}", f"stage.seq_length={LENGTH}"]
    words += ["stage.train_iters=6", "stage.eval_interval=3", "logger.wandb=false"]
    run = train(tmp_path / "run", bins, recipe=words)
    steps, valid = run.steps(), run.validation()
    words += [f"data.path={bins}", f"run_dir={tmp_path / 'run'}"]
    assert steps[1]["loss"] == pytest.approx(transformers_loss(published, words), rel=1e-5)
    assert len(steps) == 6 and steps[6]["loss"] < steps[1]["loss"]
    assert [*valid] == [0, 3, 6] and valid[6] < valid[0]


def test_chats_that_are_not_packed_are_refused_with_the_command(tmp_path, published, bins):
    chats = bins.parent / "chats"
    run = train(tmp_path / "run", chats, recipe=twin("finetune_chat", published), check=False)
    assert run.code == 2 and f"Fix: zaya data pack {chats} --sequence-length {LENGTH}" in run.output
    assert "Traceback" not in run.output and not (tmp_path / "run" / "metrics.jsonl").exists()
    assert json.loads((chats / "manifest.json").read_text())["arguments"]["--chat"] is True

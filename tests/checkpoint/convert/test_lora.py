# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters beside peft's on transformers' ZAYA: logits, gradients, files; runs of a small twin."""

import json
import shutil
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import hip_ops
from tests.checkpoint.convert.published import publish, spread
from tests.checkpoint.convert.test_fine_tuning import MODEL, bins, transformers_loss, twin  # noqa: F401
from tests.running import train, zaya
from zaya_plugin.checkpoint.convert import exporting
from zaya_plugin.checkpoint.convert.adapters import Lora, fingerprint
from zaya_plugin.checkpoint.convert.built_model import load_adapter, save_hf, zaya_from_hf
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.checkpoint.convert.peft_folder import config_of, export_adapter, peft_tensors, read_adapter
from zaya_plugin.checkpoint.convert.values import Zeros
from zaya_plugin.checkpoint.convert.verification import differences
from zaya_plugin.checkpoint.reading import folder_of
from zaya_plugin.config.compose import compose
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.flops import Shape, adapter_parameters, forward_flops_by_part, training_flops
from zaya_plugin.plan.parallelism import ParallelSizes, trained_parameters

LORA = Lora(lora_rank=4, lora_alpha=6.0, lora_targets=["attention", "experts", "router"])
CPU = {"use_cpu_initialization": True}
IDS = torch.arange(48).view(2, 24) * 7 % 64


def smaller(found):
    """Weights of a size with which no softmax is saturated."""
    for tensor in found.values():
        if tensor.ndim > 1:
            tensor.mul_(0.3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("base") / "model", change=smaller)


def adapted(base, lora=LORA, **options):
    """This package's model in fp32 with adapters whose B is not zero."""
    model = zaya_from_hf(base, **CPU, **vars(lora), **options).train()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".adapters." in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return model


def logits(model):
    return model(IDS, torch.arange(IDS.shape[1]).expand(2, -1), None)


def write(model, lora, folder, base):
    """An adapter's folder from the parameters of a model."""
    parameters, described = dict(model.named_parameters()), open_source(base).model
    folder.mkdir()
    found = {t.name: t.to_peft(parameters[t.ours].detach()).contiguous() for t in peft_tensors(lora, described)}
    save_file(found, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config_of(lora, described, str(base))))
    return folder


def in_peft(folder, trainable=False):
    """The adapter as peft loads it on transformers' model."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, experts_implementation="eager")
    return PeftModel.from_pretrained(model, folder, is_trainable=trainable)


SHARED = replace(LORA, lora_targets=["attention", "experts"], lora_experts="shared")


@pytest.mark.parametrize("lora", [LORA, SHARED, replace(LORA, lora_targets=["attention"])])
def test_logits_and_gradients_are_those_of_peft(tmp_path, base, lora):
    """An adapter that all experts share has the sum of the gradients of peft's, one an expert."""
    model = adapted(base, lora)
    theirs = in_peft(write(model, lora, tmp_path / "adapter", base), trainable=True)
    ours, other = logits(model), theirs(IDS, use_cache=False).logits
    assert (ours - logits(zaya_from_hf(base, **CPU))).norm() > 0.003 * ours.norm()
    assert (ours - other).norm() < 2e-6 * other.norm()
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(6))
    for result in (ours, other):
        (result * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    loaded = {name.replace(".default", "").replace(".modules_to_save", ""): p for name, p in theirs.named_parameters()}
    compared = list(peft_tensors(lora, open_source(base).model))
    assert {t.ours for t in compared} == gradients.keys() and len(compared) == len(gradients)
    for tensor in compared:
        expected, found = loaded[tensor.name].grad, gradients[tensor.ours]
        if tensor.shared:
            expected = replace(tensor, shared=False).from_peft(expected).sum(0, keepdim=True)
        else:
            found = tensor.to_peft(found)
        error = (found - expected).norm()
        assert error < 2e-5 * expected.norm() + 1e-7, tensor.name
    assert all(p.grad is None for name, p in model.named_parameters() if name not in gradients)


def test_an_adapter_of_peft_comes_back_and_others_are_refused(tmp_path, base):
    for lora in (SHARED, LORA):
        model = adapted(base, lora)
        folder = write(model, lora, tmp_path / lora.lora_experts, base)
        again = zaya_from_hf(base, **CPU, **vars(lora))
        load_adapter(again, folder)
        assert all(torch.equal(p, dict(again.named_parameters())[name]) for name, p in model.named_parameters())

    def refused(text, lora=LORA, config=(), change=lambda found: None):
        other = tmp_path / f"other{len(list(tmp_path.iterdir()))}"
        other.mkdir()
        values = json.loads((folder / "adapter_config.json").read_text()) | dict(config)
        (other / "adapter_config.json").write_text(json.dumps(values))
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, other / "adapter_model.safetensors")
        if text is None:
            return read_adapter(other, lora, open_source(base).model)
        with pytest.raises(ValueError, match=text):
            read_adapter(other, lora, open_source(base).model)

    first = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    refused("Fix: optim.lora.rank=4", replace(LORA, lora_rank=8))
    refused("optim.lora.alpha=8.0: .* has 6.0", replace(LORA, lora_alpha=8.0))
    refused("holds base_model.*down_proj.bias, which no", replace(LORA, lora_targets=["experts"]))
    refused("lacks .*lora_B", change=lambda found: found.pop(first.replace("lora_A", "lora_B")))
    refused("different values in .*experts.*Fix: optim.lora.experts=each", replace(LORA, lora_experts="shared"))
    refused("has the shape", change=lambda found: found.update({first: torch.zeros(4, 8)}))
    without = [first, first.replace("lora_A", "lora_B")]
    assert len(refused(None, change=lambda found: [found.pop(name) for name in without])) == len(load_file(
        folder / "adapter_model.safetensors"
    )) - 2  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("use_dora", True),
        ("rank_pattern", {"o_proj": 2}),
        *[("init_lora_weights", name) for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")],
        ("alora_invocation_tokens", [1, 2]),
        *[(f"{name}_config", {"beta": 1}) for name in ("arrow", "kasa", "velora", "monteclora", "lora_ga", "loftq")],
        ("use_bdlora", {"nblocks": 2}),
        ("a_field_of_tomorrow", True),
    ],
)
def test_an_adapter_of_another_form_is_refused(tmp_path, base, field, value):
    """Beside all fields that peft writes for plain LoRA, which are accepted."""
    from peft import LoraConfig

    described = open_source(base).model
    save_file({}, tmp_path / "adapter_model.safetensors")
    for start in (True, False, "gaussian"):
        config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=start, lora_dropout=0.1).to_dict()
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | config_of(LORA, described, str(base))))
        assert read_adapter(tmp_path, LORA, described) == {}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=f"{field}=.* may compute something else"):
        read_adapter(tmp_path, LORA, described)


def test_frozen_products_have_no_weight_gradient(base, monkeypatch):
    """Operations of forward and backward, counted: those of all weights, less one product a matrix, and three of each
    matrix of the adapters. torch does not count the products of experts and of the router behind its down projection:
    their calls are counted, and whether the router's parameters are trained.
    """
    calls, outer, trains, backward = [], hip_ops.grouped_outer_, set(), hip_ops.router_mlp_backward
    monkeypatch.setattr(
        hip_ops, "grouped_outer_", lambda out, *rest: calls.append(tuple(out.shape)) or outer(out, *rest)
    )

    monkeypatch.setattr(
        hip_ops, "router_mlp_backward", lambda *a, **words: trains.add(words["trained"]) or backward(*a, **words)
    )

    def operations(model):
        calls.clear()
        trains.clear()
        with FlopCounterMode(display=False) as counted:
            logits(model).sum().backward()
        return counted.get_total_flops()

    frozen, trained = adapted(base, replace(LORA, lora_targets=["attention"])), zaya_from_hf(base, **CPU).train()
    added = sum(p.numel() for p in frozen.parameters() if p.requires_grad)
    uncounted = ("linear_fc", "router.fc", "router.out_proj")
    counted = (n for n, p in trained.named_parameters() if p.dim() == 2 and not any(part in n for part in uncounted))
    matrices = {name: trained.get_parameter(name).numel() for name in counted}
    expected = operations(trained) - 2 * IDS.numel() * (sum(matrices.values()) - 3 * added)
    assert sorted({*calls}) == [(12, 16, 8), (12, 16, 16)] and len(calls) == 4
    assert trains == {True}
    assert operations(frozen) == expected and calls == [] and trains == {False}
    operations(adapted(base, replace(LORA, lora_targets=["experts"])))
    assert sorted({*calls}) == [(12, 4, 8), (12, 4, 16), (12, 16, 4)] and len(calls) == 8


def test_counts_of_the_plan_are_those_of_the_model(base):
    """Also of experiment=finetune_lora, by hand: 16 x (16 experts x (2 x 2048 + 3 x 2048) + attention)."""
    shape = Shape(2, 16, 4, 2, 8, 12, 8, 8, 64, lora_rank=4, lora_targets=tuple(LORA.lora_targets))
    counts = {"attention": 0, "experts": 0, "router": 0}
    for name, parameter in adapted(base).named_parameters():
        if parameter.requires_grad:
            counts["experts" if ".experts." in name else "attention" if ".adapters." in name else "router"] += (
                parameter.numel()
            )
    assert adapter_parameters(shape) == counts
    shared, model = replace(shape, lora_experts="shared"), adapted(base, replace(LORA, lora_experts="shared"))
    total = sum(trained_parameters(shared, ParallelSizes(expert=2)).values())
    assert total == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert training_flops(shared, 1, 64) == training_flops(shape, 1, 64)
    recipe = compose(["experiment=finetune_lora", "cluster=h100_8", "data.path=none"])
    shape = recipe_plan.shape_of(recipe, 262_272)
    trained = 40 * 16 * (16 * 5 * 2048 + 5 * 2048 + 2 * 1024 + 2 * 256)
    plan = recipe_plan.plan_of(recipe, 8, 262_272).components
    assert plan["weights"] == 2 * (8_840_488_784 + trained) and plan["gradients"] == 4 * trained
    assert plan["optimizer"] == 12 * trained / 8
    full = training_flops(replace(shape, lora_rank=None), 1, 4096)
    forward = forward_flops_by_part(shape, 4096)
    kept = 2 * sum(forward.values()) + forward["attention"] + forward["prologue"]
    active = trained - 40 * 16 * 15 * 5 * 2048
    assert training_flops(shape, 1, 4096) == pytest.approx(kept + 6 * active) and kept < 0.73 * full


@pytest.mark.parametrize(("layout", "experts"), [("native", "each"), ("legacy", "shared")])
def test_a_merged_model_has_the_logits_of_the_adapter(tmp_path, base, layout, experts):
    lora = replace(LORA, lora_balancing=True, lora_experts=experts)
    model = adapted(base, lora)
    with torch.no_grad():
        expected = logits(model)
        save_hf(model, tmp_path / "merged", layout=layout)
        merged = zaya_from_hf(tmp_path / "merged", **CPU)
        assert (logits(merged) - expected).norm() < 2e-6 * expected.norm()


def test_exports_that_a_loader_would_change_are_refused(tmp_path, base, monkeypatch):
    source = open_source(base)
    adapter = {name: Zeros(torch.float32, shape) for name, shape in LORA.shapes(source.model).items()}
    adapter |= {row.ours[0]: source.tensors[row.ours[0]] for row in LORA.retrained(source.model)}
    arguments = Namespace(**vars(LORA), bf16=True, zaya={"base": {"source": "Zyphra/ZAYA1-base@main"}})
    trained = exporting.Trained(base, source.model, source.tensors, arguments, adapter=adapter, base_layout="native")

    def refused(text, **changes):
        with pytest.raises(ValueError, match=text):
            export_adapter(replace(trained, **changes), tmp_path / "refused", None, None, None)

    refused("holds no adapter", arguments=Namespace())
    refused("would load those of the base", arguments=Namespace(**vars(arguments) | {"lora_balancing": True}))
    refused("is in the legacy layout", base_layout="legacy")
    biases = {name: Zeros(v.dtype, v.shape) for name, v in source.tensors.items() if "balancing_biases" in name}
    refused("skip class", tensors=source.tensors | biases)
    assert not (tmp_path / "refused").exists()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(exporting, "write_json", lambda *_: (_ for _ in ()).throw(OSError("full")))
        export_adapter(trained, tmp_path / "adapter", None, None, None)
    assert not (tmp_path / "adapter").exists()
    count = export_adapter(trained, tmp_path / "adapter", None, None, None)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["adapter"]
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert count == len(written) and {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("Zyphra/ZAYA1-base", "main")
    assert config["modules_to_save"] == ["gate.down_proj", "router_mlp.fc1", "router_mlp.fc2", "router_mlp.out_proj"]


def test_a_base_is_known_by_its_values_in_every_layout(tmp_path, base):
    known = fingerprint(open_source(base))
    other = publish(tmp_path / "other", change=lambda found: found["model.norm.weight"].neg_())
    save_hf(zaya_from_hf(base, **CPU), tmp_path / "again", layout="legacy", dtype="fp32")
    assert fingerprint(open_source(tmp_path / "again")) == known != fingerprint(open_source(other))
    assert fingerprint(open_source(base).with_rows(128).with_rows(256)) == known


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["each", "shared"])
def test_twin_trains_resumes_and_is_exported(tmp_path, bins, experts):  # noqa: F811
    """experiment=finetune_lora on two expert-parallel ranks, continued on one; then both exports."""
    folder = publish(tmp_path / "base", model=MODEL, change=spread)
    words = [word for word in twin("finetune_lora", folder) if not word.startswith(("optim.lr", "stage.train_iters"))]
    words += ["checkpoint.save_interval=3", "optim.lr_warmup_iters=1", "optim.lr=1e-2"]
    words += ["optim.lora.rank=8", f"optim.lora.experts={experts}"]
    words = [word for word in words if word != "nproc=1"]
    once, home = [*words, "stage.train_iters=6"], tmp_path / "run"
    run = train(home, bins, "nproc=2", "parallel.expert_model_parallel_size=2", recipe=once).steps()
    assert run[1]["loss"] == pytest.approx(transformers_loss(folder, [*once, f"data.path={bins}"]), rel=1e-5)
    assert run[6]["loss"] < 0.9 * run[1]["loss"] and run[6]["expert_imbalance"] < 10
    size = sum(path.stat().st_size for path in folder_of(home).glob("*.distcp"))
    trained = exporting.open_checkpoint(folder_of(home))
    adapters = sum(torch.Size(values.shape).numel() for values in trained.adapter.values())
    assert 0 < size - 3 * 4 * adapters < 500_000 < 4 * sum(p.numel() for p in zaya_from_hf(folder, **CPU).parameters())

    shutil.rmtree(folder_of(home))
    other = publish(tmp_path / "other", model=replace(MODEL, rotary_base=MODEL.rotary_base), change=smaller)
    refused = train(home, bins, "resume=auto", "nproc=1", f"handover.from_hf={other}", recipe=once, check=False)
    assert refused.code == 2 and "holds other weights" in refused.output
    again = train(home, bins, "resume=auto", "nproc=1", recipe=once).steps()
    assert [again[n]["loss"] for n in (4, 5, 6)] == pytest.approx([run[n]["loss"] for n in (4, 5, 6)], rel=1e-4)

    fp32 = ["--dtype", "fp32", "--output"]
    for name, more in (("adapter", ["--adapter"]), ("merged", ["--verify"]), ("legacy", ["--layout", "legacy"])):
        done = zaya("checkpoint", "export", str(home), *fp32, str(tmp_path / name), *more)
        assert done.returncode == 0, done.stdout
    from transformers import AutoModelForCausalLM

    ids = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(1))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", experts_implementation="eager")
    with torch.no_grad():
        theirs = in_peft(tmp_path / "adapter")(ids, use_cache=False).logits
        assert (merged(ids, use_cache=False).logits - theirs).norm() < 2e-6 * theirs.norm()
    assert differences(open_source(tmp_path / "merged"), open_source(tmp_path / "legacy")) == []
    begun = [*words, "stage.train_iters=1", "optim.lr_warmup_iters=0", f"handover.adapter={tmp_path / 'adapter'}"]
    first = train(tmp_path / "begun", bins, "nproc=1", recipe=begun).steps()[1]["loss"]
    assert first == pytest.approx(transformers_loss(tmp_path / "merged", [*begun, f"data.path={bins}"]), rel=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Test predictions, from a measured step: exact for the same recipe on one device; for more micro-batches and ranks
they follow work and links.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zaya_plugin import cli
from zaya_plugin.commands import table
from zaya_plugin.commands.plan import run as parser
from zaya_plugin.config.compose import compose
from zaya_plugin.plan import flops, prediction, recipe_plan, step_source
from zaya_plugin.plan.products import CDNA3, PROCESSORS, rates_of_parts
from zaya_plugin.plan.step_work import work_of

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "step12-h100.json"
ALIKE = ["experiment=zaya1_base", "data.path=none"]
PER_MICRO_BATCH = ("embedding", "norms", "projections", "prologue", "attention", "router", "experts", "head")


@pytest.fixture(scope="module")
def record():
    return step_source.load(RECORD)


@pytest.fixture(scope="module")
def measured(record):
    return {row["part"]: row["ms"] for row in record["parts"]}


def machine(cluster):
    return compose([f"cluster={cluster}", "data.path=none"]).machine


def predicted(record, recipe, world):
    source = step_source.source_of(record, links=bool(recipe.machine.name))
    return prediction.predict(recipe, world, source).record()


def parts(found):
    return {row["part"]: row["ms"] for row in found["parts"]}


# The record counts the Gram form of Newton-Schulz for the twelve layers' matrices with a side below 384 too, which take
# the standard form: 9 (m/n - 1) n^3 FLOPs more.
SMALL_MATRICES = 12 * sum(9 * (m - n) * n**2 for n, m in [(256, 2048)] * 2 + [(128, 2048)] * 2 + [(17, 256)])


def test_the_work_of_a_recipe_is_that_of_the_model_that_ran(record):
    work = work_of(step_source.recorded_recipe(record), 1, record["model"]["vocab_size"], written=frozenset())
    for row in record["parts"]:
        if row["tflop"] is not None:
            recorded = row["tflop"] * 1e12 + (SMALL_MATRICES if row["part"] == "optimizer" else 0)
            assert work[row["part"]].flops == pytest.approx(recorded, rel=1e-12), row["part"]
            assert work[row["part"]].bytes == pytest.approx(row["gb"] * 1e9, rel=1e-12), row["part"]


def test_the_same_step_takes_the_measured_time(record, measured):
    found = predicted(record | {"written_first": ["experts"]}, step_source.recorded_recipe(record), 1)
    assert found["prediction"] is True and found["communication"] == {}
    assert parts(found) == pytest.approx(
        {part: ms for part, ms in measured.items() if part not in step_source.NOT_COMPUTING}, rel=1e-12
    )
    computing = record["traced"]["ms"] - measured["idle"] - measured["communication"]
    assert (
        found["step"]["ms"] == pytest.approx(computing, rel=1e-6) and found["idle_of_the_record_ms"] == measured["idle"]
    )


def test_a_record_in_which_all_gradients_were_zeroed_is_carried_to_a_step_in_which_they_are_not(record, measured):
    found = parts(predicted(record, step_source.recorded_recipe(record), 1))
    experts = 12 * 16 * 3 * 2048 * 2048
    bytes_before = next(row["gb"] for row in record["parts"] if row["part"] == "gradients") * 1e9
    assert found.pop("gradients") == pytest.approx(measured["gradients"] * (1 - 4 * experts / bytes_before))
    assert all(found[part] == pytest.approx(measured[part]) for part in found)  # products bound the experts in any case


def test_four_micro_batches_are_four_times_one_and_the_optimizer_once(record, measured):
    recipe = step_source.recorded_recipe(record)
    recipe.stage.global_batch_size *= 4
    found = parts(predicted(record | {"written_first": ["experts"]}, recipe, 1))
    for part in PER_MICRO_BATCH:
        assert found[part] == pytest.approx(4 * measured[part], rel=1e-9), part
    assert found["optimizer"] == pytest.approx(measured["optimizer"], rel=1e-12)
    assert measured["gradients"] < found["gradients"] < 4 * measured["gradients"]  # the buffers are zeroed once


def test_a_micro_batch_takes_time_whatever_its_tokens():
    """From the fit: the experts' weights and gradients are moved in each, an eighth of them with EP 8; a router has its
    time for each layer, and an attention with a rate of its own none.
    """
    speed, found = step_source.fitted().parts, {}
    weights = 40 * 16 * 3 * 2048 * 2048 * 12 / 4.33e12 / speed["experts"].weight_share  # seconds of a micro-batch
    for size, ranks in ((8, 1), (4, 1), (8, 8)):
        words = [f"stage.micro_batch_size={size}", f"parallel.expert_model_parallel_size={ranks}"]
        step = prediction.predict(compose([*ALIKE, "cluster=mi300x_8", "stage.global_batch_size=128", *words]), 8)
        found[size, ranks] = parts(step.record())
        rate = (
            600e12 * rates_of_parts("MI300X", step.shape, step.layout, step.batch)["experts"] * speed["experts"].share
        )
        products = 65_536 * 40 * 3 * 2 * 3 * 2048 * 2048 / rate
        experts = products + 16 // size * weights / ranks
        assert found[size, ranks]["experts"] == pytest.approx(1e3 * experts, rel=1e-6)
    assert speed["experts"].weight_share == pytest.approx(0.914, abs=0.01)
    eight, four = found[8, 1], found[4, 1]
    assert four["router"] - eight["router"] == pytest.approx(1e3 * 80 * speed["router"].layer_pass_seconds, rel=1e-6)
    assert four["attention"] == eight["attention"]


def test_more_layers_and_ranks(record, measured):
    eight = predicted(
        record, compose([*ALIKE, "cluster=h100_8", "stage.micro_batch_size=4", "stage.global_batch_size=32"]), 8
    )
    found = parts(eight)
    assert eight["on"]["gemm_tflops"] == record["rates"]["gemm_tflops"]  # the record's own device: its own rates
    assert found["attention"] == pytest.approx(40 / 12 * measured["attention"]) and found["head"] == pytest.approx(
        measured["head"]
    )
    # Newton-Schulz bounds it, and has no part in the embedding
    assert found["optimizer"] == pytest.approx(40 / 12 / 8 * measured["optimizer"])
    sent = 7 / 8 * 4 * 8_840_488_784  # bytes of gradients that a rank sends
    messages = 80 + 4  # as zaya_plugin.optim.sharding.placement cuts them (docs/another-part.md)
    rates = machine("h100_8")
    assert eight["communication"]["gradients"]["ms"] == pytest.approx(
        1e3 * (sent / (rates.link_gb_per_s * 1e9) + messages * rates.latency_us / 1e6), rel=0.001
    )
    assert 0 < eight["communication"]["gradients"]["exposed_ms"] < 0.1 * eight["communication"]["gradients"]["ms"]
    words = [*ALIKE, "cluster=h100_8", "stage.micro_batch_size=4", "stage.global_batch_size=32"]
    plain = predicted(
        record, compose([*words, "parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"]), 8
    )
    for each in plain["communication"].values():
        assert each["exposed_ms"] == pytest.approx(each["ms"])


def test_what_was_measured_on_four_devices_is_what_was_expected():
    """Compares predictions with measured steps: other numbers of micro-batches, and four devices from two. Without
    the cost of collectives for the kernels the error was 12 %. SLOWED was fitted to the steps on four devices, so
    their agreement is no evidence for it.
    """
    steps = {
        name: step_source.load(RECORD.parent / f"step40-{name}.json")
        for name in ("4xh200", "4xh200-16k_tokens", "2xh200-fused_router")
    }
    four, one, two = steps.values()
    for record, to, within in ((four, one, 0.025), (one, four, 0.01), (two, one, 0.045), (two, four, 0.02)):
        found = predicted(record, step_source.recorded_recipe(to), 4)
        measured = to["traced"]["ms"] - next(row["ms"] for row in to["parts"] if row["part"] == "idle")
        assert found["step"]["ms"] == pytest.approx(measured, rel=within)


def test_copy_engines_take_nothing_from_concurrent_kernels():
    """Predicts the step with copy engines from the step without them, on one machine. Bytes moved by copy engines do
    not count as slowing the record's kernels.
    """
    rings, copies = (
        step_source.load(RECORD.parent / f"step40-4xh200-{name}-16k_tokens.json")
        for name in ("flash_attention_4", "copy_engines")
    )
    found = predicted(rings, step_source.recorded_recipe(copies), 4)
    links = found["communication"]
    # 0.26 of 72.45 ms of hidden gradients, and nothing of the parameters
    assert links["parameters"]["ms"] > 40 and parts(found)["slowed"] == pytest.approx(18.84, rel=1e-3)
    before = predicted(rings, step_source.recorded_recipe(rings), 4)["step"]["ms"]
    measured = [
        each["traced"]["ms"] - next(row["ms"] for row in each["parts"] if row["part"] == "idle")
        for each in (rings, copies)
    ]
    assert (
        before - found["step"]["ms"] == pytest.approx(measured[0] - measured[1], abs=2.5)
        and before - found["step"]["ms"] > 9
    )
    assert (
        30 < copies["hidden_communication_ms"] - step_source.hidden_behind_kernels(copies) < 40
        and step_source.hidden_behind_kernels(rings) == rings["hidden_communication_ms"]
    )
    for without in ({"parallel": {"nccl_ub": False}}, {"cluster": {"environment": {"NCCL_CTA_POLICY": "0"}}}):
        recipe = step_source.recorded_recipe(copies)
        for group, values in without.items():
            for name, value in values.items():
                setattr(getattr(recipe, group), name, value)
        assert parts(predicted(rings, recipe, 4))["slowed"] > parts(found)["slowed"] + 5
    assert not prediction.copies_parameters(step_source.recorded_recipe(copies), 16)  # two nodes
    words = ["cluster=mi300x_8", "parallel.nccl_ub=true", "experiment=zaya1_base", "data.path=none"]
    assert not prediction.copies_parameters(compose(words), 8)  # not tried there


def test_copies_of_a_record_are_no_kernels_that_slow_others_down():
    def hidden(*rows):
        longest = [{"name": name, "count": 1, "ms": ms} for name, ms in rows]
        return step_source.hidden_behind_kernels(
            {"parts": [{"part": "communication", "longest": longest}], "hidden_communication_ms": 10.0}
        )

    assert hidden(("ncclDevKernel_ReduceScatter", 8.0)) == 10.0
    assert hidden(("Memcpy PtoP (Device -> Device)", 5.0), ("ncclDevKernel_ReduceScatter", 8.0)) == 5.0
    assert hidden(("Memcpy PtoP (Device -> Device)", 30.0)) == 0.0


def test_other_rates_count_by_what_bounds_a_part(record):
    words = [*ALIKE, "cluster=mi300x_8", "stage.micro_batch_size=4", "stage.global_batch_size=32"]
    found = predicted(record, compose(words), 8)
    h100 = predicted(
        record, compose([*ALIKE, "cluster=h100_8", "stage.micro_batch_size=4", "stage.global_batch_size=32"]), 8
    )
    gemm = record["rates"]["gemm_tflops"] / 600
    copy = record["rates"]["copy_tb_per_s"] / 4.33
    of_record = predicted(record, compose([*words, "machine.attention_tflops=null"]), 8)
    assert parts(of_record)["attention"] == pytest.approx(gemm * parts(h100)["attention"])
    # the machine's own rate, whatever attention the record ran
    row = next(row for row in found["parts"] if row["part"] == "attention")
    rate = machine("mi300x_8").attention_tflops
    assert row["ms"] == pytest.approx(1e3 * row["tflop"] / rate) and row["roofline"] == pytest.approx(rate / 600)
    assert parts(found) == pytest.approx({**parts(of_record), "attention": row["ms"]}), "and nothing else changes"
    assert parts(found)["norms"] == pytest.approx(copy * parts(h100)["norms"])
    sizes = 16384, 262272, 2048  # the head's product; whole tiles leave another share of it on another device
    tiles = CDNA3.relative_rate(*sizes) / PROCESSORS["H100"].relative_rate(*sizes)
    assert parts(found)["head"] == pytest.approx(gemm / tiles * parts(h100)["head"])
    assert tiles == pytest.approx(1.017, abs=0.001)


def test_a_thousand_ranks_hide_nothing_in_one_instance_and_most_in_sixteen(record):
    """All experts are one bucket in 1,024 shards (docs/another-part.md). At the rate that hides the least of public ones."""

    def of(instances: int) -> dict:
        size, rate = f"parallel.num_distributed_optimizer_instances={instances}", "machine.gemm_tflops=732"
        return predicted(
            record, compose(["experiment=zaya1_base", "cluster=mi300x_128x8", "data.path=none", size, rate]), 1024
        )

    one, sixteen = of(1), of(16)
    assert one["communication"]["gradients"]["exposed_ms"] == pytest.approx(one["communication"]["gradients"]["ms"])
    assert one["step"]["micro_batches"] == 1 and one["step"]["exposed_communication_ms"] > 0.2 * one["step"]["ms"]
    beside = parts(sixteen)["slowed"]  # what hiding costs; one instance hides nothing
    assert "slowed" not in parts(one)
    assert (
        sixteen["step"]["exposed_communication_ms"] < 0.1 * (sixteen["step"]["ms"] - beside) < 0.07 * one["step"]["ms"]
    )
    muon = [next(row["ms"] for row in found["parts"] if row["part"] == "optimizer") for found in (one, sixteen)]
    assert muon[1] == pytest.approx(16 * muon[0], rel=0.01)  # each instance does all of Muon's work


def test_the_documents_give_what_is_predicted_for_mi300x():
    """All from the fit, and the first also from the record that docs/predictions.md names."""

    def step(devices: int, cluster: str, *more: str, source: step_source.Source | None = None) -> tuple[str, str]:
        recipe = compose(["experiment=zaya1_base", f"cluster={cluster}", "data.path=none", *more])
        result = prediction.predict(recipe, devices, source)
        return f"{1e3 * result.seconds:,.0f}", f"{round(result.tokens_per_second, -2):,.0f}"

    table, *guide = (
        (RECORD.parents[2] / "docs" / f"{name}.md").read_text() for name in ("predictions", "mi300x", "cluster")
    )
    guide = " ".join("\n".join(guide).split())
    one, one_aiter = (
        step(8, "mi300x_8", "stage.global_batch_size=128", f"machine.attention_tflops={rate}") for rate in (190, 270)
    )
    all_nodes = step(1024, "mi300x_128x8")
    record = step_source.load(RECORD.parent / "step40-4xh200-copy_engines.json")
    words = ["stage.global_batch_size=128", "stage.micro_batch_size=4", "parallel.recompute_granularity=selective"]
    words = [*words, "parallel.recompute_modules=[permute]"]  # as the record
    from_record, _ = step(8, "mi300x_8", *words, source=step_source.source_of(record))
    same_words, _ = step(8, "mi300x_8", *words)
    assert f"the first row is {from_record} ms; from the fit the same words are {same_words}" in " ".join(table.split())
    for ms, rate in (one, one_aiter, all_nodes, step(8, "mi355x_8", "stage.global_batch_size=128")):
        assert f"| {ms} " in table and f"| {rate} |" in table
    assert f"PREDICTION {one[0]} ms, {one[1]} tokens/s a device, 127.0 GiB planned with torch's attention" in guide
    assert f", {one_aiter[0]} ms with AITER's" in guide
    assert f"PREDICTION for 1,024 devices: {all_nodes[0]} ms, {all_nodes[1]} tokens/s" in guide
    assert machine("mi300x_8").attention_tflops == machine("mi300x_128x8").attention_tflops == 190


def test_the_command_marks_what_it_says(tmp_path, capsys):
    out = tmp_path / "expected.json"
    words = [*ALIKE, "cluster=mi300x_8", "stage.global_batch_size=128", f"--output={out}"]
    assert cli.main(["plan", "run", f"--from={RECORD}", *words]) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert "PREDICTION from NVIDIA H100 80GB HBM3, commit eecf738" in printed and "4.33 TB/s" in printed
    assert "error: not measured on MI300X" in printed and "+7.2, +5.3 and -9.2 %" in printed
    assert "exposed gradients" in printed and "8,840,488,784 parameters, 753,608,528 of them" in printed
    assert written["prediction"] is True and written["schema"] == "zaya plan run/1"
    assert "xGMI" in written["on"]["sources"] and written["from"]["commit"] == "eecf738"
    with pytest.raises(ValueError, match="another name now.*zaya plan run --from step.json"):
        table.split(["bench", "expect", "step.json"])


def test_what_it_refuses(tmp_path, record):
    recomputed, on_cpu = tmp_path / "recomputed.json", tmp_path / "cpu.json"
    parallel = {**record["recipe"]["parallel"], "recompute_granularity": "selective", "recompute_modules": ["moe"]}
    recomputed.write_text(json.dumps({**record, "recipe": {**record["recipe"], "parallel": parallel}}))
    on_cpu.write_text(json.dumps({**record, "traced": {**record["traced"], "source": "operators"}}))
    for words, complaint in (
        ([f"--from={tmp_path / 'none.json'}"], "not a step.json of `zaya bench step`"),
        (
            [f"--from={RECORD}", *ALIKE, "cluster=h100_8", "parallel=pipeline_parallel"],
            "pipeline_model_parallel_size=2: .* Allowed: 1",
        ),
        ([f"--from={on_cpu}", "experiment=zaya1_base"], "not a step.json of `zaya bench step` on an accelerator"),
        (
            [f"--from={recomputed}", *ALIKE, "cluster=h200_8"],
            "recompute_granularity=null: .* Allowed: the record's recomputation",
        ),
        ([*ALIKE, "cluster=h200_8", "--gpus=12"], "--gpus=12: is not a number of whole nodes of 8"),
        ([*ALIKE, "cluster=h200_8", "--gpus=0"], "--gpus"),
    ):
        with pytest.raises(ValueError, match=complaint):
            parser().run(parser().read(words))


def test_what_is_recomputed_takes_its_time(record):
    words = [*ALIKE, "cluster=h200_8", "stage.micro_batch_size=4", "stage.global_batch_size=32"]
    plain = predicted(record, compose(words), 8)
    again = predicted(
        record,
        compose([*words, "parallel.recompute_granularity=selective", "parallel.recompute_modules=[layernorm,permute]"]),
        8,
    )
    added = parts(again)["recomputation"]
    assert "recomputation" not in parts(plain) and 5 < added < 20
    assert again["step"]["computing_ms"] == pytest.approx(plain["step"]["computing_ms"] + added)
    assert again["step"]["planned_gib"] < plain["step"]["planned_gib"] - 7


def test_the_sizes_of_zaya1():
    """The figures of the released model: parameters, those of one token, and bytes of a token's keys and values."""
    shape = recipe_plan.shape_of(compose([*ALIKE, "cluster=h200_8"]))
    assert sum(flops.count_parameters(shape).values()) == 8_840_488_784
    assert flops.active_parameters(shape) == 753_608_528 and round(753_608_528 / 1e6, 1) == 753.6
    assert flops.cache_bytes(shape) == 40 * 1024


def test_a_device_without_rates_gets_a_reason_and_the_rest():
    for words, reason in (
        (["experiment=cpu_demo"], "no rates of a CPU are known"),
        (["experiment=zaya1_base", "cluster=gpu"], "machine.name=null: is not a device with known rates"),
        ([*ALIKE, "cluster=h200_8", "parallel=pipeline_parallel"], "pipeline_model_parallel_size=2"),
    ):
        result = prediction.predict(compose([*words, "data.path=none"]), 8)
        assert result.seconds is None and result.tokens_per_second is None and reason in result.reason
        assert result.parameters > 1e7 and (result.memory is None) == ("cpu_demo" in words[0])
        assert "step" in result.record() and "ms" not in result.record()["step"]


def test_the_fit_needs_no_record_and_marks_other_devices():
    for cluster, marked in (("h100_8", False), ("mi300x_8", True)):
        recipe = compose([*ALIKE, f"cluster={cluster}", "stage.micro_batch_size=4", "stage.global_batch_size=128"])
        result = prediction.predict(recipe, 8)
        assert ("not measured on" in result.error) == marked and result.reason is None
        assert ("-9.2 %" in result.error) == marked
        assert 0.9 < result.seconds < 2.0 and result.source.what["device"] == "NVIDIA H200"
    recipe = compose([*ALIKE, "cluster=h200_8"])

    def seconds(version):
        chosen = replace(recipe, cluster=replace(recipe.cluster, core_attention=version))
        return prediction.predict(chosen, 8).seconds

    assert (
        seconds("flash_attn_4") < seconds("auto") < seconds("cudnn") == seconds("sdpa") < 1.03 * seconds("flash_attn_4")
    )


@pytest.mark.parametrize(
    ("words", "world", "error"),
    [
        ((), 2, "within 3 % of H200s' committed records, but for those that docs/plan.md names"),
        ((), 4, "within 8 % of H200s' committed records, but for those that docs/plan.md names"),
        ((), 8, "no record of the current code has 8 devices"),
        (("parallel=expert_parallel", "parallel.expert_model_parallel_size=2"), 2, "code has expert parallelism"),
        (("optim=adamw",), 2, "no record of the current code has optim.name=adamw"),
    ],
)
def test_the_error_is_that_of_records_with_these_devices_and_this_layout(words, world, error):
    recipe = compose(["experiment=zaya1_base", "cluster=h200_8", "data.path=none", *words])
    assert prediction.predict(recipe, world).error.endswith(error)

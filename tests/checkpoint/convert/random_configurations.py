# SPDX-License-Identifier: Apache-2.0
"""Random models through export, import and transformers: each is exact, or refused with the reason's field in the message.

    python -m tests.checkpoint.convert.random_configurations --count 200

Sizes are odd where the model allows it: one layer, one expert, a width of 7. Every 1-D tensor is random, since
transformers' first values (scales of 1, biases of 0, temperatures of 0) hide exchanged tensors.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

VOCABULARY = 40
CLOSE = 1e-5  # of logits in fp32, relative to their norm; folded weights in bf16 are rounded again
CLOSE_FOLDED_BF16 = 3e-2


@dataclass(frozen=True)
class Case:
    """A model: sizes and options by ZayaConfig's names, and the entry of the skip class in the balancing biases."""

    layout: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    num_moe_experts: int
    moe_ffn_hidden_size: int
    router_hidden_size: int
    layernorm_epsilon: float
    router_norm_epsilon: float | None
    router_eda: bool
    moe_skip_expert: bool
    temperature_form: str
    skip_output: str
    residual_in_fp32: bool
    normalization: str
    rotary_percent: float
    rotary_base: int
    skip_bias: float
    sliding_window: int | None = None
    window_attn_skip_freq: int | None = None
    swa_rotary_base: int = 10_000

    def fields(self) -> dict:
        beside = ("layout", "dtype", "rotary_percent", "rotary_base", "skip_bias")
        return {name: value for name, value in asdict(self).items() if name not in beside}

    @property
    def reachable(self) -> bool:
        """Whether tokens may choose the skip class: `biases` are around 0."""
        return self.skip_bias > -0.9

    @property
    def refused(self) -> str | None:
        """The word that the message of a refusal has to have; None for a model that both layouts express."""
        if self.normalization != "RMSNorm":
            return "model.normalization"
        if not self.moe_skip_expert:
            return "model.moe_skip_expert"
        if self.reachable and self.skip_output != {"native": "zero", "legacy": "identity"}[self.layout]:
            return "model.skip_output"
        if self.reachable and self.layout == "native" and self.skip_bias != -1:
            return "balancing_biases"
        return None

    @property
    def folded(self) -> bool:
        return self.temperature_form != "linear" or self.router_norm_epsilon is not None or not self.router_eda


def draw(number: int) -> Case:
    """Return case `number`; the draws of different numbers are independent."""
    source, windows = random.Random(number), random.Random(f"windows {number}")
    pick = source.choice
    groups = pick((2, 2, 4))
    return Case(
        layout=pick(("native", "legacy")),
        dtype=pick(("fp32", "bf16")),
        num_layers=pick((1, 2, 3, 4)),
        hidden_size=pick((7, 16, 30, 48)),
        num_attention_heads=groups * pick((1, 2, 3)),
        num_query_groups=groups,
        kv_channels=pick((2, 4, 6, 8)),
        num_moe_experts=pick((1, 2, 3, 8, 11)),
        moe_ffn_hidden_size=pick((1, 5, 16, 24)),
        router_hidden_size=pick((1, 3, 8, 16)),
        layernorm_epsilon=pick((1e-5, 1e-5, 1e-6)),
        router_norm_epsilon=pick((None,) * 14 + (1e-6, 3e-5)),
        router_eda=source.random() < 0.93,
        moe_skip_expert=source.random() < 0.97,
        temperature_form=pick(("linear",) * 18 + ("exp", "clamped_exp")),
        skip_output=pick(("zero", "zero", "identity")),
        residual_in_fp32=source.random() < 0.9,
        normalization=pick(("RMSNorm",) * 30 + ("LayerNorm",)),
        rotary_percent=1.0,
        rotary_base=pick((10_000, 1_000_000, 777)),
        skip_bias=pick((-1.0,) * 6 + (-1.5, 0.1)),
        sliding_window=windows.choice((None, None, 1, 4, 9)),
        window_attn_skip_freq=windows.choice((None, 2, 2, 3)),
        swa_rotary_base=windows.choice((10_000, 500)),
    )


@torch.no_grad()
def build(case: Case, config=None):
    """Return the case's model with random weights, in the precision of the case."""
    from zaya_plugin.model.build import build_zaya_model
    from zaya_plugin.model.config import ZayaConfig

    torch.manual_seed(7)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    config = ZayaConfig(
        **case.fields(), ffn_hidden_size=case.moe_ffn_hidden_size, use_cpu_initialization=True, params_dtype=dtype
    )
    model = build_zaya_model(
        config,
        vocab_size=VOCABULARY,
        max_sequence_length=32,
        rotary_base=case.rotary_base,
        rotary_percent=case.rotary_percent,
    ).eval()
    for name, p in model.named_parameters():
        if name.endswith("temperature"):
            p.uniform_(0.3, 1.5)
        elif p.dim() == 1:
            p.add_(0.3 * torch.randn_like(p))
        else:
            p.normal_(std=0.7 if "embedding" in name else max(1, p.shape[-1]) ** -0.5)
    for name, b in model.named_buffers():
        if name.endswith("balancing_biases"):
            b.normal_(std=0.03)
            b[0] = 0.05  # so that one is above 0, as in every released layer
            b[-1] = case.skip_bias
    return model


def outcome(case: Case, folder: Path) -> str:
    """Return "exact", "folded" or "refused". Raises AssertionError for anything else."""
    from zaya_plugin.checkpoint.convert.built_model import load_hf, save_hf
    from zaya_plugin.checkpoint.convert.importing import open_source
    from zaya_plugin.checkpoint.convert.values import whole
    from zaya_plugin.checkpoint.convert.verification import our_logits

    folder.mkdir(exist_ok=True)
    model, output = build(case), folder / "export"
    try:
        save_hf(model, output, layout=case.layout)
    except ValueError as refusal:
        assert case.refused is not None and case.refused in str(refusal), f"{case} was refused: {refusal}"
        return "refused"
    assert case.refused is None, f"{case} was not refused"
    source = open_source(output)
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
    changed = [
        name
        for name, values in source.tensors.items()
        if name not in state or not torch.equal(whole(values), state[name]) or values.dtype != state[name].dtype
    ]
    assert case.folded or not changed, f"{case}: other values in {changed}"
    if not case.folded:
        again = build(case)
        for tensor in again.state_dict().values():
            if tensor is not None:
                tensor.zero_()
        load_hf(again, source)
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items() if name in state)
    ids = torch.arange(24).remainder(VOCABULARY)[None]
    expected = logits_of(model.float(), ids)
    found = (
        logits_of_transformers(output, ids)
        if case.layout == "native"
        else our_logits(source.model, source.tensors, [ids])[0]
    )
    error = ((found - expected).norm() / expected.norm()).item()
    limit = CLOSE_FOLDED_BF16 if case.folded and case.dtype == "bf16" else CLOSE
    assert error < limit, f"{case}: logits differ by {error:.1e}"
    return "folded" if case.folded else "exact"


@torch.no_grad()
def logits_of(model, ids):
    model.config.params_dtype = torch.float32
    return model(ids, torch.arange(ids.shape[1])[None], None)[0]


@torch.no_grad()
def logits_of_transformers(folder: Path, ids):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    return model(ids, use_cache=False).logits[0]


def main() -> int:
    from zaya_plugin import patches

    patches.apply_torch()
    from zaya_plugin.model.build import groups_of_one

    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--first", type=int, default=0)
    given = options.parse_args()
    groups_of_one()
    found, wrong = Counter(), []
    for number in range(given.first, given.first + given.count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[outcome(draw(number), Path(folder))] += 1
            except Exception as error:
                wrong.append(f"case {number}: {type(error).__name__}: {error}")
    print(", ".join(f"{count} {name}" for name, count in sorted(found.items())), f"{len(wrong)} wrong", sep=", ")
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

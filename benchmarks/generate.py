# SPDX-License-Identifier: Apache-2.0
"""Measure decoding by the Decoder of `zaya generate` and by transformers, same random weights and caches, beside the roofline.

    python3 benchmarks/generate.py                       ZAYA1-base in bf16 on a GPU of 141 GB
    python3 benchmarks/generate.py --size tiny --prompt 100 300 --batch 1 3    a tiny model in fp32 on a CPU

A row is a batch with --prompt tokens in its caches, the last --new of which it decodes: greedy, each token read by the
host, as `zaya generate` does. Prompts are not computed: the keys and values of both sides are the same random numbers,
and the convolutions' states are zeros, because 32 prompts of 32,768 tokens would take longer than the measurement. `apart`
is the norm of the difference of the first step's logits, relative to transformers'. `start_s` has compilation and
capture. transformers runs its forward pass with its DynamicCache, without what `generate` adds to it, and with each of its
--experts implementations; the fastest counts. Its static cache is tried once and its failure recorded. A row that does
not fit into the memory says so.

Bytes of a step: all parameters but the experts', the matrices of the experts that the routers choose for random texts
(`experts` a layer, mean of 8 steps), and the keys and values up to the position. The roofline is these bytes at
`copy_tb_per_s`, a copy measured in the same run. Prints a table and one line of JSON, which it writes to
benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from result_record import RESULTS, described, device_name, file_part, write

from zaya_plugin import patches

patches.apply_torch()
warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)

from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from transformers import ZayaConfig as TheirConfig  # noqa: E402
from transformers import ZayaForCausalLM  # noqa: E402

from zaya_plugin.checkpoint.convert import hf_config  # noqa: E402
from zaya_plugin.checkpoint.convert.description import Description  # noqa: E402
from zaya_plugin.checkpoint.convert.tables import rows  # noqa: E402
from zaya_plugin.inference.decode_step import MAX_BATCH  # noqa: E402
from zaya_plugin.inference.decoder import Decoder, without_modes  # noqa: E402
from zaya_plugin.inference.sampling import generate  # noqa: E402
from zaya_plugin.model.build import build_zaya_model, groups_of_one  # noqa: E402
from zaya_plugin.model.config import ZayaConfig  # noqa: E402

SIZES = {
    "base": (Description(40, 2048, 8, 2, 128, 16, 2048, 256, 262_272, bos=2, eos=1, pad=0), torch.bfloat16),
    "tiny": (Description(4, 128, 8, 2, 16, 16, 96, 32, 2048, bos=2, eos=1, pad=0), torch.float32),
}


def our_model(model: Description, dtype: torch.dtype, device: str):
    groups_of_one()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = ZayaConfig(
        **model.config_fields(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device == "cpu",
    )
    sizes = dict(vocab_size=model.vocab_size, max_sequence_length=model.max_position_embeddings)
    return build_zaya_model(config, **sizes, rotary_base=model.rotary_base).eval().requires_grad_(False)


@torch.no_grad()
def their_model(model: Description, dtype: torch.dtype, device: str, ours) -> ZayaForCausalLM:
    config = TheirConfig(**hf_config.write("native", model, str(dtype).removeprefix("torch.")))
    torch.set_default_dtype(dtype)
    with torch.device(device):
        made = ZayaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    mine, theirs = ours.state_dict(), made.state_dict()
    for row in rows("native", model):
        parts = [mine[name] for name in row.ours]
        for place, part in enumerate(parts):
            (theirs[row.name][place] if row.stacked else theirs[row.name]).copy_(part)
    return made


def timed(step: Callable[[torch.Tensor], torch.Tensor], batch: int, device: str, count: int) -> tuple[float, float]:
    """step: tokens [b] -> logits [b, v]. Return seconds of the first three steps, and the median of `count` more."""
    tokens, spent = torch.full((batch,), 3, device=device), []
    for _ in range(3 + count):
        start = time.perf_counter()
        tokens = step(tokens).argmax(-1)
        tokens.tolist()  # waits, as the end of a text is looked for
        spent.append(time.perf_counter() - start)
    return sum(spent[:3]), statistics.median(spent[3:])


def copy_rate(device: str) -> float:
    """Return bytes/s that a copy reads and writes, of 2 GiB or on a CPU 64 MiB."""
    source = torch.zeros(2**30 if device == "cuda" else 2**25, dtype=torch.int16, device=device)
    target, spent = torch.empty_like(source), []
    for _ in range(12):
        start = time.perf_counter()
        target.copy_(source)
        wait(device)
        spent.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(spent)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def experts_a_layer(ours, batch: int) -> float:
    """Return how many different experts a layer's router chooses for a step, mean of 8 steps of random texts."""
    decoder = Decoder(ours, routed=True)
    classes = len(ours.shared_embedding_or_output_weight())
    texts = torch.randint(3, classes, (batch, 16), generator=torch.Generator().manual_seed(batch))
    generate(decoder, texts.tolist(), 9)
    experts = ours.config.num_moe_experts
    steps = [ids for ids in decoder.chosen if len(ids) == 1]
    return statistics.mean(len({*ids.flatten().tolist()} - {experts}) for ids in steps)


@torch.no_grad()
def filled_cache(theirs, batch: int, length: int, device: str):
    """Return transformers' cache of `length` random tokens a sequence behind a convolution's state of zeros."""
    with without_modes():
        cache = theirs(torch.full((batch, 4), 3, device=device), use_cache=True, logits_to_keep=1).past_key_values
    generator = torch.Generator(device).manual_seed(length)
    for layer in cache.layers:
        b, g, _, d = layer.keys.shape
        for name in ("keys", "values"):
            numbers = torch.randn(b, g, length, d, generator=generator, device=device, dtype=layer.keys.dtype)
            setattr(layer, name, numbers)
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values()):
            state.zero_()
    return cache


def begun(ours, cache, new: int, **options) -> Decoder:
    """Return a Decoder with the keys and values of `cache`, and room for `new` tokens."""
    batch, _, length, _ = cache.layers[0].keys.shape
    decoder = Decoder(ours, **options)
    with without_modes(), torch.no_grad():
        decoder._make_room(batch, length + new)
        decoder.longest = length
        decoder.progress.positions.fill_(length - 1)
        for state, layer in zip(decoder.states, cache.layers, strict=True):
            state.keys[:, :, :length], state.values[:, :, :length] = layer.keys, layer.values
    return decoder


def their_step(theirs, cache) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.no_grad()
    def step(tokens: torch.Tensor) -> torch.Tensor:
        with without_modes():  # a process of transformers alone has none
            return theirs(tokens.unsqueeze(1), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    return step


def measured(ours, theirs, batch: int, length: int, options, device: str, rate: float) -> dict:
    """Return the row of `batch` sequences with `length` tokens behind the last one decoded."""
    config, start = ours.config, length - options.new - 3
    experts = experts_a_layer(ours, batch)
    matrices = [p for name, p in ours.named_parameters() if ".experts." in name]
    of_experts = sum(p.nbytes for p in matrices) / (config.num_layers * config.num_moe_experts)
    others = sum(p.nbytes for p in ours.parameters()) - sum(p.nbytes for p in matrices)
    token = 2 * config.num_query_groups * config.kv_channels * matrices[0].element_size()
    parts = {
        "weights": others + experts * config.num_layers * of_experts,
        "keys_and_values": batch * (length - options.new // 2) * token * config.num_layers,
    }
    roofline = sum(parts.values()) / rate
    row = {"batch": batch, "context": length, "experts": round(experts, 2), "roofline_ms": round(1e3 * roofline, 3)}
    row |= {f"{name}_gb": round(value / 1e9, 3) for name, value in parts.items()}
    cache = filled_cache(theirs, batch, start, device)
    ways: dict[str, dict] = {"ours": {}}
    if device == "cuda" and batch <= MAX_BATCH and options.training_layers:
        ways["ours, layers of training"] = {"kernels": False}
    firsts = {}
    for name, choice in ways.items():
        since = time.perf_counter()
        decoder = begun(ours, cache, options.new + 3, **choice)

        def step(tokens, decoder=decoder, name=name):
            logits = decoder.step(tokens)
            firsts.setdefault(name, logits.float().clone())
            return logits

        setup = time.perf_counter() - since  # compiles the kernels
        first, token = timed(step, batch, device, options.new)
        row[name] = figures(setup + first, token, batch, roofline)
        row[name]["kernels"] = decoder.decode_step is not None
        row[name]["captured"] = bool(decoder.captured)
        del decoder, step
    for implementation in options.experts:
        theirs.set_experts_implementation(implementation)
        name, run = f"transformers, {implementation}", their_step(theirs, cache)
        # The cache grows; the next implementation decodes some tokens more.
        first = run(torch.full((batch,), 3, device=device)).float() if implementation == options.experts[0] else None
        if first is not None:
            row["apart"] = {way: ((mine - first).norm() / first.norm()).item() for way, mine in firsts.items()}
        row[name] = figures(*timed(run, batch, device, options.their_new), batch, roofline)
    best = min(row[name]["token_ms"] for name in row if name.startswith("transformers"))
    row["times"] = round(best / row["ours"]["token_ms"], 2)
    return row


def figures(start: float, token: float, batch: int, roofline: float) -> dict[str, float]:
    return {
        "start_s": round(start, 2),
        "token_ms": round(1e3 * token, 3),
        "tokens_per_s": round(batch / token, 1),
        "of_roofline": round(roofline / token, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, nargs="+", default=[4096, 32768], help="tokens of context")
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--their-new", type=int, default=8, help="tokens that transformers decodes")
    parser.add_argument("--training-layers", action="store_true", help="also ours by the layers of training")
    parser.add_argument("--experts", nargs="+", default=["grouped_mm"])
    parser.add_argument("--layers", type=int, help="fewer layers, for a try")
    parser.add_argument("--name", help="of the results file")
    parser.add_argument("--commit", help="recorded; default: the checkout's")
    options = parser.parse_args()
    model, dtype = SIZES[options.size]
    if options.layers:
        model = Description(**{**vars(model), "num_layers": options.layers})
    device = "cpu" if options.size == "tiny" or not torch.cuda.is_available() else "cuda"
    rate = copy_rate(device)
    ours = our_model(model, dtype, device)
    theirs = their_model(model, dtype, device, ours)
    record = {"benchmark": "generate", **described(options.commit), "dtype": str(dtype)}
    record |= {"copy_tb_per_s": round(rate / 1e12, 3), "rows": []}
    name = options.name or f"generate-{options.size}-{file_part(device_name())}"
    for length in sorted(options.prompt):
        for batch in options.batch:
            try:
                row = measured(ours, theirs, batch, length, options, device, rate)
            except torch.OutOfMemoryError as error:
                row = {"batch": batch, "context": length, "does_not_fit": str(error).splitlines()[0]}
            if device == "cuda":
                torch.cuda.empty_cache()
            record["rows"].append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, dict)))
            for way, values in row.items():
                if isinstance(values, dict):
                    print(
                        f"  {way:26}" + "".join(f"{key} {value:>10.5g}   " for key, value in values.items()), flush=True
                    )
            # After each row, so that a time limit keeps the earlier ones.
            (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    write(record, name)


if __name__ == "__main__":
    main()

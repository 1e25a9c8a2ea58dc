# SPDX-License-Identifier: Apache-2.0
"""Measure greedy decoding of `zaya generate` and of transformers' `generate`, same random weights, in one run.

    python3 benchmarks/generate.py                       ZAYA1-base in bf16 on a GPU (about 40 GB), batches of 1 and 32
    python3 benchmarks/generate.py --size tiny           a tiny model in fp32 on a CPU

Each figure is the median of --repeats calls after one that compiles: a prompt of --prompt tokens, then --new tokens,
without an end token. `first_ms` is the call with one new token, which is the prompt's pass; `token_ms` the rest over the
other tokens. Both sides get the tokens as tensors or lists and return ids; no text is decoded. transformers runs with
each of its --experts implementations, and the fastest counts. `apart` is the norm of the difference of the first
logits, relative to transformers'. Prints a table and one line of JSON, which it writes to benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from result_record import described, device_name, file_part, write

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


def seconds(call: Callable[[], object], repeats: int) -> float:
    def timed() -> float:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    call()
    return statistics.median(timed() for _ in range(repeats))


def rates(call: Callable[[int], object], new: int, batch: int, repeats: int) -> dict[str, float]:
    """call(n): a call with n new tokens."""
    first, whole = (seconds(lambda n=n: call(n), repeats) for n in (1, new))
    return {
        "first_ms": round(1e3 * first, 2),
        "token_ms": round(1e3 * (whole - first) / (new - 1), 3),
        "tokens_per_s": round(batch * new / whole, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--experts", nargs="+", default=["eager", "grouped_mm"])
    parser.add_argument("--layers", type=int, help="fewer layers, for a try")
    parser.add_argument("--commit", help="recorded; default: the checkout's")
    options = parser.parse_args()
    model, dtype = SIZES[options.size]
    if options.layers:
        model = Description(**{**vars(model), "num_layers": options.layers})
    device = "cpu" if options.size == "tiny" or not torch.cuda.is_available() else "cuda"
    ours = our_model(model, dtype, device)
    theirs = their_model(model, dtype, device, ours)
    found = []
    for batch in options.batch:
        ids = torch.randint(
            3, model.vocab_size, (batch, options.prompt), generator=torch.Generator().manual_seed(batch)
        )
        given, there = ids.tolist(), ids.to(device)
        with torch.no_grad():
            expected = theirs(there, logits_to_keep=1).logits[:, -1].float()
        begun = Decoder(ours).begin(given, 1).float()
        row = {"batch": batch, "apart": ((begun - expected).norm() / expected.norm()).item()}
        ways = {"ours": Decoder(ours), "ours without graphs": Decoder(ours, graphs=False)}
        for name, decoder in ways.items() if device == "cuda" else [("ours", ways["ours"])]:
            row[name] = rates(lambda n, d=decoder, g=given: generate(d, g, n), options.new, batch, options.repeats)
        for experts in options.experts:
            theirs.set_experts_implementation(experts)

            def call(n: int, there=there) -> None:
                mask = torch.ones_like(there)
                with without_modes():  # a process of transformers alone has none
                    theirs.generate(
                        there, attention_mask=mask, min_new_tokens=n, max_new_tokens=n, do_sample=False, pad_token_id=0
                    )

            row[f"transformers, {experts}"] = rates(call, options.new, batch, options.repeats)
        best = max(row[name]["tokens_per_s"] for name in row if name.startswith("transformers"))
        row["times"] = round(row["ours"]["tokens_per_s"] / best, 2)
        found.append(row)
        print(f"batch {batch}: {row['times']} times transformers, first logits apart {row['apart']:.1e}")
        for name, figures in row.items():
            if isinstance(figures, dict):
                print(f"  {name:28}" + "".join(f"{key} {value:>10}   " for key, value in figures.items()))
    record = {"benchmark": "generate", **described(options.commit), "dtype": str(dtype), "rows": found}
    write(record, f"generate-{options.size}-{file_part(device_name())}")


if __name__ == "__main__":
    main()

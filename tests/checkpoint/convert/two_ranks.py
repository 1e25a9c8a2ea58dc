# SPDX-License-Identifier: Apache-2.0
"""Two ranks that read published weights into their parts of a model, and write them: `two_ranks LAYOUT SOURCE OUTPUT`,
under torchrun.
"""

import sys

import torch

from zaya_plugin import patches

patches.apply_torch()

SIZES = {
    "tensor": dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=1, sequence_parallel=True),
    "expert": dict(expert_model_parallel_size=2),
    "pipeline": dict(pipeline_model_parallel_size=2),
}


def main(layout: str, source: str, output: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from safetensors.torch import load_file

    from zaya_plugin import save_hf, stream_hf, zaya_from_hf

    torch.distributed.init_process_group("gloo")
    sizes = {name: size for name, size in SIZES[layout].items() if name.endswith("size")}
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    others = {name: value for name, value in SIZES[layout].items() if name not in sizes}
    pipeline = {"pipeline_dtype": torch.bfloat16} if layout == "pipeline" else {}
    model = zaya_from_hf(source, params_dtype=torch.bfloat16, use_cpu_initialization=True, **others, **pipeline)
    assert all(getattr(model.config, name) == size for name, size in sizes.items())
    save_hf([model], output, layout="legacy")
    streamed: dict[str, torch.Tensor] = {}
    sent: dict[str, str] = {}
    stream_hf([model], streamed.update, layout="legacy", bucket_bytes=5000, sent=sent)
    written = load_file(f"{output}/model.safetensors") if torch.distributed.get_rank() == 0 else {}
    assert streamed.keys() == written.keys()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in written.items())

    def broken(bucket):
        raise ZeroDivisionError("division by zero")

    receiver = {} if torch.distributed.get_rank() == 0 else sent  # rank 0's decides; the others must not skip its error
    try:
        stream_hf([model], broken, layout="legacy", bucket_bytes=5000, sent=receiver)
    except (ZeroDivisionError, RuntimeError) as error:
        own = torch.distributed.get_rank() == 0
        assert str(error) == "division by zero" if own else "rank 0: ZeroDivisionError: division by zero" == str(error)
    else:
        raise AssertionError("an error of the callback was lost")
    try:
        save_hf([model], output, layout="legacy")
    except ValueError as error:
        assert "exists" in str(error)  # on both ranks
    else:
        raise AssertionError("an output that exists was overwritten")
    for of_rank in (0, 1):
        an_error_of_one_rank_is_raised_on_both(of_rank, model, output + ".other")


def an_error_of_one_rank_is_raised_on_both(of_rank: int, model, output: str) -> None:
    """On the other rank it was a collective that never ended."""
    from zaya_plugin import save_hf

    own = torch.distributed.get_rank() == of_rank
    stock, failing = type(model).sharded_state_dict, ZeroDivisionError("division by zero")

    def fails(self, *args, **options):
        if own:
            raise failing
        return stock(self, *args, **options)

    type(model).sharded_state_dict = fails
    try:
        save_hf(model, output)
    except ZeroDivisionError as error:
        assert own and error is failing
    except RuntimeError as error:
        assert not own and str(error) == f"rank {of_rank}: ZeroDivisionError: division by zero"
    else:
        raise AssertionError("an error of one rank was lost")
    finally:
        type(model).sharded_state_dict = stock
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

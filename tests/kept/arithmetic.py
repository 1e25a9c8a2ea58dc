# SPDX-License-Identifier: Apache-2.0
"""Print a digest of what this processor and torch compute: `python -m tests.kept.arithmetic`.

With the variables of PINNED torch and its libraries use the same instructions on every x86-64 processor.
"""

import hashlib

PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}


def digest() -> str:
    """Return the digest of the operations of a step: products, a softmax, an attention, norms and activations."""
    import torch
    from torch.nn import functional

    x = torch.randn(3, 2, 48, 32, generator=torch.Generator().manual_seed(0)) * 2
    results = (
        x @ x.transpose(-1, -2),
        (x.bfloat16() @ x.bfloat16().transpose(-1, -2)).float(),
        x.softmax(-1),
        x.cumsum(-1),
        x.square().mean(-1).rsqrt(),
        functional.gelu(x),
        functional.silu(x),
        functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        functional.conv1d(x[0], x[1, :, :, :3], padding=1),
        torch.logsumexp(x, -1),
    )
    return hashlib.sha256(b"".join(result.contiguous().numpy().tobytes() for result in results)).hexdigest()


if __name__ == "__main__":
    print(digest())

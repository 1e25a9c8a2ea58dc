# SPDX-License-Identifier: Apache-2.0
"""Known problems of a machine: devices, drivers, HIP and RCCL, environment variables, limits and file systems."""

from zaya_plugin.machines.facts import GITHUB, PRIMUS, Facts, Rule

HIP_VARIABLES = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SERIAL = ("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING")
INDEXED = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")  # numbers among the devices that ROCR_VISIBLE_DEVICES leaves
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "fuse.sshfs")
MIN_SHM, MIN_MEMLOCK = 2**30, 2**30  # bytes
QUEUES = (2, 8)  # of HIP: Primus' value and the recipes', and the largest that was measured as fast


def _devices_hidden(facts: Facts) -> str | None:
    built = f"HIP {facts.hip}" if facts.hip else f"CUDA {facts.cuda}" if facts.cuda else None
    hidden = [f"{name}=''" for name in INDEXED[::-1] if facts.environ.get(name) == ""]
    return ", ".join([f"torch for {built}, no device", *hidden]) if built and not facts.archs else None


def _queues(facts: Facts) -> str | None:
    text = facts.environ.get("GPU_MAX_HW_QUEUES", "")
    outside = text.isdigit() and not QUEUES[0] <= int(text) <= QUEUES[1]
    return f"GPU_MAX_HW_QUEUES={text}" if facts.hip and outside else None


def _uncompiled(facts: Facts) -> str | None:
    archs = {arch.partition(":")[0] for arch in facts.archs} - {*facts.compiled_archs}
    known = facts.hip and facts.compiled_archs
    return f"torch is built for {' '.join(facts.compiled_archs)}, not for {min(archs)}" if known and archs else None


MACHINE_RULES = (
    Rule(
        "devices-hidden",
        "warning",
        _devices_hidden,
        "torch is built for an accelerator and finds none",
        "check the driver, the rights on /dev/kfd and /dev/dri, and *_VISIBLE_DEVICES; or use cluster=cpu",
        "https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html",
    ),
    Rule(
        "kfd-denied",
        "warning",
        lambda facts: (
            facts.kfd_denied
            and not facts.archs
            and facts.instincts
            and f"the kernel lists {len(facts.kfd)} AMD devices, and this user cannot read and write /dev/kfd"
        ),
        "without it no program of ROCm finds a device",
        "docker run --device=/dev/kfd --device=/dev/dri --group-add video (on some hosts render); outside of a "
        "container add the user to these groups",
        "https://rocm.docs.amd.com/projects/install-on-linux/en/latest/install/prerequisites.html",
    ),
    Rule(
        "visible-twice",
        "warning",
        lambda facts: (
            facts.hip
            and facts.variables("ROCR_VISIBLE_DEVICES")
            and facts.variables(*INDEXED)
            and facts.variables("ROCR_VISIBLE_DEVICES", *INDEXED)
        ),
        "the second list counts among the devices that the first one leaves, so devices can be missing or be others",
        "set one of them",
        GITHUB + "Parsl/parsl/issues/3858",
    ),
    Rule(
        "other-architecture",
        "warning",
        lambda facts: facts.instincts and facts.variables("HSA_OVERRIDE_GFX_VERSION"),
        "ROCm then takes the device for another one, and loads kernels that were compiled for that",
        "unset HSA_OVERRIDE_GFX_VERSION",
        GITHUB + "ROCm/rocm-systems/pull/5686",
    ),
    Rule(
        "no-code-for-device",
        "error",
        _uncompiled,
        "torch's own kernels end with HIP error: invalid device function",
        "an image that is made for this device (docs/mi300x.md, step 1)",
        GITHUB + "ROCm/legacy-rocm-build/issues/2536",
    ),
    Rule(
        "partitioned",
        "warning",
        lambda facts: facts.hip and ", ".join(facts.partitions),
        "a device is split into several, each with a part of its compute units or memory; the recipes' batches and "
        "expected rates are those of whole devices",
        "amd-smi set --compute-partition SPX, then --memory-partition NPS1, as root and without a process on the "
        "devices",
        GITHUB + "ROCm/amdsmi/issues/100",
    ),
    Rule(
        "two-hip-runtimes",
        "warning",
        lambda facts: facts.hip and len(facts.runtimes) > 1 and " and ".join(facts.runtimes),
        "streams of one runtime are unknown to the other: launches on them end with error 709; hip_ops refuses its HIP "
        "kernels and runs Triton's",
        "let LD_LIBRARY_PATH and LD_PRELOAD name one ROCm, that of torch",
        GITHUB + "ROCm/mori/issues/402",
    ),
    Rule(
        "rccl-deadlock",
        "warning",
        lambda facts: (
            facts.hip
            and facts.nccl == "2.30.4"
            and not facts.hip_before("7.14")
            and f"RCCL {facts.nccl} with HIP {facts.hip}"
        ),
        "reported with HIP 7.14 on gfx90a, and open: two or three communicators in flight deadlock. Training reduces "
        "experts and the other weights on two, and sums figures on a third",
        "at a hang compare with an image whose RCCL is another release, such as that of ROCm 7.2.4; "
        "NCCL_LAUNCH_ORDER_IMPLICIT=1 helped with two communicators",
        GITHUB + "ROCm/rccl/issues/2191",
    ),
    Rule(
        "rccl-on-pollara",
        "warning",
        lambda facts: (
            not facts.hip_before("7.1")
            and facts.hip_before("7.2")
            and any(name.startswith("ionic") for name in facts.networks)
            and f"HIP {facts.hip} with {len(facts.networks)} x {facts.networks[0]}"
        ),
        "RCCL of ROCm 7.1.1 is slow between nodes on Pollara NICs",
        "an image with ROCm 7.2 or newer",
        GITHUB + "ROCm/legacy-rocm-build/issues/5717",
    ),
    Rule(
        "capture-on-rocm",
        "warning",
        lambda facts: facts.hip and (older := facts.older("torch", "2.11")) and f"{older} for HIP {facts.hip}",
        "torch's watchdog of collectives queries events while a graph is captured, which HIP refuses; repaired after "
        "2.10 (also pytorch/pytorch#176251, #176942)",
        "cluster.graphs=none, which the MI300X recipes have",
        GITHUB + "pytorch/pytorch/issues/175377",
    ),
    Rule(
        "expandable-segments",
        "warning",
        lambda facts: (
            facts.hip
            and facts.versions.get("torch")
            and not facts.older("torch", "2.11")
            and "expandable_segments:true" in (text := facts.variables(*ALLOCATOR)).lower()
            and text
        ),
        "from torch 2.11 on it takes effect on ROCm, where a copy to a device was reported to hang and a failed "
        "capture not to be recovered (pytorch/pytorch#177974, #179911)",
        "leave it out; ZAYA1-base plans half of a device's memory",
        GITHUB + "pytorch/pytorch/issues/192259",
    ),
    Rule(
        "hardware-queues",
        "warning",
        _queues,
        "HIP maps streams to this number of queues in turn: with few, a collective waits behind compute on its queue; "
        "with 16, training was 4 to 14 % slower (MI355X)",
        "time a step with 2, 4 and 8: zaya bench step ... cluster.environment.GPU_MAX_HW_QUEUES=8",
        GITHUB + "pytorch/torchtitan/pull/4032",
    ),
    Rule(
        "async-save-rocm",
        "warning",
        lambda facts: facts.hip_before("7.1") and f"HIP {facts.hip}",
        "asynchronous torch_dist saves fork with HIP's pinned memory and crashed before ROCm 7.1 (also "
        "AMD-AGI/Primus#267)",
        "set megatron.async_save=false, or use ROCm 7.1",
        PRIMUS + "issues/46",
    ),
    Rule(
        "scratch-reclaim",
        "warning",
        lambda facts: (
            facts.has("gfx942")
            and facts.environ.get("HSA_NO_SCRATCH_RECLAIM") != "1"
            and f"HSA_NO_SCRATCH_RECLAIM={facts.environ.get('HSA_NO_SCRATCH_RECLAIM') or 'unset'} on gfx942"
        ),
        "without it MoE training can crash on gfx942 (Primus, base_env.sh)",
        "export HSA_NO_SCRATCH_RECLAIM=1; the recipes cluster=mi300x_* set it",
        PRIMUS + "blob/main/runner/helpers/envs/base_env.sh",
    ),
    Rule(
        "serial-launches",
        "warning",
        lambda facts: facts.archs and facts.variables(*(name for name in SERIAL if facts.environ.get(name) != "0")),
        "a switch for debugging: the host waits for every kernel or copy, and nothing overlaps",
        "unset the variable",
        HIP_VARIABLES,
    ),
    Rule(
        "no-peer-access",
        "warning",
        lambda facts: len(facts.archs) > 1 and facts.variables("NCCL_P2P_DISABLE", value="1"),
        "collectives within the node then go through the host's memory instead of xGMI or NVLink",
        "unset NCCL_P2P_DISABLE",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    ),
    Rule(
        "small-shm",
        "warning",
        lambda facts: (
            len(facts.archs) > 1
            and facts.shm_bytes is not None
            and facts.shm_bytes < MIN_SHM
            and f"/dev/shm has {facts.shm_bytes / 2**20:.0f} MiB"
        ),
        "RCCL and NCCL keep their buffers between processes there and end with No space left on device; docker gives "
        "64 MiB",
        "docker run --shm-size 64G, or --ipc=host",
        GITHUB + "NVIDIA/nccl/issues/290",
    ),
    Rule(
        "memlock",
        "warning",
        lambda facts: (
            facts.networks
            and facts.memlock_bytes is not None
            and facts.memlock_bytes < MIN_MEMLOCK
            and f"ulimit -l is {facts.memlock_bytes / 2**10:.0f} KiB, with {facts.networks[0]}"
        ),
        "RDMA registers memory that is locked; ibv_reg_mr ends with Cannot allocate memory",
        "docker run --ulimit memlock=-1; outside of a container /etc/security/limits.conf, or LimitMEMLOCK of slurmd",
        GITHUB + "NVIDIA/nccl-tests/issues/206",
    ),
    Rule(
        "numa-balancing",
        "warning",
        lambda facts: facts.kfd and facts.numa_balancing and "/proc/sys/kernel/numa_balancing is not 0",
        "Linux then unmaps pages to see who uses them; AMD and RCCL advise against it, for its pauses",
        "sysctl kernel.numa_balancing=0, as root on the host",
        GITHUB + "ROCm/amdsmi/issues/81",
    ),
    Rule(
        "iommu",
        "warning",
        lambda facts: (
            facts.archs
            and (types := sorted({kind for kind in facts.iommu if kind.startswith("DMA")}))
            and f"IOMMU groups of AMD devices have the type {', '.join(types)}"
        ),
        "RCCL warns of hangs where the IOMMU translates the devices' accesses to each other",
        "iommu=pt on the kernel's command line of the host",
        GITHUB + "ROCm/rocm-systems/pull/7916",
    ),
    Rule(
        "shared-kernel-cache",
        "warning",
        lambda facts: (
            facts.archs
            and ", ".join(
                f"{folder} on {kind}" for folder, kind in facts.caches.items() if kind in NETWORK_FILE_SYSTEMS
            )
        ),
        "ranks of several nodes that compile into one folder of a network file system read files that others replace: "
        "stale file handle, device or resource busy",
        "TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR in a folder of the node, such as /tmp",
        GITHUB + "triton-lang/triton/issues/11512",
    ),
    Rule(
        "noexec-kernel-cache",
        "error",
        lambda facts: facts.archs and ", ".join(facts.noexec),
        "Triton loads the launchers that it compiles from there: failed to map segment from shared object",
        "TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR on a file system without noexec",
        GITHUB + "pytorch/pytorch/issues/91005",
    ),
)

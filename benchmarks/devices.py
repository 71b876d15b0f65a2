"""Devices that are not there, to compile for: NVIDIA's GPUs and TPUs.

XLA's compiler for GPUs needs only a description of a GPU, and libtpu's only the name of
a topology. GPUs need `jax-cuda12-plugin` and TPUs `jax[tpu]`, in JAX's version.
"""

import contextlib
import importlib.util
from typing import NamedTuple
from unittest import mock


class Gpu(NamedTuple):
    """From data sheets and the CUDA C++ Programming Guide, "Compute Capabilities"."""

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    fpus: int  # float32 units of each
    gigahertz: float
    threads: int  # at most, on each
    shared: int  # KiB of shared memory of each
    cache: int  # MiB
    bandwidth: float  # GB a second
    memory: int  # MiB


GPUS = {
    "t4": Gpu("Tesla T4", (7, 5), 40, 64, 1.59, 1024, 64, 4, 320, 15360),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 2.04, 1536, 100, 48, 300, 23034),
    "a100": Gpu("NVIDIA A100", (8, 0), 108, 64, 1.41, 2048, 164, 40, 2039, 81920),
    "h100": Gpu("NVIDIA H100", (9, 0), 132, 128, 1.98, 2048, 228, 50, 3352.32, 80995),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 2048, 228, 126, 7672, 182643),
}
DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  clock_rate_ghz: {gpu.gigahertz}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {gpu.threads}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {optin}
  shared_memory_per_core: {shared}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: {cache}
  memory_bandwidth: {bandwidth:.0f}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "{gpu.name}"
"""
# Of each generation, the smallest topology that libtpu describes.
TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# Chips of a v5p -> their topology.
PODS = {8: "v5p:2x2x2", 256: "v5p:8x8x4", 512: "v5p:8x8x8", 4096: "v5p:16x16x16"}
# `jax.nn.dot_product_attention` asks the local GPU whether it has flash attention.
FLASH = "jax._src.cudnn.fused_attention_stablehlo"


# Neither compiler is to look for a device, or to log that there is none.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # none of the processes uses a TPU
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def package(target: str) -> str:
    """What has to be installed, in JAX's version, to compile for a target."""
    return "jax-cuda12-plugin" if target in GPUS else "libtpu"


def missing(target: str) -> str:
    """The same, or "" if it is installed."""
    name = package(target)
    return "" if importlib.util.find_spec(name.replace("-", "_")) else name


def described(gpu: Gpu) -> str:
    """XLA's GpuTargetConfig, as text."""
    major, minor = gpu.capability
    return DESCRIPTION.format(
        gpu=gpu,
        major=major,
        minor=minor,
        # From Ampere on, the system keeps 1 KiB of each block's.
        optin=(gpu.shared - (major >= 8)) * 2**10,
        shared=gpu.shared * 2**10,
        cache=gpu.cache * 2**20,
        bandwidth=gpu.bandwidth * 1e9,
        memory=gpu.memory * 2**20,
    )


def of(target: str, count: int = 1) -> list:
    """Devices to compile for; of TPUs, the first of a topology."""
    from jax.experimental import topologies

    if name := missing(target):
        raise SystemExit(f"{target}: install {name} in JAX's version")
    if target in GPUS:
        options = {
            "target_config": described(GPUS[target]),
            "topology": f"1x{count}x1",
        }
        return topologies.get_topology_desc("", platform="cuda", **options).devices
    name = PODS.get(count) if target == "v5p" and count > 1 else TPUS[target]
    found = topologies.get_topology_desc(name, platform="tpu").devices if name else []
    if len(found) < count:
        raise SystemExit(f"{target}: no topology of {count} is known here")
    return found[:count]


def has_flash(target: str) -> bool:
    """Whether cuDNN has an attention kernel for the target."""
    return target in GPUS and GPUS[target].capability >= (8, 0)


@contextlib.contextmanager
def asked_for(target: str):
    """Traces as on a machine that has the GPU, as far as cuDNN is asked for."""
    if not has_flash(target):
        yield
        return
    capability = "{}.{}".format(*GPUS[target].capability)
    answers = {
        "check_cudnn_version": lambda *_: 90700,
        "check_compute_capability": lambda *_: True,
        "is_cuda_compute_capability_equal": lambda asked: asked == capability,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"{FLASH}.{name}", answer))
        yield

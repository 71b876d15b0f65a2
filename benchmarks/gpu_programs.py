"""What a GPU would run: training steps compiled for an H100 on a machine without one.

    pip install "jax-cuda12-plugin==$(python -c 'import jax; print(jax.__version__)')"
    python -m benchmarks.gpu_programs

XLA's GPU compiler needs only a description of a GPU. Nothing runs, and times are not
measured. This counts the kernels of a step, the bytes that they read and write, the
memory for temporaries, conditionals, and ops that make the host wait. XLA cannot make
the choices that it would make by trial on the GPU, so matrix products are cuBLAS's.

The rows are those of `benchmarks.train_step`, at its GPU sizes.
"""

import contextlib
import functools
import importlib.util
import os
import sys
from unittest import mock

from benchmarks import _harness
from benchmarks.model_sizes import add_arguments, chosen, is_wanted

# From the data sheet and the programming guide for compute capability 9.0.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84929347584
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 8 }
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# `jax.nn.dot_product_attention` asks the local GPU whether it has flash attention.
FLASH = "jax._src.cudnn.fused_attention_stablehlo"
COLUMNS = ("row", "kernels", "copies", "cond", "host", "GB moved", "ratio")


@contextlib.contextmanager
def as_on_a_gpu():
    """Traces in this context as on a machine with a GPU."""
    answers = {
        "jax.default_backend": "gpu",
        f"{FLASH}.check_cudnn_version": 90700,
        f"{FLASH}.check_compute_capability": True,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, lambda *_, answer=answer: answer))
        is_90 = lambda capability: capability == "9.0"
        name = f"{FLASH}.is_cuda_compute_capability_equal"
        stack.enter_context(mock.patch(name, is_90))
        yield


def h100s(count=1):
    """Devices to compile for."""
    from jax.experimental import topologies

    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        sys.exit("jax-cuda12-plugin in JAX's version is needed: see gpu_programs.py")
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=H100, topology=f"1x{count}x1"
    ).devices


def lower_step(make_row, make_batch, sharding):
    """The jaxpr of a row's step and its lowering, with the state donated."""
    import jax

    treedef, step = None, None

    def init():
        nonlocal treedef, step
        step, state = make_row()
        leaves, treedef = jax.tree.flatten(state)
        return leaves

    with as_on_a_gpu():
        args = jax.eval_shape(init), *jax.eval_shape(make_batch)
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        jitted = jax.jit(_harness.flat(step, treedef), donate_argnums=0)
        traced = jitted.trace(*jax.tree.map(place, args))
        return traced.jaxpr, traced.lower()


def compile_step(make_row, make_batch, sharding, **options):
    """The jaxpr of a row's step and its program, with the state donated.

    Args:
      **options: XLA's.
    """
    jaxpr, lowered = lower_step(make_row, make_batch, sharding)
    with as_on_a_gpu():
        return jaxpr, lowered.compile(compiler_options=options)


def program(make_row, make_batch, sharding):
    """The figures of a row's step, with the state donated."""
    from shared import hlo

    return hlo.summarize(compile_step(make_row, make_batch, sharding)[1])


def main():
    parser = _harness.parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"
    import jax

    from benchmarks import models
    from benchmarks.train_rows import BASE, rows_for

    args.device = "gpu"
    _harness.print_heading("compiled for an H100, not run")
    mesh = jax.sharding.Mesh(h100s(), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    results = {}
    for name, size in chosen(args).items():
        results[name] = {
            row: program(
                functools.partial(make, size, True),
                functools.partial(models.make_batch, size),
                sharding,
            )._asdict()
            for row, make in rows_for(size).items()
            if is_wanted(row, args)
        }
        print_model(name, results[name], BASE)
    _harness.save(args.json, results)


def print_model(name, results, base):
    print(f"\n{name}")
    base = results[base]
    _harness.print_table(
        (*COLUMNS, "temporaries", "peak", "ratio"),
        (
            (
                row,
                *(str(p[key]) for key in ("kernels", "copies", "conditionals", "host")),
                f"{p['bytes'] / 1e9:.2f}",
                f"{p['bytes'] / base['bytes']:.3f}",
                f"{p['temporary_bytes'] / 1e9:.2f} GB",
                f"{p['peak_bytes'] / 1e9:.2f} GB",
                f"{p['peak_bytes'] / base['peak_bytes']:.3f}",
            )
            for row, p in results.items()
        ),
    )


if __name__ == "__main__":
    main()

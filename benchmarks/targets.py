"""What a training step becomes on GPUs and TPUs: compiled for them, on none of them.

    pip install "jax-cuda12-plugin==$(python -c 'import jax; print(jax.__version__)')"
    pip install "jax[tpu]==$(python -c 'import jax; print(jax.__version__)')"
    python -m benchmarks.targets
    python -m benchmarks.targets --for t4,v5e --model mlp
    python -m benchmarks.targets --for h100 --size full --model mlp,llama \\
        --width 1024 --rows bfloat16,float8,wise --gemm triton
    python -m benchmarks.targets --for v5p,h100 --chips 8,256,4096

The compilers need only a description of a device (`benchmarks.devices`). Nothing runs,
and times are not measured. Each step donates its state, is traced on the CPU, and is
compiled for one device. The columns are:

- "asked" and "compiled": matrix products and convolutions by the dtype of their
  inputs, in the jaxpr and in the compiled program, without those of attention kernels.
  XLA drops products that nothing uses, joins those that share an input, and makes sums
  of small ones.
- "kernels", "copies", "cond" (conditionals) and "host" (operations for which the host
  waits).
- "GB" is what all kernels read from and write to the device's memory. "reads" are the
  bytes that loss scaling adds, in units of the gradients in float32.
- "Mcycles", for TPUs: the sum of the compiler's estimates, which some kernels lack.

On a GPU, XLA chooses the kernel of a product by trial. Here it cannot, and products are
cuBLAS's (`--gemm cublas`) or XLA's own (`--gemm triton`).
"""

import functools
import multiprocessing
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from benchmarks import _harness, devices
from benchmarks.model_sizes import COMPILED

TARGETS = ("t4", "l4", "a100", "h100", "b200", "v5e", "v6e", "tpu7x")
TRITON = "xla_gpu_enable_triton_gemm"
UNKNOWN = 2**62  # above it, the compiler has no estimate of a kernel's cycles
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
OP = re.compile(r'^\s+(?:%\S+ = )?"?stablehlo\.', re.MULTILINE)
COLUMNS = ("asked", "compiled", "kernels", "copies", "cond", "host", "GB", "ratio")
MESH_COLUMNS = ("collectives", "MB by dtype", "scaling adds", "bytes", "compile", "HLO")
# Each layout of a state under jit and in `shard_map`, with each way to scale the loss.
HALF = {"param_dtype": "float16", "reduce_dtype": "float16"}
MODES = [
    (layout, *how)
    for layout in ("data parallel", "FSDP", "2-D, FSDP x tensor")
    for how in (("jit", {}), ("shard_map", HALF))
]
# Up to 4096 chips share an array of this width, and each has its own rows.
MESH_SIZES = {"layers": 1, "width": 4096, "hidden": 256}
ROWS_PER_CHIP = 8


class Step:
    """A row's training step, traced once for all devices of its kind.

    Args:
      make_row: of (size, flash), as those of `train_rows`.
    """

    def __init__(self, make_row, size, flash):
        import jax

        from benchmarks import models

        def init():
            step, state = make_row(size, flash)
            leaves, treedef = jax.tree.flatten(state)
            self.jitted = jax.jit(_harness.flat(step, treedef), donate_argnums=0)
            return leaves

        self.args = (
            jax.eval_shape(init),
            *jax.eval_shape(lambda: models.make_batch(size)),
        )

    def trace(self, device):
        return self.jitted.trace(*place(self.args, device))


def place(args, device):
    """The arguments as shapes on a device, which need not be there."""
    import jax

    mesh = jax.sharding.Mesh([device], "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )


@functools.cache
def step_of(row, size, flash):
    from benchmarks.train_rows import ALL

    return Step(ALL[row], size, flash)


def measure(row, size, target, triton=False):
    """The figures of a row's step for a target, or the compiler's error, as a dict."""
    import jax

    from shared import hlo, products

    with devices.asked_for(target):
        step = step_of(row, size, devices.has_flash(target))
        traced = step.trace(devices.of(target)[0])
        lowered = traced.lower()
    options = {TRITON: triton} if target in devices.GPUS else {}
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0][:400]}
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    return {
        "asked": products.traced(traced.jaxpr),
        "compiled": products.compiled(text),
        "casts": products.casts(traced.jaxpr),
        "ops": len(OP.findall(lowered.as_text())),
        "cycles": sum(n for n in map(int, CYCLES.findall(text)) if n < UNKNOWN),
        "seconds": seconds,
        **hlo.summarize(compiled)._asdict(),
    }


class Worker:
    """A process that compiles, and another one after a crash of the compiler."""

    pool = None

    def __call__(self, *args):
        """`measure(*args)`, or an error."""
        spawn = multiprocessing.get_context("spawn")
        self.pool = self.pool or ProcessPoolExecutor(1, mp_context=spawn)
        try:
            return self.pool.submit(measure, *args).result()
        except BrokenProcessPool:
            self.pool = None
            return {"error": "the compiler crashes"}


def print_model(title, results, gradients, is_tpu):
    from benchmarks.train_rows import BASE, SCALED
    from shared import products

    table = []
    base = results.get(BASE) or next(iter(results.values()))  # {} if it has an error
    for row, p in results.items():
        if "error" in p:
            table.append((row, p["error"]))
            continue
        counts = (str(p[key]) for key in ("kernels", "copies", "conditionals", "host"))
        ratio = lambda key, p=p: f"{p[key] / base[key]:.3f}" if base.get(key) else ""
        plain = results.get("float16", {}).get("bytes")
        reads = ""
        if row == SCALED and plain:
            reads = f"{(p['bytes'] - plain) / gradients:.2f}"
        cycles = [f"{p['cycles'] / 1e6:.3f}", ratio("cycles")] if is_tpu else []
        table.append(
            (
                row,
                *(products.described(p[key]) for key in ("asked", "compiled")),
                *counts,
                f"{p['bytes'] / 1e9:.3f}",
                ratio("bytes"),
                reads,
                f"{p['temporary_bytes'] / 1e9:.3f}",
                f"{p['peak_bytes'] / 1e9:.3f}",
                *cycles,
            )
        )
    cycles = ("Mcycles", "ratio") if is_tpu else ()
    columns = (*COLUMNS, "reads", "temporaries", "peak", *cycles)
    _harness.print_table((title, *columns), table)


def compile_models(args, targets):
    from benchmarks.train_rows import ALL, PRECISIONS, rows_for

    rows = wanted_rows(ALL, args.rows.split(",")) if args.rows else PRECISIONS
    results, worker = {}, Worker()
    for target in targets:
        is_tpu = target in devices.TPUS
        for name, size in sizes(args, "tpu" if is_tpu else "gpu").items():
            triton = args.gemm == "triton"
            found = {
                row: worker(row, size, target, triton) for row in rows_for(size, rows)
            }
            gradients = gradient_bytes(size)
            results[f"{target} {name}"] = {
                "size": repr(size),
                "gradient_bytes": gradients,
                "rows": found,
            }
            print_model(f"{target} {name}", found, gradients, is_tpu)
            _harness.save(args.json, results)


def compile_meshes(args, targets):
    """The collectives over so many chips, with and without loss scaling."""
    results = {}
    for target in targets:
        for count in map(int, args.chips.split(",")):
            title = f"{count} x {target}"
            results[title] = {}
            for mode in MODES:
                found = measure_mesh(mode, devices.of(target, count))
                print_meshes(title, found)
                results[title] |= found
                _harness.save(args.json, results)


def measure_mesh(mode, there):
    """Row -> the collectives without a loss scale, and with the API of that row."""
    from jax.sharding import PartitionSpec as P

    from shared.collectives import APIS, LAYOUTS, collectives_of, training

    layout, how, dtypes = mode
    layouts = {
        **LAYOUTS,
        # What is narrower than the mesh stays whole.
        "FSDP": LAYOUTS["FSDP"]._replace(up_bias=P(), down=P(None, "data")),
    }
    sizes = {**MESH_SIZES, "rows": ROWS_PER_CHIP * len(there), "devices": there}
    run = lambda api: collectives_of(
        training(layouts[layout], how, api=api, **sizes, **dtypes)
    )._asdict()
    plain = run(None)
    return {f"{layout}, {how}, {api}": {"plain": plain, api: run(api)} for api in APIS}


def print_meshes(title, rows):
    table = []
    for row, (plain, scaled) in ((row, p.values()) for row, p in rows.items()):
        megabytes = (f"{n / 1e6:.3f} {dtype}" for dtype, n in plain["by_dtype"].items())
        table.append(
            (
                row,
                str(plain["count"]),
                ", ".join(megabytes),
                f"{scaled['count'] - plain['count']:+}",
                f"{scaled['bytes'] - plain['bytes']:+}",
                f"{scaled['seconds']:.1f} s",
                str(scaled["instructions"]),
            )
        )
    _harness.print_table((title, *MESH_COLUMNS), table)


def wanted_rows(rows, words):
    """The rows with these names; for a word that is not a name, those that hold it."""
    return {
        name: row
        for name, row in rows.items()
        if name in words or any(w in name for w in set(words) - set(rows))
    }


@functools.cache
def gradient_bytes(size) -> int:
    """Bytes of a model's gradients in float32."""
    import jax
    from flax import nnx

    from benchmarks import models

    model = nnx.eval_shape(lambda: models.make(size, flash=False))
    return sum(4 * x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def sizes(args, kind):
    """The models that the arguments ask for, by name, in their sizes."""
    table = COMPILED[args.size or kind]
    wanted = args.model.split(",") if args.model else list(table)
    chosen = {n: s for n, s in table.items() if any(map(n.startswith, wanted))}
    if not chosen:
        raise SystemExit(f"--model {args.model}: there are {', '.join(table)}")
    given = {key: getattr(args, key) for key in ("batch", "layers", "width")}
    return {
        name: size._replace(
            **{k: v for k, v in given.items() if v and k in size._fields}
        )
        for name, size in chosen.items()
    }


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument("--for", dest="targets", default=",".join(TARGETS))
    parser.add_argument("--model", help="some of mlp,gpt2,resnet,vit,llama,moe")
    parser.add_argument("--rows", help="their names, or words in names")
    parser.add_argument("--size", choices=COMPILED, help="instead of each target's own")
    for name in ("batch", "layers", "width"):
        parser.add_argument(f"--{name}", type=int, help="instead of each model's own")
    parser.add_argument("--gemm", choices=["cublas", "triton"], default="cublas")
    parser.add_argument("--chips", help="the collectives over so many devices instead")
    args = parser.parse_args()
    args.size = "small" if args.small else args.size
    os.environ.update(devices.ENVIRONMENT)
    targets = args.targets.split(",")
    if unknown := set(targets) - {*devices.GPUS, *devices.TPUS}:
        raise SystemExit(f"--for: unknown {sorted(unknown)}")
    for package in filter(None, map(devices.missing, targets)):
        raise SystemExit(f"install {package} in JAX's version")
    _harness.print_heading(f"compiled for {args.targets}, not run")
    (compile_meshes if args.chips else compile_models)(args, targets)


if __name__ == "__main__":
    main()

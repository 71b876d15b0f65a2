"""What float8 does to a training step: compiled for an H100, on a machine without one.

    pip install "jax-cuda12-plugin==$(python -c 'import jax; print(jax.__version__)')"
    python -m benchmarks.gpu_float8
    python -m benchmarks.gpu_float8 --models mlp,llama --widths 1024,8192
    python -m benchmarks.gpu_float8 --collectives        # over 8 H100s

As in `benchmarks.gpu_programs`, nothing runs. Each step is compiled twice, once with
all matrix products from cuBLAS and once with XLA's own from Triton; on a GPU, XLA tries
both for each product. "traced" counts the float8 products among all that the step asks
for. "compiled" counts those in the compiled program, where XLA has joined products that
share an input, such as those for query, key and value. "casts" counts arrays cast to
float8. "kernels per cast" counts the kernels beyond bfloat16's. Ratios are to bfloat16.
"""

import contextlib
import functools
import os

from benchmarks import _harness, gpu_programs

TRITON = "xla_gpu_enable_triton_gemm"
GEMMS = {"cuBLAS": {TRITON: False}, "Triton": {TRITON: True}}
DEVICES = 8
TOKENS, SEQUENCE = 16384, 2048
COLUMNS = ("kernels", "per cast", "GB moved", "ratio", "temporaries", "ratio")


def flax_models(args):
    """Name -> rows of the MLP and the Llama block, and a function for their batch."""
    from benchmarks import float8_models as f8

    found = {}
    for width in map(int, args.widths.split(",")):
        shapes = {
            "mlp": (f8.MLP(width), (TOKENS, width)),
            "llama": (
                f8.Llama(width, args.layers),
                (TOKENS // SEQUENCE, SEQUENCE, width),
            ),
        }
        for name, (model, shape) in shapes.items():
            rows = {
                row: functools.partial(f8.training, model, region, shape)
                for row, region in f8.REGIONS.items()
            }
            if name == "mlp":
                by_flax = model.clone(by_flax=True)
                rows[f8.FLAX] = functools.partial(
                    f8.training, by_flax, contextlib.nullcontext, shape
                )
            batch = functools.partial(f8.make_batch, *shape)
            found[f"{name} {width}"] = rows, batch
    return found


def nnx_models():
    """The same for GPT-2 and ViT, with embeddings rounded as if cast by hand."""
    import jax.numpy as jnp
    from flax import nnx

    from benchmarks import float8_models as f8
    from benchmarks import models
    from benchmarks.model_sizes import SIZES
    from benchmarks.train_rows import unscaled

    found = {}
    for name in ("gpt2", "vit"):
        size = SIZES["gpu"][name]
        rules = {"rules": {nnx.Embed: jnp.bfloat16}} if name == "gpt2" else {}
        rows = {
            row: functools.partial(
                unscaled, size, True, region=functools.partial(region, **rules)
            )
            for row, region in f8.REGIONS.items()
        }
        found[name] = rows, functools.partial(models.make_batch, size)
    return found


def measure(row, batch, sharding, **options):
    """The figures of a step, as a dict."""
    from shared import float8, hlo

    jaxpr, compiled = gpu_programs.compile_step(row, batch, sharding, **options)
    return {
        "traced": float8.traced_products(jaxpr),
        "compiled": float8.compiled_products(compiled.as_text()),
        "casts": float8.casts(jaxpr),
        **hlo.summarize(compiled)._asdict(),
    }


def print_model(title, results):
    from benchmarks.float8_models import BFLOAT16

    base, table = results[BFLOAT16], []
    for row, p in results.items():
        extra = p["kernels"] - base["kernels"]
        table.append(
            (
                row,
                *("{} of {}".format(*p[key]) for key in ("traced", "compiled")),
                str(p["casts"]),
                str(p["kernels"]),
                f"{extra / p['casts']:.2f}" if p["casts"] else "",
                f"{p['bytes'] / 1e9:.2f}",
                f"{p['bytes'] / base['bytes']:.3f}",
                f"{p['temporary_bytes'] / 1e9:.3f} GB",
                f"{p['temporary_bytes'] / base['temporary_bytes']:.3f}",
            )
        )
    _harness.print_table((title, "traced", "compiled", "casts", *COLUMNS), table)


def collectives(row, devices):
    """Collectives of the MLP's data-parallel step: all, and those for scales.

    Returns:
      "jit" and "shard_map" -> the two numbers.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from benchmarks import float8_models as f8
    from shared.collectives import COLLECTIVE

    mesh = jax.sharding.Mesh(np.array(devices), "data")
    model, shape = f8.MLP(1024), (TOKENS, 1024)
    found = {}
    for mode, axis_name in {"jit": None, "shard_map": "data"}.items():
        step = None

        def init(axis_name=axis_name):
            nonlocal step
            region = f8.REGIONS[row]
            step, state = f8.training(model, region, shape, axis_name)
            return state

        state, batch = (
            jax.eval_shape(init),
            jax.eval_shape(lambda: f8.make_batch(*shape)),
        )
        place = lambda spec: (
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            )
        )
        args = jax.tree.map(place(P()), state), *map(place(P("data")), batch)
        if axis_name:
            specs = P(), P(axis_name), P(axis_name)
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
        out = NamedSharding(mesh, P())
        text = jax.jit(step, out_shardings=out).lower(*args).compile().as_text()
        results = COLLECTIVE.findall(text)
        of_scales = sum("s32[" in result for result in results)  # exponents
        found[mode] = len(results), of_scales
    return found


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument(
        "--models", default="gpt2,vit,mlp,llama", help="some of these, by commas"
    )
    parser.add_argument(
        "--widths", default="1024,2048,4096,8192", help="for mlp and llama"
    )
    parser.add_argument("--layers", type=int, default=1, help="blocks of Llama")
    parser.add_argument("--collectives", action="store_true", help="these alone")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    _harness.print_heading("compiled for an H100, not run")
    if args.collectives:
        print_collectives(args)
        return
    mesh = jax.sharding.Mesh(gpu_programs.h100s(), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    wanted = args.models.split(",")
    found = {**nnx_models(), **flax_models(args)}
    results = {}
    for name, (rows, batch) in found.items():
        if name.partition(" ")[0] not in wanted:
            continue
        for gemm, options in GEMMS.items():
            title = f"{name}, {gemm}"
            results[title] = {
                row: measure(make, batch, sharding, **options)
                for row, make in rows.items()
            }
            print_model(title, results[title])
        _harness.save(args.json, results)


def print_collectives(args):
    from benchmarks.float8_models import REGIONS

    devices = gpu_programs.h100s(DEVICES)
    results = {row: collectives(row, devices) for row in REGIONS}
    modes = "jit", "shard_map"
    columns = (f"{mode}{what}" for mode in modes for what in ("", ", of scales"))
    _harness.print_table(
        ("collectives, 8 H100s", *columns),
        (
            (row, *(str(n) for mode in modes for n in found[mode]))
            for row, found in results.items()
        ),
    )
    _harness.save(args.json, results)


if __name__ == "__main__":
    main()

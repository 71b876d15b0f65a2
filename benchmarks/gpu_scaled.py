"""What scaling cotangents costs: compiled for an H100, on a machine without one.

    pip install "jax-cuda12-plugin==$(python -c 'import jax; print(jax.__version__)')"
    python -m benchmarks.gpu_scaled
    python -m benchmarks.gpu_scaled --models mlp --widths 1024

As in `benchmarks.gpu_programs`, nothing runs. Rows are training steps in plain float16
and in scaled float16, both without a loss scale. "ops" counts StableHLO ops, and
ratios are to plain float16. Matrix products are cuBLAS's.
"""

import functools
import os
import re

from benchmarks import _harness, gpu_programs

TOKENS = 16384
OP = re.compile(r"^\s+(?:%\S+ = )?\"?stablehlo\.", re.MULTILINE)
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
PLAIN = "float16"
COLUMNS = ("ops", "kernels", "GB moved", "ratio", "temporaries", "ratio")


def regions():
    import jax.numpy as jnp

    import jamp

    dtypes = {PLAIN: jnp.float16, "scaled float16": jamp.ScaledFloat16()}
    return {
        row: functools.partial(jamp.autocast, dtype) for row, dtype in dtypes.items()
    }


def models(args):
    """Name -> functions that make the rows' steps, by row, and one for their batch."""
    from benchmarks import float8_models, models
    from benchmarks.model_sizes import SIZES
    from benchmarks.train_rows import unscaled

    found = {}
    for width in map(int, args.widths.split(",")):
        model, shape = float8_models.MLP(width), (TOKENS, width)
        rows = {
            row: functools.partial(float8_models.training, model, region, shape)
            for row, region in regions().items()
        }
        batch = functools.partial(float8_models.make_batch, *shape)
        found[f"mlp {width}"] = rows, batch
    for name in ("gpt2", "resnet50"):
        size = SIZES["gpu"][name]
        rows = {
            row: functools.partial(unscaled, size, True, region=region)
            for row, region in regions().items()
        }
        if name == "gpt2":  # cuDNN's attention does not take float32
            plain = functools.partial(unscaled, size, False, region=regions()[PLAIN])
            rows["float16, XLA's attention"] = plain
        found[name] = rows, functools.partial(models.make_batch, size)
    return found


def measure(row, batch, sharding):
    """The figures of a step, as a dict."""
    from shared import hlo

    _, lowered = gpu_programs.lower_step(row, batch, sharding)
    ops = len(OP.findall(lowered.as_text()))
    with gpu_programs.as_on_a_gpu():
        compiled = lowered.compile(compiler_options=OPTIONS)
    return {"ops": ops, **hlo.summarize(compiled)._asdict()}


def print_model(title, results):
    base = results[PLAIN]
    table = [
        (
            row,
            str(p["ops"]),
            str(p["kernels"]),
            f"{p['bytes'] / 1e9:.2f}",
            f"{p['bytes'] / base['bytes']:.3f}",
            f"{p['temporary_bytes'] / 1e9:.3f} GB",
            f"{p['temporary_bytes'] / base['temporary_bytes']:.3f}",
        )
        for row, p in results.items()
    ]
    _harness.print_table((title, *COLUMNS), table)


def main():
    parser = _harness.parser(__doc__)
    parser.add_argument(
        "--models", default="mlp,gpt2,resnet50", help="some of these, by commas"
    )
    parser.add_argument("--widths", default="1024,4096", help="widths of the MLP")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    _harness.print_heading("compiled for an H100, not run")
    mesh = jax.sharding.Mesh(gpu_programs.h100s(), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    results = {}
    for name, (rows, batch) in models(args).items():
        if name.partition(" ")[0] not in args.models.split(","):
            continue
        results[name] = {
            row: measure(make, batch, sharding) for row, make in rows.items()
        }
        print_model(name, results[name])
        _harness.save(args.json, results)


if __name__ == "__main__":
    main()

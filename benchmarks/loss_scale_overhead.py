"""What loss scaling costs: a jitted AdamW step, plain, with jamp and with its peers.

    python -m benchmarks.loss_scale_overhead          # on the CPU
    python -m benchmarks.loss_scale_overhead --device gpu --width 8192

The model is an MLP whose step is bound by the optimizer, float32 throughout, so that
nothing but the scaling differs. Every row is one compiled function from parameters,
states and batch to the next ones. Rows take turns, one step each, round after round;
a row's ratio is the median over rounds of its time over the plain step's in the same
round. Keras brings its own AdamW and is compared with that.

On a CPU, glibc's malloc returns large buffers to the system at each step, and faulting
them in again costs more than what is measured. The program therefore restarts itself
with malloc's thresholds raised; `--default-malloc` leaves them.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

RAISED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**27),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--width", type=int, default=1024, help="units of a layer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--default-malloc", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


def build_rows(args):
    """Name -> (step, state, baseline). `step(state, x, y) -> (state, loss)`."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from flax.training.dynamic_scale import DynamicScale

    import jamp

    def init_params():
        keys = jax.random.split(jax.random.key(0), args.layers)
        shape = (args.width, args.width)
        return [
            {
                "kernel": jax.random.normal(key, shape) / args.width**0.5,
                "bias": jnp.zeros(args.width),
            }
            for key in keys
        ]

    def loss_fn(params, x, y):
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x - y) ** 2)

    inner = optax.adamw(1e-3)
    scaled = jamp.dynamic_loss_scale(inner)

    def plain(state, x, y):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = inner.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def jamp_step(state, x, y):
        params, opt_state = state
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x, y)
        return jamp.step(scaled, grads, opt_state, params), loss

    def jamp_update(state, x, y):
        params, opt_state = state
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x, y)
        updates, opt_state = scaled.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    rows = {
        "plain optax.adamw": (plain, (init_params(), inner.init(init_params())), None),
        "jamp.step": (jamp_step, (init_params(), scaled.init(init_params())), None),
        "jamp, tx.update": (
            jamp_update,
            (init_params(), scaled.init(init_params())),
            None,
        ),
    }

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List(
                [nnx.data(jax.tree.map(nnx.Param, layer)) for layer in init_params()]
            )

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(x @ layer["kernel"][...] + layer["bias"][...])
            return x

    model = Model()
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    graph, nnx_state = nnx.split((model, optimizer, jamp.GradScaler()))

    def jamp_grad_scaler(state, x, y):
        model, optimizer, scaler = nnx.merge(graph, state)

        def scaled_loss(model):
            loss = jnp.mean((model(x) - y) ** 2)
            return scaler.scale(loss), loss

        (_, loss), grads = nnx.value_and_grad(scaled_loss, has_aux=True)(model)
        scaler.step(optimizer, model, grads)
        scaler.update()
        return nnx.state((model, optimizer, scaler)), loss

    rows["jamp.GradScaler"] = (jamp_grad_scaler, nnx_state, None)

    def select(finite, new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    def flax_scale(state, x, y):
        params, opt_state, scale = state
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, x, y)
        updates, new_opt_state = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        return (*select(finite, new, (params, opt_state)), scale), loss

    flax_state = (init_params(), inner.init(init_params()), DynamicScale())
    flax_state = jax.tree.map(jnp.asarray, flax_state)
    rows["flax DynamicScale"] = (flax_scale, flax_state, None)

    def selecting(all_finite, update):
        """The step that jmp and mpx ask for, around their checks and selections."""

        def step(state, x, y):
            params, opt_state, scale = state

            def objective(params):
                loss = loss_fn(params, x, y)
                return scale.scale(loss), loss

            grads, loss = jax.grad(objective, has_aux=True)(params)
            grads = scale.unscale(grads)
            finite = all_finite(grads)
            params, opt_state = update(params, opt_state, grads, finite)
            return (params, opt_state, scale.adjust(finite)), loss

        return step

    if importlib.util.find_spec("jmp"):
        import jmp

        def jmp_update(params, opt_state, grads, finite):
            updates, new_opt_state = inner.update(grads, opt_state, params)
            new = optax.apply_updates(params, updates), new_opt_state
            return jmp.select_tree(finite, new, (params, opt_state))

        scale = jmp.DynamicLossScale(jnp.float32(2.0**15), jnp.int32(0))
        state = (init_params(), inner.init(init_params()), scale)
        rows["jmp"] = (selecting(jmp.all_finite, jmp_update), state, None)

    if importlib.util.find_spec("mpx"):
        import mpx  # by its parts: its value_and_grad would also compute in float16

        def mpx_update(params, opt_state, grads, finite):
            return mpx.optimizer_update(params, inner, opt_state, grads, finite)

        scale = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1))
        state = (init_params(), inner.init(init_params()), scale)
        rows["mpx"] = (selecting(mpx.all_finite, mpx_update), state, None)

    if importlib.util.find_spec("keras"):
        import keras

        def keras_row(optimizer):
            leaves, treedef = jax.tree.flatten(init_params())
            variables = [keras.Variable(leaf) for leaf in leaves]
            optimizer.build(variables)

            def step(state, x, y):
                leaves, opt_variables = state
                # A stateless scope makes scale_loss read the scale of this step.
                mapping = zip(optimizer.variables, opt_variables, strict=True)
                with keras.StatelessScope(state_mapping=list(mapping)):

                    def objective(leaves):
                        loss = loss_fn(jax.tree.unflatten(treedef, leaves), x, y)
                        return optimizer.scale_loss(loss), loss

                    grads, loss = jax.grad(objective, has_aux=True)(leaves)
                leaves, opt_variables = optimizer.stateless_apply(
                    opt_variables, grads, leaves
                )
                return (leaves, opt_variables), loss

            return step, (leaves, [v.value for v in optimizer.variables])

        own = keras.optimizers.AdamW(1e-3)
        wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(1e-3))
        rows["plain Keras AdamW"] = (*keras_row(own), None)
        rows["Keras LossScaleOptimizer"] = (*keras_row(wrapped), "plain Keras AdamW")

    return rows


def compile_rows(rows, batch, donate):
    import jax
    import jax.numpy as jnp

    compiled = {}
    for name, (step, state, baseline) in rows.items():
        leaves, treedef = jax.tree.flatten(state)

        def flat_step(leaves, x, y, step=step, treedef=treedef):
            # Flat, because jmp's state cannot be rebuilt from abstract arguments.
            state, loss = step(jax.tree.unflatten(treedef, leaves), x, y)
            return jax.tree.leaves(state), loss

        jitted = jax.jit(flat_step, donate_argnums=0 if donate else ())
        program = jitted.lower(leaves, *batch).compile()
        text, cost = program.as_text(), program.cost_analysis()
        compiled[name] = {
            "program": program,
            "state": [jnp.array(leaf, copy=True) for leaf in leaves],
            "baseline": baseline or "plain optax.adamw",
            "instructions": text.count(" = "),
            "bytes": cost["bytes accessed"],
            "seconds": [],
        }
    return compiled


def measure(compiled, batch, rounds, warmup=5):
    import jax

    for turn in range(rounds + warmup):
        for row in compiled.values():
            start = time.perf_counter()
            row["state"], loss = row["program"](row["state"], *batch)
            jax.block_until_ready((row["state"], loss))
            if turn >= warmup:
                row["seconds"].append(time.perf_counter() - start)


def summarize(compiled):
    table = {}
    for name, row in compiled.items():
        base = compiled[row["baseline"]]
        ratios = [a / b for a, b in zip(row["seconds"], base["seconds"], strict=True)]
        table[name] = {
            "milliseconds": 1e3 * statistics.median(row["seconds"]),
            "ratio": statistics.median(ratios),
            "bytes_ratio": row["bytes"] / base["bytes"],
            "extra_megabytes": (row["bytes"] - base["bytes"]) / 1e6,
            "extra_instructions": row["instructions"] - base["instructions"],
        }
    return table


def print_table(title, table):
    print(f"\n{title}\n")
    print("| step | time | ratio | XLA's bytes | extra MB | extra HLO instructions |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in table.items():
        print(
            f"| {name} | {row['milliseconds']:.2f} ms | {row['ratio']:.2f} "
            f"| {row['bytes_ratio']:.3f}x | {row['extra_megabytes']:+.1f} "
            f"| {row['extra_instructions']:+d} |"
        )


def main():
    args = parse_args()
    raised = all(os.environ.get(k) == v for k, v in RAISED_MALLOC.items())
    if args.device == "cpu" and not args.default_malloc and not raised:
        command = [sys.executable, "-m", "benchmarks.loss_scale_overhead"]
        os.environ.update(RAISED_MALLOC)
        os.execv(sys.executable, [*command, *sys.argv[1:]])
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[args.device]

    import jax

    keys = jax.random.split(jax.random.key(1))
    batch = tuple(jax.random.normal(k, (args.batch, args.width)) for k in keys)
    print(
        f"Python {sys.version.split()[0]}, JAX {jax.__version__}, "
        f"{jax.devices()[0].device_kind}, {args.layers} x {args.width}, "
        f"batch {args.batch}, {args.rounds} rounds"
    )
    results = {}
    for donate in (True, False):
        compiled = compile_rows(build_rows(args), batch, donate)
        measure(compiled, batch, args.rounds)
        title = "Donated buffers" if donate else "Buffers not donated"
        results[title] = summarize(compiled)
        print_table(title, results[title])
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What loss scaling costs: a jitted AdamW step, plain, with jamp and with its peers.

    python -m benchmarks.loss_scale_overhead          # on the CPU
    python -m benchmarks.loss_scale_overhead --device gpu --parameters 1e6,1e8,1e9

The model is an MLP with four layers on a batch of 64, whose step is bound by the
optimizer. It is float32 throughout, so that only the scaling differs. Every row is one
compiled function from parameters, states and batch to the next parameters and states.
Keras has its own AdamW and is compared with that. "Again" is the plain step a second
time, which tells what the figures resolve. Clipping by hand makes each update depend on
all gradients, as a check does, and a static scale without a check does not.

All rows run at the first number of parameters, with donated buffers and without. At the
other numbers only the plain step, twice, and jamp's rows run, donated. "Reads" counts
the bytes that the compiled step moves beyond the plain one, in units of the gradients'
bytes: a check must read the gradients once.
"""

import functools
import importlib.util
import os

from benchmarks import _harness

LAYERS, BATCH = 4, 64
PARAMETERS = {"cpu": "4.2e6,1e6,1.7e7,1e8", "gpu": "1e8,1e6,1e7,1e9"}
# Models with up to this many parameters run all rounds.
FULL_ROUNDS = {"cpu": 2e7, "gpu": 2e9}
PLAIN = "plain optax.adamw"
AGAIN = "plain optax.adamw, again"
RETRY = "jamp.retry"  # its kernels are in a loop, and are not counted


def parse_args():
    parser = _harness.parser(__doc__)
    parser.add_argument("--parameters", help="numbers of parameters, by commas")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--donated", action="store_true", help="run with donated buffers only"
    )
    args = parser.parse_args()
    default = "1e4,2e4" if args.small else PARAMETERS[args.device]
    numbers = (args.parameters or default).split(",")
    args.widths = [round((float(n) / LAYERS) ** 0.5) for n in numbers]
    args.rounds = 3 if args.small else args.rounds
    return args


def build_rows(width, peers):
    """Name -> (step, state, baseline). `step(state, x, y) -> (state, loss)`."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from flax.training.dynamic_scale import DynamicScale

    import jamp

    def init_params():
        keys = jax.random.split(jax.random.key(0), LAYERS)
        shape = (width, width)
        return [
            {
                "kernel": jax.random.normal(key, shape) / width**0.5,
                "bias": jnp.zeros(width),
            }
            for key in keys
        ]

    def loss_fn(params, x, y):
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x - y) ** 2)

    inner = optax.adamw(1e-3)
    scaled = jamp.dynamic_loss_scale(inner)

    def by_hand(inner, scale=1.0):
        """A step that checks nothing. `inner` divides the gradients by the scale."""

        def step(state, x, y):
            params, opt_state = state
            loss, pull_back = jax.vjp(lambda params: loss_fn(params, x, y), params)
            (grads,) = pull_back(jnp.full_like(loss, scale))
            updates, opt_state = inner.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return step, (init_params(), inner.init(init_params())), None

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
        PLAIN: by_hand(inner),
        AGAIN: by_hand(inner),
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
    if not peers:
        return rows

    clipping = optax.chain(optax.clip_by_global_norm(1e6), inner)
    dividing = optax.chain(optax.scale(2.0**-15), inner)
    rows["plain, clipped by global norm"] = by_hand(clipping)
    rows["plain, static scale, no check"] = by_hand(dividing, 2.0**15)
    retried = jamp.retry(jamp_step)
    rows[RETRY] = (retried, (init_params(), scaled.init(init_params())), None)

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
        """The step that jmp and mpx document, around their checks and selections."""

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
        import mpx  # only parts of it: its value_and_grad would also compute in float16

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
    """Name -> the program, its state, and its figures. Takes the rows' states."""
    import jax
    import jax.numpy as jnp

    from shared import hlo

    def compiled(name):
        step, state, baseline = rows.pop(name)
        leaves, treedef = jax.tree.flatten(state)
        flat_step = _harness.flat(step, treedef)
        jitted = jax.jit(flat_step, donate_argnums=0 if donate else ())
        program = jitted.lower(leaves, *batch).compile()
        return {
            "program": program,
            "state": [jnp.array(leaf, copy=True) for leaf in leaves],
            "baseline": baseline or PLAIN,
            "figures": hlo.summarize(program),
        }

    return _harness.together({name: functools.partial(compiled, name) for name in rows})


def measure(compiled, batch, rounds):
    import jax

    def turn(row):
        row["state"], loss = row["program"](row["state"], *batch)
        jax.block_until_ready((row["state"], loss))

    turns = {name: functools.partial(turn, row) for name, row in compiled.items()}
    return _harness.take_turns(turns, rounds, warmup=5)


def summarize(compiled, seconds, gradient_bytes):
    table = {}
    for name, row in compiled.items():
        base, figures = compiled[row["baseline"]], row["figures"]
        table[name] = {
            **_harness.figures(seconds[name], seconds[row["baseline"]]),
            "peak_ratio": figures.peak_bytes / base["figures"].peak_bytes,
        }
        if name != RETRY:
            extra = figures.bytes - base["figures"].bytes
            table[name] |= {"reads": extra / gradient_bytes, **figures._asdict()}
    return table


COUNTS = (
    ("bytes", 1e6, ".1f"),
    ("reads", 1, "+.2f"),
    ("kernels", 1, ".0f"),
    ("copies", 1, ".0f"),
)


def print_rows(title, table):
    print(f"\n{title}")
    columns = (
        "step",
        "time",
        "ratio",
        "MB moved",
        "reads",
        "kernels",
        "copies",
        "peak",
    )
    _harness.print_table(
        columns,
        (
            (
                name,
                f"{row['milliseconds']:.2f} ms",
                _harness.ratio_cell(row, table[AGAIN]),
                *(
                    f"{row[key] / unit:{form}}" if key in row else ""
                    for key, unit, form in COUNTS
                ),
                f"{row['peak_ratio']:.2f}",
            )
            for name, row in table.items()
        ),
    )


def main():
    args = parse_args()
    _harness.prepare(args, "benchmarks.loss_scale_overhead")
    os.environ.setdefault("KERAS_BACKEND", "jax")

    import jax

    _harness.print_heading(f"{LAYERS} layers, batch {BATCH}")
    results = {}
    for width in args.widths:
        peers = width == args.widths[0]
        keys = jax.random.split(jax.random.key(1))
        batch = tuple(jax.random.normal(k, (BATCH, width)) for k in keys)
        parameters = LAYERS * (width + 1) * width
        for donate in (True, False) if peers and not args.donated else (True,):
            compiled = compile_rows(build_rows(width, peers), batch, donate)
            # A turn takes longer with more parameters, so larger models get fewer
            # turns.
            share = FULL_ROUNDS[args.device] / parameters
            rounds = max(3, round(args.rounds * min(1, share)))
            seconds = measure(compiled, batch, rounds)
            title = f"{parameters / 1e6:.1f} million parameters, {rounds} rounds, "
            title += "donated" if donate else "not donated"
            results[title] = summarize(compiled, seconds, 4 * parameters)
            print_rows(title, results[title])
            del compiled
    _harness.save(args.json, results)


if __name__ == "__main__":
    main()

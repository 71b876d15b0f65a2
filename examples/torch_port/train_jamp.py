"""The port of `train_torch.py` to JAX.

python examples/torch_port/train_jamp.py --weights weights.npz

The weights are those that `train_torch.py --save` writes. Without them the layers start
from torch's distributions.
"""

import argparse
from typing import Any

import blobs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

FEATURES = 16 * (blobs.SIZE // 2) ** 2
AVERAGE_AFTER = 60  # steps taken


def torch_init(fan_in) -> dict[str, Any]:
    """torch's initializers of Conv2d and Linear, for weights and biases."""
    bound = fan_in**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return {"kernel_init": init, "bias_init": init}


class BatchNorm(nnx.BatchNorm):
    """Keeps the unbiased variance, n / (n - 1) times the batch's, as torch does."""

    def __init__(self, features, rngs):  # torch's defaults; 0.9 is its momentum of 0.1
        super().__init__(features, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x, *args, **kwargs):
        before = self.var[...]
        result = super().__call__(x, *args, **kwargs)
        if not self.use_running_average:
            n = x.size // x.shape[-1]
            after = self.var[...]
            self.var[...] = after + (after - self.momentum * before) / (n - 1)
        return result


class Trunk(nnx.Module):
    def __init__(self, rngs):
        size = (3, 3)
        self.conv1 = nnx.Conv(1, 8, size, padding=1, rngs=rngs, **torch_init(9))
        self.bn1 = BatchNorm(8, rngs)
        self.conv2 = nnx.Conv(
            8, 16, size, strides=2, padding=1, rngs=rngs, **torch_init(72)
        )
        self.bn2 = BatchNorm(16, rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.relu(self.bn2(self.conv2(x)))
        # The head's weights expect torch's order of features, channels first.
        return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


class Net(nnx.Module):
    """Where is the blob?"""

    def __init__(self, rngs):
        self.trunk = Trunk(rngs)
        self.head = nnx.Linear(FEATURES, 2, rngs=rngs, **torch_init(FEATURES))

    def __call__(self, x):
        return self.head(self.trunk(x))


class Model(nnx.Module):
    """The net, and a probe: can its features also say how wide the blob is?"""

    def __init__(self, rngs):
        self.net = Net(rngs)
        self.probe = nnx.Linear(FEATURES, 1, rngs=rngs, **torch_init(FEATURES))

    def __call__(self, x):
        features = self.net.trunk(x)
        return self.net.head(features), self.probe(jax.lax.stop_gradient(features))


def load_torch(model, state_dict):
    """Copies torch's weights, given as NumPy arrays, into the model."""
    leaves = {"running_mean": "mean", "running_var": "var", "bias": "bias"}
    for name, value in state_dict.items():
        *path, leaf = name.split(".")
        if leaf == "num_batches_tracked":
            continue
        layer = model
        for key in path:
            layer = getattr(layer, key)
        if leaf == "weight":
            leaf = "scale" if value.ndim == 1 else "kernel"
        axes = {2: (1, 0), 4: (2, 3, 1, 0)}.get(value.ndim)  # OIHW to HWIO
        getattr(layer, leaves.get(leaf, leaf))[...] = jnp.array(
            value if axes is None else value.transpose(axes)
        )


def one_cycle(low, peak, final, total_steps, pct_start=0.3):
    """`OneCycleLR` of torch, for its learning rate and for its beta1."""
    top = pct_start * total_steps - 1
    fall = total_steps - 1 - top

    def schedule(count):
        up = count <= top
        far = (count - top) / jnp.where(up, top, fall)
        edge = jnp.where(up, low, final)
        return edge + (peak - edge) * jnp.cos(jnp.pi / 2 * far) ** 2

    return schedule


def adamw(peak, weight_decay, steps):
    return optax.inject_hyperparams(optax.adamw)(
        learning_rate=one_cycle(peak / 25, peak, peak / 25 / 1e4, steps),
        b1=one_cycle(0.95, 0.85, 0.95, steps),
        weight_decay=weight_decay,
    )


class Trainer(nnx.Module):
    """All that a step changes, so that one `nnx.jit` takes it whole."""

    def __init__(self, model, steps):
        self.model = model
        # Two groups: weights decay, biases and norms do not and learn more slowly.
        weights, rest = adamw(4e-3, 0.05, steps), adamw(1e-3, 0.0, steps)
        label = lambda p: "weights" if p.ndim > 1 else "rest"
        tx = optax.partition(
            {"weights": weights, "rest": rest},
            lambda params: jax.tree.map(label, params),
        )
        self.adamw = nnx.Optimizer(model.net, tx, wrt=nnx.Param)
        sgd = optax.sgd(1e-3, momentum=0.9)
        self.sgd = nnx.Optimizer(model.probe, sgd, wrt=nnx.Param)
        self.scaler = jamp.GradScaler(init_scale=2.0**24, growth_interval=8)
        self.average = nnx.clone(model.net)
        self.n_averaged = nnx.Variable(jnp.int32(0))


def mse(output, y):
    return jnp.mean((output - y) ** 2)


def backward(trainer, x, y, parts):
    def scaled_loss(model):
        with jamp.autocast(dtype=jnp.float16):
            position, width = model(x)
            loss = mse(position, y[:, :2]) + mse(width, y[:, 2:])
            loss = loss / parts
        return trainer.scaler.scale(loss), loss

    return nnx.grad(scaled_loss, has_aux=True)(trainer.model)


@nnx.jit
def train_step(trainer, micro):
    model, scaler = trainer.model, trainer.scaler
    model.train()
    results = [backward(trainer, x, y, len(micro)) for x, y in micro]
    grads, losses = zip(*results, strict=True)
    grads = jax.tree.map(lambda *g: sum(g), *grads)

    skipped = []
    for optimizer, part in ((trainer.adamw, "net"), (trainer.sgd, "probe")):
        own = scaler.unscale_(optimizer, grads[part])
        own = jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1), own)
        skipped.append(scaler.step(optimizer, getattr(model, part), own))
    scaler.update()
    # The schedule is adamw's own and waits by itself. The average has to be told.
    late = trainer.adamw.step[...] > AVERAGE_AFTER
    update_average(trainer, late & ~skipped[0])
    log = {"scale": scaler.get_scale(), "skipped": jnp.stack(skipped)}
    return {"loss": sum(losses), **log}


def update_average(trainer, now):
    """`AveragedModel.update_parameters`: the first call copies, and so do buffers."""
    move = jnp.where(trainer.n_averaged[...] == 0, 1.0, 0.01)  # 1 - decay
    for kind, share in ((nnx.Param, move), (nnx.BatchStat, 1.0)):
        new, old = nnx.state(trainer.model.net, kind), nnx.state(trainer.average, kind)
        mixed = optax.incremental_update(new, old, share)
        select = lambda new, old: jnp.where(now, new, old)
        nnx.update(trainer.average, jax.tree.map(select, mixed, old))
    trainer.n_averaged[...] += now


@nnx.jit
@jamp.autocast(dtype=jnp.float16)
def evaluate(net, x, y):
    net.eval()
    return mse(net(x), y[:, :2])


def channels_last(x):
    return x.transpose(0, 2, 3, 1)


def hyperparams(trainer):
    """The rate and the beta1 of the last step that was taken."""
    state = trainer.adamw.opt_state.inner_states["weights"].inner_state.hyperparams
    return {"lr": state["learning_rate"][...], "beta1": state["b1"][...]}


def train(model, data, steps):
    """Trains, and returns what each step logged."""
    trainer, log = Trainer(model, steps), []
    # In the place of DDP: the weights on all devices, and a part of the batch on each.
    # BatchNorm then sees the whole batch, as torch's SyncBatchNorm does.
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    nnx.update(trainer, jax.device_put(nnx.state(trainer), whole))
    for micro in data:
        micro = [(channels_last(x), y) for x, y in micro]
        row = train_step(trainer, jax.device_put(micro, split))
        log.append(jax.device_get(row | hyperparams(trainer)))
    x, y = blobs.held_out()
    return log, float(evaluate(trainer.average, channels_last(x), y))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--weights", help="torch's initial weights, .npz")
    args = parser.parse_args(argv)
    model = Model(nnx.Rngs(0))
    if args.weights:
        load_torch(model, np.load(args.weights))
    log, final = train(model, blobs.batches(args.steps), args.steps)
    for step in range(0, args.steps, 20):
        print(step, log[step])
    print(f"held-out loss of the average: {final:.5f}")


if __name__ == "__main__":
    main()

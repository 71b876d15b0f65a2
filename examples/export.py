"""A float16 inference function, exported with `jax.export` and served without jamp.

A CNN (Flax Linen) learns scikit-learn's `load_digits`. The weights of the last run
become two functions, one in float32 and one under `jamp.autocast` in float16. Each is a
single file for CPUs, GPUs and TPUs and for batches of any size. A second Python
process, which cannot import jamp, serves them over HTTP (`serve_exported.py`). This
process sends it the test images and compares the answers with its own.

    python examples/export.py  # less than a minute on a CPU

Needs `pip install ".[examples]"`.
"""

import functools
import http.client
import os
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from harness import Training, add_flag, compare, make_parser, report
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jamp

PLATFORMS = "cpu", "cuda", "tpu"
WITHOUT_JAMP = """
import runpy, sys
sys.modules["jamp"] = None  # importing jamp fails, even where it is installed
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class CNN(nn.Module):
    """A CNN without any code for mixed precision."""

    width: int

    @nn.compact
    def __call__(self, images):  # [batch, 8, 8, 1] -> logits [batch, 10]
        x = nn.relu(nn.Conv(self.width, (3, 3))(images))
        x = nn.relu(nn.Conv(2 * self.width, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(4 * self.width)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.LayerNorm()(x))


def apply(model, params, images, precision):
    """Logits. Names the dtype, because autocast's default depends on this machine."""
    with jamp.autocast(dtype=precision, enabled=precision != "float32"):
        return model.apply(params, images)


predict = jax.jit(apply, static_argnames=("model", "precision"))


def loss_fn(params, images, labels, model, precision):
    logits = jnp.float32(apply(model, params, images, precision))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.jit, static_argnames=("tx", "model", "precision"))
def train_step(state, batch, tx, model, precision):
    params, opt_state = state
    grad_fn = jamp.value_and_grad(loss_fn, opt_state)
    loss, grads = grad_fn(params, *batch, model, precision)
    norm = optax.tree.norm(jamp.unscale(grads, opt_state))
    state = params, opt_state = jamp.step(tx, grads, opt_state, params)
    return state, jamp.metrics(opt_state) | {"loss": loss, "grad_norm": norm}


def make_training(args, data, precision, seed):
    train_images, test_images, train_labels, test_labels = data
    model = CNN(args.width)
    params = model.init(jax.random.key(seed), train_images[:1])
    adam, enabled = optax.adam(args.learning_rate), precision == "float16"
    interval = args.growth_interval
    tx = jamp.dynamic_loss_scale(adam, growth_interval=interval, enabled=enabled)
    step = functools.partial(train_step, tx=tx, model=model, precision=precision)

    def batch(number):
        rng = np.random.default_rng((seed, number))
        rows = rng.integers(len(train_images), size=args.batch_size)
        return train_images[rows], train_labels[rows]

    def evaluate(state):
        logits = predict(model, state[0], test_images, precision)
        return {"test accuracy": np.mean(logits.argmax(-1) == test_labels)}

    return Training((params, tx.init(params)), step, batch, evaluate)


def export(model, params, precision, path):
    """Writes a function from images [n, 8, 8, 1], for any n, to logits [n, 10].

    Returns the dtypes of its products and convolutions.
    """
    if precision == "float16":  # kernels, as autocast would cast them
        to_half = lambda p: p.astype(jnp.float16) if p.ndim > 1 else p
        params = jax.tree.map(to_half, params)

    @jax.jit
    def function(images):  # a region around `export` would do nothing
        return jnp.float32(apply(model, params, images, precision))

    shape = jax.export.symbolic_shape("n, 8, 8, 1")
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    exported = jax.export.export(function, platforms=PLATFORMS)(images)
    path.write_bytes(exported.serialize())
    products = r"stablehlo\.(?:convolution|dot_general).*-> tensor<.*x(\w+)>"
    return re.findall(products, exported.mlir_module())


def serve(paths, batches):
    """Serves the files from a Python without jamp: name -> answers to the batches."""
    server = Path(__file__).with_name("serve_exported.py")
    command = [sys.executable, "-I", "-c", WITHOUT_JAMP, server, *paths]
    command.append(f"--requests={len(paths) * len(batches)}")
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # two share a GPU
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipe) as process:
        said = process.stdout.readline()  # pyright: ignore
        if not said:
            raise SystemExit(f"{server.name} did not start; see its error above.")
        port = int(said.split()[-1])
        ask_all = lambda name: np.concatenate([ask(port, name, x) for x in batches])
        try:
            return {path.stem: ask_all(path.stem) for path in paths}
        finally:
            process.terminate()


def ask(port, name, images):
    """The logits that the server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", f"/{name}", images.astype("<f4").tobytes())
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{name}: {response.status} {response.reason}")
    return np.frombuffer(response.read(), "<f4").reshape(len(images), 10)


def show(paths, dtypes, served, own, labels):
    """Prints a row for each function."""
    caption = "Largest differences: logits from jamp's, probabilities p from float32's."
    table = Table(caption=caption)
    names = "served", "KB", "products", "accuracy", "Δ logits", "Δ p"
    for name in names:
        table.add_column(name, justify="right")
    for path, found in zip(paths, dtypes, strict=True):
        logits = served[path.stem]
        size = f"{path.stat().st_size / 1000:.0f}"
        accuracy = f"{np.mean(logits.argmax(-1) == labels):.2%}"
        change = np.abs(logits - own[path.stem]).max()
        other = np.abs(jax.nn.softmax(logits) - jax.nn.softmax(own["float32"])).max()
        changes = f"{change:.2g}", f"{other:.2g}"
        table.add_row(path.stem, size, ", ".join(sorted({*found})), accuracy, *changes)
    rich.print(table)


def main(argv=None):
    parser = make_parser(__doc__, "export", steps=200)
    add = functools.partial(add_flag, parser)
    add("--width", 32, "channels of the first convolution")
    add("--batch-size", 64, "images in a step")
    add("--learning-rate", 2e-3, "Adam's")
    args = parser.parse_args(argv)

    pixels, labels = load_digits(return_X_y=True)
    images = np.float32(pixels / 16).reshape(-1, 8, 8, 1)
    data = train_test_split(images, labels, test_size=0.3, random_state=0)
    runs = compare(args, functools.partial(make_training, args, data))
    report(args, runs)
    model, params = CNN(args.width), list(runs.values())[-1].state[0]

    paths = [args.out / f"{name}.jax" for name in ("float32", "float16")]
    dtypes = [export(model, params, path.stem, path) for path in paths]
    batches = np.split(data[1], [1, 100])  # of several sizes
    served, own = serve(paths, batches), {}
    for name in served:
        answers = [predict(model, params, x, name) for x in batches]
        own[name] = np.concatenate(answers, dtype=np.float32)
    show(paths, dtypes, served, own, data[3])
    return runs, dtypes, served, own


if __name__ == "__main__":
    main()

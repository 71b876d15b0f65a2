"""`import jamp` imports no model library; names that need one import it when used."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jamp

HEAVY = """
equinox flax haiku keras matplotlib msgpack orbax rich sklearn tensorboardX tensorstore
torch treescope wandb yaml
""".split()
START = f"""
import sys, jax, optax, jax.numpy as jnp
before = set(sys.modules)

def added():
    new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
    return new & set({HEAVY})
"""
# Runs each program that it receives, one per line, in a separate process.
SERVER = (
    START
    + """
import ast, os, traceback
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            exec(ast.literal_eval(line), globals())
        except BaseException:
            print(ascii(traceback.format_exc()), flush=True)
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-W", "error", "-c", SERVER]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture(scope="module")
def run(server):
    """Runs code in a separate process, where only JAX and optax are imported."""

    def run(code):
        print(ascii(code), file=server.stdin, flush=True)
        said = ast.literal_eval(server.stdout.readline())
        if isinstance(said, str):
            raise AssertionError(f"{said}exit status {server.stdout.readline()}")
        assert said == 0, f"exit status {said}"

    return run


def by_need():
    """The names that jamp imports on first use, for a type checker and in Python."""
    tree = ast.parse(Path(jamp.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.name == alias.asname
        seen[alias.name] = f".{node.module or alias.name}"
    return seen, {name: homes[-1] for name, homes in jamp._BY_NEED.items()}


def test_type_checkers_see_what_is_imported_by_need():
    seen, imported = by_need()
    assert seen == imported


@pytest.mark.slow
def test_names_are_found_on_first_use(run):
    run("""
import jamp
with_flax = {"GradScaler", "linen", "nnx"}
own = sorted(jamp._BY_NEED, key=lambda name: name in with_flax)  # these come last
assert not set(own) & vars(jamp).keys() and set(own) <= set(dir(jamp))
assert with_flax < set(own)
for name in own:
    names = {}
    exec(f"from jamp import {name}", names)
    value = names[name]
    assert value is getattr(jamp, name) is vars(jamp)[name]
    face = name not in ("GradScaler", "calibrate")
    assert (value.__name__ if face else value.__module__) == "jamp" + f".{name}" * face
    assert ("flax" in added()) == (name in with_flax), name
""")


def test_import_brings_in_no_model_library(run):
    run("""
import jamp
assert not added(), added()
assert "jamp.debug" not in sys.modules
assert not hasattr(jamp, "autocst")
""")


@pytest.mark.slow
def test_a_star_brings_in_every_name(run):
    run("""
import jamp
star = {}
exec("from jamp import *", star)
assert "flax" in added()
names = {name for name in dir(jamp) if not name.startswith("_")}
assert names == set(jamp.__all__) == star.keys() - {"__builtins__"}
assert {"GradScaler", "autocast", "calibrate", "debug", "nnx", "step"} <= names
for name in names:
    assert getattr(jamp, name) is star[name]
""")


@pytest.mark.slow
def test_plain_functions_never_bring_it_in(run):
    run("""
import pickle
import jamp
params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
tx = jamp.dynamic_loss_scale(jamp.master_weights(optax.adam(1e-3)))
opt_state = tx.init(params)

@jax.jit
def step(params, opt_state, x):
    def loss_fn(params):
        with jamp.autocast(jnp.float16, rules={"head": jnp.float32}):
            with jax.named_scope("head"):
                return jnp.mean(jax.nn.softmax(x @ params["w"] + params["b"]))
    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
    return *jamp.step(tx, grads, opt_state, params), loss

x = jnp.ones((2, 4))
params, opt_state, loss = step(params, opt_state, x)
jamp.metrics(opt_state), jamp.loss_scale(opt_state), jamp.unscale(params, opt_state)
with jamp.autocast(jnp.float16):
    assert (x @ params["w"]).dtype == jnp.float16
policy = jamp.get_policy("mixed_float16")
assert policy.wrap(lambda p, x: x @ p["w"])(params, x).dtype == jnp.float32
assert "float16" in str(jamp.debug.explain(jamp.autocast(jnp.float16)(jnp.dot))(x.T, x))
assert jamp.debug.find_nonfinite(jnp.log)(-x).found
assert not jamp.debug.overflow_report(params).found
jamp.calibrate(lambda w: jnp.sum(x @ w))(params["w"])
jamp.debug.History().append(jamp.metrics(opt_state))
pickle.loads(pickle.dumps((opt_state, policy)))
jamp.sharding
assert not added(), added()
""")


@pytest.mark.slow
def test_a_function_that_was_jitted_before_is_not_traced_again(run):
    # A user context that is made later adds a new part to the key of JAX's caches.
    run("""
import jamp
traces = []
function = jax.jit(lambda x: traces.append(0) or x + 1)
function(jnp.ones(3))
jamp.linen, jamp.nnx, jamp.debug, jamp.GradScaler, jamp.calibrate
function(jnp.ones(3))
assert len(traces) == 1
""")


FLAX_LATER = """
import jamp
x = jnp.ones((2, 4), jnp.float16)
with jamp.autocast(jnp.float16):
    (x @ x.T).block_until_ready()
params = {"w": jnp.ones((4, 4))}
tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
opt_state = tx.init(params)
policy = jamp.get_policy("mixed_float16")
policy.wrap(jnp.dot)(x, params["w"])
"""
FLAX = """
from flax import nnx
import flax.linen as nn
import flax.serialization
"""
FLAX_USED = """
embed, norm = nnx.Embed(8, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0))
tokens = jnp.arange(2)
with jamp.autocast(jnp.float16):
    assert embed(tokens).dtype == jnp.float32 and norm(x).dtype == jnp.float32
with jamp.autocast(jnp.float16, rules={nnx.Embed: jnp.float16}):
    assert embed(tokens).dtype == jnp.float16
model = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(2)])
model = jamp.linen.with_policy(model, policy, {nn.LayerNorm: "full"})
y, kept = model.apply(
    model.init(jax.random.key(0), x), x, capture_intermediates=True
)
assert y.dtype == jnp.float32
linear = jamp.nnx.with_policy(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), "c=f16,o=f16")
assert linear(x).dtype == jnp.float16
for wrong in (lambda: policy.wrap(linear), lambda: policy.wrap(nn.Dense)):
    try:
        wrong()
    except TypeError as error:
        assert "with_policy" in str(error)
    else:
        raise AssertionError("a Flax module was wrapped")
try:
    jamp.value_and_grad(lambda model: jnp.sum(model(x)), opt_state)(embed)
except TypeError as error:
    assert "use nnx.grad" in str(error)
else:
    raise AssertionError("an NNX module was differentiated")
assert jamp.loss_scale(jamp.GradScaler(init_scale=8.0)) == 8
state = flax.serialization.to_state_dict(opt_state)
assert flax.serialization.from_state_dict(opt_state, state) == opt_state
explained = jamp.debug.explain(jamp.autocast(jnp.float16)(lambda m, t: m(t)))
assert "dot_general" in str(explained(linear, x))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_flax_is_known_when_it_comes(order, run):
    flax = {"before": FLAX + FLAX_LATER, "after": FLAX_LATER + FLAX}[order]
    run(flax + FLAX_USED)


@pytest.mark.slow
def test_flax_that_is_imported_inside_a_region_is_known_there(run):
    run("""
import jamp
def sums(x, y):
    return x @ y + x[:1]
with jamp.autocast(dtype=jnp.bfloat16):
    x = jnp.ones((4, 4))
    kept = [sums(x, x).dtype for _ in range(3)]
    import flax.linen as nn
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            draw = lambda key, shape: jax.random.normal(key, shape) @ jnp.eye(4)
            x = x @ self.param("w", draw, (4, 4))
            return nn.BatchNorm(use_running_average=True)(x)
    params = Norm().init(jax.random.key(0), x)
    assert params["params"]["w"].dtype == jnp.float32  # the making of parameters
    assert (Norm().apply(params, x) + x @ x).dtype == jnp.bfloat16
    assert [sums(x, x).dtype] * 3 == kept
""")


@pytest.mark.slow
def test_a_library_that_another_thread_is_importing(run):
    run("""
import importlib.machinery, threading
import jamp

class Gate:
    # Holds the import of Flax in the middle.
    reached, opened = threading.Event(), threading.Event()

    def find_spec(self, name, path=None, target=None):
        if name != "flax.nnx.nn.stochastic":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def held(module):
            self.reached.set()
            assert self.opened.wait(60)
            execute(module)
        spec.loader.exec_module = held
        return spec

sys.meta_path.insert(0, Gate())
def bring():
    from flax import nnx
thread = threading.Thread(target=bring)
thread.start()
assert Gate.reached.wait(60) and "flax.nnx" in sys.modules
x = jnp.ones((2, 4), jnp.float16)
tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
state = tx.init(x.astype(float))
for _ in range(2):  # the first one has JAX import what it has not yet
    with jamp.autocast(jnp.float16):
        (x @ x.T).block_until_ready()
jamp.get_policy("mixed_float16").wrap(jnp.dot)(x, x.T)
jamp.value_and_grad(lambda x: jnp.sum(x), state)(x.astype(float))
jamp.debug.explain(jnp.dot)(x, x.T)
Gate.opened.set()
thread.join()
from flax import nnx
with jamp.autocast(jnp.float16):
    assert nnx.PReLU()(jnp.ones(4)).dtype == jnp.float16
""")


@pytest.mark.slow
def test_threads_that_use_a_name_at_the_same_time_get_the_same(run):
    run("""
import pickle, threading
import jamp
names = sorted(jamp._BY_NEED) * 4
start, found = threading.Barrier(len(names)), []
def use(name):
    start.wait()
    value = getattr(jamp, name)
    said = getattr(value, "__module__", "jamp")
    found.append((name, value, said))
threads = [threading.Thread(target=use, args=(name,)) for name in names]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert len(found) == len(names)
for name, value, said in found:
    assert value is getattr(jamp, name) and said == "jamp"
""")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, run):
    """A file with one of each that can be pickled."""
    path = tmp_path_factory.mktemp("saved") / "saved.pickle"
    run(f"""
import pickle, pathlib
from tests.test_pickling import made
pathlib.Path({str(path)!r}).write_bytes(pickle.dumps({{
    kind: (pickle.dumps(value), type(value).__name__) for kind, value in made().items()
}}))
""")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import jamp.nnx\n", "import jamp.debug\n"])
def test_a_pickle_is_loaded_by_a_process_that_imported_nothing(first, saved, run):
    run(f"""
import pickle, pathlib
{first}
saved = pathlib.Path({str(saved)!r}).read_bytes()
for kind, (pickled, name) in pickle.loads(saved).items():
    value = pickle.loads(pickled)
    assert type(value).__name__ == name, kind
    assert pickle.loads(pickle.dumps(value)) is not None
""")


def of_jax():
    """The functions in the modules of JAX, and what their primitives do."""
    from jax.extend.core import Primitive

    found = {}
    for module, contents in list(sys.modules.items()):
        if module.partition(".")[0] == "jax":
            for name, value in list(vars(contents).items()):
                if callable(value):
                    found[module, name] = value
                if isinstance(value, Primitive):
                    parts = vars(value).items()
                    found |= {(module, name, part): of for part, of in parts}
    return found


REPLACED = f"""
import jax.numpy as jnp, numpy as np
{inspect.getsource(of_jax)}
half = jax.ShapeDtypeStruct((4, 4), jnp.float16)

def of_half(function):
    try:
        return jax.eval_shape(lambda x: function(x), half)
    except TypeError as error:
        return str(error), "autocast" in str(getattr(error, "__notes__", []))

def carried():
    try:
        jax.lax.scan(lambda c, _: (c.astype(jnp.float16), None), np.ones(4), None, 2)
    except TypeError as error:
        return str(error), "autocast" in str(getattr(error, "__notes__", []))

def replaced():
    now = of_jax()
    return {{key[1:] for key, value in before.items() if now.get(key) is not value}}

functions = jnp.linalg.eigh, jnp.linalg.qr, jnp.linalg.svd
run = lambda: [carried(), *map(of_half, functions)]
said, before = run(), of_jax()
import jamp
assert not replaced() and run() == said, replaced()
with jamp.autocast(enabled=False):
    assert not replaced() and run()[1:] == said[1:], replaced()
with jamp.autocast(jnp.float16):
    assert jax.eval_shape(jnp.linalg.eigh, half)[0].dtype == jnp.float16
    jax.jit(lambda x: x @ x)(np.ones((4, 4)))
expected = {{("abstract_eval",)}} if jax.__version_info__ >= (0, 11, 1) else set()
assert {{key[1:] for key in replaced()}} == expected
assert run() == said
"""


@pytest.mark.slow
def test_nothing_of_jax_is_replaced(run):
    """But what newer releases ask before a region sees an op, and only in a region."""
    run(REPLACED)

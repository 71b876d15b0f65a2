"""Bad input of every public function: the call, what it raises, and what to do.

`python -m tests.bad_input --write` runs the calls and writes their messages into
tests/errors.md: a better sentence in jamp is one edit. It also writes docs/errors.md,
which has the ten errors of `first_errors.py`, and those of some methods.
"""

import copy
import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from .first_errors import FIRST, First

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
RECORD = Path(__file__).with_name("errors.md")

# Other versions of JAX have other messages, and jamp's messages quote some.
WRITES_THE_PAGES = jax.__version__.startswith("0.10.")

# The names that the first ten use; it is the first block of the page.
FIRST_SETUP = """\
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jamp

x = jnp.ones((4, 2))
params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def batches():
    yield x


tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
opt_state = tx.init(params)
model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
scaler = jamp.GradScaler()
nnx_grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(x))))(model)
"""

# The names that the calls may use besides these.
SETUP = """\
import flax.linen as nn
import numpy as np


def as_type(dtype, tree):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


grads = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
half = jamp.cast_to_half(params)
brain = as_type(jnp.bfloat16, params)
adam_tx = jamp.dynamic_loss_scale(optax.adam(0.1))
heads = jnp.ones((2, 8, 4, 16))
axis_tx = jamp.dynamic_loss_scale(optax.sgd(0.1), axis_name="data")
off_tx = jamp.dynamic_loss_scale(optax.sgd(0.1), enabled=False)
master_tx = jamp.master_weights(optax.sgd(0.1))
rest_tx = jamp.master_weights(optax.sgd(0.1), remainder=True)
sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True)
sam_tx = jamp.dynamic_loss_scale(sam)
some_steps = lambda tx: optax.conditionally_transform(tx, lambda step: step > 0)
clip_tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
parts = {"scaled": tx, "plain": optax.sgd(0.1)}
part_tx = optax.multi_transform(parts, {"w": "scaled", "b": "plain"})


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(x)


net = Net()
state = jamp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
history = jamp.debug.History()


def retry_step(state, x):
    params, opt_state = state
    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
    return jamp.step(tx, grads, opt_state, params), loss


def plain_step(state, x):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jamp.step(tx, grads, opt_state, params), loss


def scaled_grads(x):
    return jamp.value_and_grad(loss_fn, opt_state)(params, x)[1]


def changing_step(change):
    def step(state, x):
        params, opt_state = state
        half_loss = lambda params, x: loss_fn(params, x).astype(jnp.float16)
        loss, grads = jamp.value_and_grad(half_loss, opt_state)(params, x)
        return jamp.step(tx, change(grads), opt_state, params), loss

    return step


clipping_step = changing_step(lambda g: jax.tree.map(lambda g: jnp.clip(g, -1, 1), g))
hiding_step = changing_step(lambda g: jax.tree.map(jnp.nan_to_num, g))


def nnx_step(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x)))(model))


def scaled_step(model, optimizer, scaler, x):
    grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(x))))(model)
    skipped = scaler.step(optimizer, model, grads)
    scaler.update()
    return skipped


donating = jax.jit(retry_step, donate_argnums=0)
nnx_donating = nnx.jit(scaled_step, donate_argnums=(0, 1, 2))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)
"""

PAGE_TEXT = """\
# Errors

The errors that people meet first, with why they come and what to write instead, and
wrong calls of `jamp.GradScaler`. Other messages say all of this themselves: they name
the argument, what came, and what to do.

<details markdown>
<summary>The names that the code uses: the tests run it after these lines</summary>

```python
{setup}
```

</details>

## The ten that people meet first

{first}

## jamp.GradScaler

A call, the message that it raises, and what to do if the message does not say it. "..."
stands for text that differs from run to run, and for the rest of a long message.

{methods}
"""

# The methods whose messages are on the page.
ON_THE_PAGE = tuple(
    f"jamp.GradScaler.{name}"
    for name in ("unscale_", "step", "update", "load_state_dict")
)

RECORD_TEXT = """\
# What wrong calls raise

Written by `python -m tests.bad_input --write`, and compared by `test_bad_input.py`: a
change of a message shows as a difference of this file. The names of the calls are those
of `SETUP` in `bad_input.py`.

Each call has its message, and what to do if the message does not say it. In a message,
"..." stands for text that differs from run to run, and for the rest of a long message.

{names}
"""

MODULES = ("model", "optimizer", "scaler", "nnx_grads")  # which calls change

LONGEST = 400  # characters of a message on the page

SENTENCE_END = re.compile(r"(?<!\.)\. (?=[A-Z])")

# Text that differs from run to run, or between versions of JAX, Flax and Python.
VARYING = [
    (r"(got |=)(?=.{69}\.\.\.)(\w*[({[]+).*?\.\.\.", r"\1\2..."),  # a long repr
    (r"\bat 0x[0-9a-f]+", "at ..."),
    (r"<class '[\w.]+\.(\w+)'>", r"<class '...\1'>"),
    (r"\bTraced<.*?>(with<.*?>)?|\b\w*Tracer\(.*?\)|\b\w*Tracer\b", "..."),
    (r"\bArray\(\(\), dtype=key<\w+>\) overlaying: \[.*?\]", "..."),
    (r"(?<![\w/:])(/[\w.+-]+){2,}(:\d+)?", "..."),  # a path on this machine
]


class Case(NamedTuple):
    """A wrong call."""

    name: str  # the public name that it is about
    call: str
    error: str  # the type of what it raises
    argument: str  # what the first sentence of the message names
    advice: str = ""


TABLE = r"""
jamp.autocast
  jamp.autocast("cuda", jnp.float16)
    ValueError: dtype
    > Leave the device out: `jamp.autocast(jnp.float16)`.
  jamp.autocast("cuda", dtype=jnp.float16)
    TypeError: device
  jamp.autocast(device_type="cuda")
    TypeError: device
  jamp.autocast(jnp.float16, cache_enabled=None)
    TypeError: cache_enabled
  jamp.autocast(jnp.float32)
    ValueError: dtype
  jamp.autocast("flaot16")
    ValueError: dtype
  jamp.autocast(True)
    ValueError: dtype
    > Pass it by name: `enabled=True`.
  jamp.autocast(x)
    ValueError: dtype
    > Pass a dtype, such as `x.dtype`.
  jamp.autocast(loss_fn)
    ValueError: dtype
    > Write `jamp.autocast(jnp.float16)(loss_fn)`.
  jamp.autocast(Net)
    ValueError: dtype
    > Decorate `__call__`.
  jamp.autocast(jnp.float16).__exit__(None, None, None)
    RuntimeError: thread
  jamp.autocast("rowwise")
    ValueError: dtype
    > Write `jamp.autocast(jamp.Float8("rowwise"))`.
  jamp.autocast(enabled="False")
    TypeError: enabled
    > Convert it to a bool: the string `"False"` is true in Python.
  jax.jit(lambda on: jamp.autocast(enabled=on))(True)
    TypeError: enabled
    > Make it static, with `static_argnums`.
  jamp.autocast(rules=["head"])
    TypeError: rules
  jamp.autocast(rules={"head": "int8"})
    ValueError: rules
  jamp.autocast(rules={"head": True})
    ValueError: rules
  jamp.autocast(rules={"(": None})
    ValueError: rules
  jamp.autocast(rules={net: None})
    ValueError: rules
    > Pass the class, `Net`, or its path, `"head"`.
  jamp.autocast(rules={lambda x: x: None})
    ValueError: rules
  jamp.autocast(rules={nn.Module: None})
    ValueError: rules
  with jamp.autocast(jnp.float16, rules={"decoder": None}): loss_fn(params, x)
    ValueError: rules
    > See the paths with `jamp.debug.explain`.
  with jamp.autocast(jnp.float16, rules={"": None, loss_fn: None}): loss_fn(params, x)
    ValueError: rules
  with jamp.autocast(jnp.float16, rules={jax.lax.exp_p: "float8"}): jnp.exp(x)
    ValueError: rules
  jamp.autocast(cast_inputs="int32")
    ValueError: cast_inputs
  jamp.autocast(cast_inputs=True)
    ValueError: cast_inputs
    > Pass the dtype: `cast_inputs=jnp.float32`.
  with jamp.autocast(cast_inputs=jnp.float32): pass
    TypeError: cast_inputs
  jamp.autocast(jnp.float16)(None)
    TypeError: decorates a function
  jamp.autocast(jnp.float16)(loss_fn(params, x))
    TypeError: decorates a function
    > Decorate the function, then call it.
  jamp.autocast(jnp.float16)(Net)
    TypeError: decorates a function
    > Decorate `__call__`.
  jamp.autocast(jnp.float16)(batches)
    TypeError: decorates a function
    > Compute in a plain function, and decorate that.

jamp.is_autocast_enabled
  jamp.is_autocast_enabled("cuda")
    TypeError: 0 positional arguments
    > Leave the device out.

jamp.get_autocast_dtype
  jamp.get_autocast_dtype("cuda")
    TypeError: 0 positional arguments
    > Leave the device out.

jamp.GradScaler
  jamp.GradScaler("cuda")
    TypeError: init_scale
    > Write `jamp.GradScaler()`.
  jamp.GradScaler("cuda", init_scale=2.0**10)
    TypeError: device
    > Write `jamp.GradScaler(init_scale=2.0**10)`.
  jamp.GradScaler(device="cuda")
    TypeError: device
    > Leave it out.
  jamp.GradScaler(init_scale=float("nan"))
    ValueError: init_scale
  jamp.GradScaler(init_scale=-1)
    ValueError: init_scale
  jamp.GradScaler(init_scale=0.0)
    ValueError: init_scale
  jamp.GradScaler(init_scale=float("inf"))
    ValueError: init_scale
  jamp.GradScaler(init_scale=1e300)
    ValueError: init_scale
  jamp.GradScaler(init_scale=10**400)
    ValueError: init_scale
  jamp.GradScaler(init_scale=1e-45)
    ValueError: init_scale
    > Use a larger number: XLA flushes subnormal ones to zero.
  jamp.GradScaler(init_scale=None)
    TypeError: init_scale
  jamp.GradScaler(init_scale=True)
    TypeError: init_scale
  jamp.GradScaler(init_scale=np.array([8.0]))
    TypeError: init_scale
    > Call `.item()` to get a number.
  jax.jit(lambda scale: jamp.GradScaler(scale).get_scale())(jnp.ones(3))
    TypeError: init_scale
  jamp.GradScaler(growth_factor=1.0)
    ValueError: growth_factor
  jamp.GradScaler(growth_factor=float("nan"))
    ValueError: growth_factor
  jamp.GradScaler(growth_factor=float("inf"))
    ValueError: growth_factor
  jamp.GradScaler(growth_factor=None)
    TypeError: growth_factor
  jax.jit(lambda factor: jamp.GradScaler(growth_factor=factor).get_scale())(2.0)
    TypeError: growth_factor
  jamp.GradScaler(backoff_factor=2.0)
    ValueError: backoff_factor
    > Pass 0.5: the scale is multiplied by it, as in torch.
  jamp.GradScaler(backoff_factor=1.0)
    ValueError: backoff_factor
  jamp.GradScaler(backoff_factor=0.0)
    ValueError: backoff_factor
  jamp.GradScaler(backoff_factor=[0.5, 0.6])
    TypeError: backoff_factor
  jamp.GradScaler(growth_interval=0)
    ValueError: growth_interval
  jamp.GradScaler(growth_interval=2000.0)
    TypeError: growth_interval
  jamp.GradScaler(growth_interval=True)
    TypeError: growth_interval
  jamp.GradScaler(growth_interval=2**40)
    ValueError: growth_interval
  jamp.GradScaler(enabled="False")
    TypeError: enabled
    > Convert it to a bool: the string `"False"` is true in Python.
  jax.jit(lambda on: jamp.GradScaler(enabled=on).get_scale())(True)
    TypeError: enabled
  jamp.GradScaler(min_scale=-1.0)
    ValueError: min_scale
  jamp.GradScaler(min_scale=2.0**20)
    ValueError: init_scale
  jamp.GradScaler(min_scale=2.0, max_scale=1.0)
    ValueError: max_scale
  jamp.GradScaler(max_scale=1.0)
    ValueError: init_scale
    > Pass `init_scale` too.
  jamp.GradScaler(max_scale=float("nan"))
    ValueError: max_scale
  jamp.GradScaler(hysteresis=0)
    ValueError: hysteresis
  jamp.GradScaler(axis_name=0)
    TypeError: axis_name
    > Name the axis of the mesh: `"data"`.

jamp.GradScaler.scale
  scaler.scale(None)
    ValueError: outputs
    > Return the loss from the loss function.
  scaler.scale(True)
    ValueError: outputs
  scaler.scale({"loss": loss_fn})
    ValueError: outputs
    > Call it: `loss_fn(params, x)`.
  scaler.scale(jax.random.key(0))
    ValueError: outputs

jamp.GradScaler.unscale_
  scaler.unscale_(optimizer)
    TypeError: positional argument: 'grads'
    > Pass the gradients: in JAX, optimizers do not hold them.
  scaler.unscale_(optimizer, None)
    TypeError: grads
  scaler.unscale_(optimizer, {})
    RuntimeError: No inf checks
  scaler.unscale_(optimizer, nnx.as_pure(nnx_grads))
    ValueError: grads
  scaler.unscale_(optax.sgd(0.1), nnx_grads)
    TypeError: optimizer
    > Pass `nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)`.
  scaler.unscale_(nnx.Optimizer(model, tx, wrt=nnx.Param), nnx_grads)
    ValueError: optimizer
  scaler.unscale_(optimizer, as_type(jnp.float16, nnx_grads))
    ValueError: FP16 gradients
  scaler.unscale_(optimizer, as_type(jnp.int32, nnx_grads))
    RuntimeError: No inf checks
  scaler.unscale_(optimizer, nnx_grads); scaler.unscale_(optimizer, nnx_grads)
    RuntimeError: unscale_() has already been called
    > Call `scaler.update()` in between.
  scaler.step(optimizer, model, nnx_grads); scaler.unscale_(optimizer, nnx_grads)
    RuntimeError: unscale_() is being called after step()
    > Call `unscale_` before `step`.

jamp.GradScaler.step
  scaler.step(optimizer)
    TypeError: positional arguments: 'model' and 'grads'
    > Write `scaler.step(optimizer, model, grads)`.
  scaler.step(optimizer, nnx_grads, model)
    TypeError: model
  scaler.step(model, optimizer, nnx_grads)
    TypeError: optimizer
    > The optimizer comes first.
  scaler.step(optimizer, None, nnx_grads)
    TypeError: model
  scaler.step(optimizer, net, nnx_grads)
    TypeError: model
    > For Flax Linen, use `jamp.linen.TrainState`.
  scaler.step(optimizer, model, None)
    TypeError: grads
  scaler.step(optimizer, model, (1.0, nnx_grads))
    ValueError: gradients
    > Unpack the pair: `nnx.value_and_grad` returns the loss first.
  scaler.step(optimizer, nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx_grads)
    ValueError: gradient
  scaler.step(optimizer, model, nnx.State({"bias": nnx_grads["bias"]}))
    ValueError: leaf at ['kernel']
  scaler.step(optimizer, model, as_type(jnp.float16, nnx_grads))
    ValueError: FP16 gradients
  scaler.step(nnx.Optimizer(model, tx, wrt=nnx.Param), model, nnx_grads)
    ValueError: optimizer
  scaler.step(optimizer, model, nnx_grads, closure=lambda: 0)
    RuntimeError: Closure
  scaler.step(optimizer, model, nnx_grads); scaler.step(optimizer, model, nnx_grads)
    RuntimeError: step() has already been called
    > Call `scaler.update()` in between.
  scaler.unscale_(optimizer, nnx_grads); scaler.step(optimizer, model, nnx_grads)
    ValueError: gradients
  nnx.jit(lambda s, o, m, g: s.step(o, m, g))(scaler, optimizer, model, nnx_grads)
    RuntimeError: in the middle of an iteration
  nnx.jit(lambda o, m, g: scaler.step(o, m, g))(optimizer, model, nnx_grads)
    TraceContextError: GradScaler
    > Pass the scaler to the jitted function, as the model and the optimizer.

jamp.GradScaler.update
  scaler.update()
    RuntimeError: No inf checks
  scaler.update(float("nan"))
    ValueError: new_scale
  scaler.update(1e300)
    ValueError: new_scale
  scaler.update("2")
    TypeError: new_scale
  scaler.update(True)
    TypeError: new_scale
  scaler.update(jnp.ones(3))
    ValueError: new_scale
  nnx.jit(lambda s, new: s.update(new))(scaler, jnp.array(True))
    TypeError: new_scale
  jax.jit(lambda g: scaler.unscale_(optimizer, g))(nnx_grads); scaler.update()
    RuntimeError: in the middle of an iteration

jamp.GradScaler.set_growth_factor
  scaler.set_growth_factor(0.5)
    ValueError: growth_factor
  nnx.jit(lambda s, factor: s.set_growth_factor(factor))(scaler, 2.0)
    TypeError: growth_factor

jamp.GradScaler.set_backoff_factor
  scaler.set_backoff_factor(1.0)
    ValueError: backoff_factor

jamp.GradScaler.set_growth_interval
  scaler.set_growth_interval(0)
    ValueError: growth_interval
  scaler.set_growth_interval(1.5)
    TypeError: growth_interval

jamp.GradScaler.state_dict
  nnx.jit(lambda s: s.state_dict())(scaler)
    RuntimeError: inside a trace
  scaler.unscale_(optimizer, nnx_grads); scaler.state_dict()
    RuntimeError: in the middle of an iteration

jamp.GradScaler.load_state_dict
  scaler.load_state_dict({})
    RuntimeError: state dict
  scaler.load_state_dict({"scale": 8.0})
    ValueError: state_dict
  scaler.load_state_dict(scaler)
    TypeError: state_dict
    > Pass `other.state_dict()`.
  scaler.load_state_dict({**scaler.state_dict(), "scale": -1.0})
    ValueError: scale
  scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "growth_interval": 1.5})
    TypeError: growth_interval
  scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": -1})
    ValueError: _growth_tracker
  scaler.load_state_dict({**scaler.state_dict(), "_hysteresis_tracker": -5})
    ValueError: _hysteresis_tracker

jamp.dynamic_loss_scale
  jamp.dynamic_loss_scale(optax.adam)
    TypeError: inner
  jamp.dynamic_loss_scale(optax.MultiSteps)
    TypeError: inner
  jamp.dynamic_loss_scale(optimizer)
    TypeError: inner
    > For NNX, use `jamp.GradScaler`.
  jamp.dynamic_loss_scale([optax.clip(1.0), optax.sgd(0.1)])
    TypeError: inner
    > Pass `optax.chain(...)`.
  jamp.dynamic_loss_scale(optax.sgd(0.1), optax.clip(1.0))
    TypeError: init_scale
  jamp.dynamic_loss_scale(optax.sgd(0.1), backoff_factor=-1)
    ValueError: backoff_factor
  jamp.dynamic_loss_scale(optax.sgd(0.1), growth_interval=1e3)
    TypeError: growth_interval
    > Write `1000`.
  jamp.dynamic_loss_scale(optax.sgd(0.1), enabled="no")
    TypeError: enabled
  jamp.dynamic_loss_scale(optax.sgd(0.1), min_scale=float("inf"))
    ValueError: min_scale
  jamp.dynamic_loss_scale(optax.sgd(0.1), hysteresis=True)
    TypeError: hysteresis
  jamp.dynamic_loss_scale(optax.sgd(0.1), axis_name=["data", 0])
    TypeError: axis_name
  jamp.dynamic_loss_scale(optax.sgd(0.1), axis_name=("data", "data"))
    ValueError: axis_name
  jax.jit(lambda s: jamp.dynamic_loss_scale(optax.sgd(0.1), s).init(params))(True)
    TypeError: init_scale
  jamp.dynamic_loss_scale(tx).init(params)
    ValueError: inner
  jamp.dynamic_loss_scale(optax.chain(optax.clip(1.0), tx)).init(params)
    ValueError: inner
    > Clip inside: `dynamic_loss_scale(optax.chain(...))`.
  tx.init({"w": loss_fn})
    TypeError: parameter at ['w']
  tx.init(np.array(["a"]))
    TypeError: parameter at the root
  tx.init(net)
    TypeError: parameter at the root
    > Pass the parameters, which `net.init(key, x)` makes.
  tx.update(None, opt_state, params)
    ValueError: gradients
  tx.update(grads, params, opt_state)
    ValueError: state
    > The state comes second.
  tx.update(grads, optax.adam(0.1).init(params), params)
    ValueError: state
  tx.update(grads, optax.chain(tx).init(params), params)
    ValueError: state
    > Call the chain's `update`.
  tx.update(grads, opt_state._replace(loss_scale=jnp.ones(3)), params)
    ValueError: loss_scale of the state
  tx.update(grads, opt_state._replace(loss_scale="x"), params)
    ValueError: loss_scale of the state
  tx.update(grads, opt_state._replace(loss_scale=True), params)
    ValueError: loss_scale of the state
  tx.update(grads, opt_state._replace(loss_scale=1j), params)
    ValueError: loss_scale of the state
  tx.update(grads, opt_state._replace(growth_tracker=1.5), params)
    ValueError: growth_tracker of the state
  tx.update(grads, opt_state._replace(growth_tracker=2**40), params)
    ValueError: growth_tracker of the state
  tx.update(grads, opt_state._replace(growth_tracker=jnp.float16(0)), params)
    ValueError: growth_tracker of the state
  tx.update(grads, opt_state._replace(found_inf=3), params)
    ValueError: found_inf of the state
  tx.update(grads, opt_state._replace(recent_skips=np.ones(2, np.float16)), params)
    ValueError: recent_skips of the state
  adam_tx.update(grads, opt_state, params)
    ValueError: state
  adam_tx.update(grads, adam_tx.init({"w": x, "b": x}), params)
    ValueError: state
  tx.update((1.0, grads), opt_state, params)
    ValueError: gradients
    > Unpack the pair: `value_and_grad` returns the loss first.
  tx.update({"w": grads["w"]}, opt_state, params)
    ValueError: gradients
  tx.update({**grads, "c": x}, opt_state, params)
    ValueError: gradients
  tx.update({**grads, "w": grads["w"].T}, opt_state, params)
    ValueError: gradient
  tx.update({**grads, "w": "text"}, opt_state, params)
    TypeError: gradient at ['w']
  tx.update({**grads, "w": 1j * grads["w"]}, opt_state, params)
    ValueError: gradient
  tx.update(as_type(jnp.int32, grads), opt_state, params)
    ValueError: gradient
  tx.update({**grads, "b": jnp.ones((5, 3))}, opt_state, params)
    ValueError: gradients averaged
  tx.update(grads, opt_state, {**params, "act": jax.nn.gelu})
    TypeError: parameter at ['act']
  axis_tx.update(grads, opt_state, params)
    ValueError: axis_name
  off_tx.update(grads, (), params)
    ValueError: state
    > Pass the state from `init`, which has the same type with `enabled=False`.

jamp.static_loss_scale
  jamp.static_loss_scale(optax.sgd(0.1))
    TypeError: positional argument: 'loss_scale'
  jamp.static_loss_scale(optax.sgd(0.1), 0)
    ValueError: loss_scale
  jamp.static_loss_scale(optax.sgd(0.1), "dynamic")
    TypeError: loss_scale
    > Use `jamp.dynamic_loss_scale`.
  jamp.static_loss_scale(8.0, optax.sgd(0.1))
    TypeError: loss_scale
    > The optimizer comes first.
  jamp.static_loss_scale(tx, 8.0).init(params)
    ValueError: inner

jamp.step
  jamp.step(tx, grads, opt_state)
    TypeError: positional argument: 'params'
  jamp.step(tx, grads, opt_state, None)
    ValueError: params
  jamp.step(tx, grads, params, opt_state)
    ValueError: state
    > The state comes before the parameters.
  jamp.step(grads, tx, opt_state, params)
    TypeError: tx
    > The optimizer comes first.
  jamp.step(optax.adam, grads, opt_state, params)
    TypeError: tx
    > Pass the instance that made the state.
  jamp.step(scaler, grads, opt_state, params)
    TypeError: tx
    > For NNX, write `scaler.step(optimizer, model, grads)`.
  jamp.step(optax.adam(0.1), grads, opt_state, params)
    ValueError: state
    > Pass the wrapped optimizer.
  jamp.step(tx, (1.0, grads), opt_state, params)
    ValueError: gradients
    > Unpack the pair: `value_and_grad` returns the loss first.
  jamp.step(tx, grads, adam_tx.init(params), params)
    ValueError: the state belongs to another optimizer
  jamp.step(optax.sgd(0.1), {"w": x}, optax.sgd(0.1).init(params), params)
    ValueError: gradients
  jamp.step(tx, {**grads, "b": jnp.ones((5, 3))}, opt_state, params)
    ValueError: gradients averaged
  jamp.step(m := optax.masked(tx, {"w": 1, "b": 0}), grads, m.init(params), params)
    ValueError: a mask
  jamp.step(part_tx, grads, part_tx.init(params), params)
    ValueError: a partition around a loss scale
  jamp.step(clip_tx, grads, clip_tx.init(params), params)
    ValueError: in front of the loss scale
  jamp.step(sam_tx, grads, sam_tx.init(params), params, grad_fn=lambda params, i: grads)
    ValueError: grad_fn is not supported
  jamp.step(f := optax.apply_if_finite(tx, 9), grads, f.init(params), params)
    ValueError: optax.apply_if_finite
  jamp.value_and_grad(loss_fn, some_steps(tx).init(params))
    ValueError: optax.conditionally_transform around a loss scale
  jamp.value_and_grad(loss_fn, optax.MultiSteps(tx, 4).init(params))
    ValueError: optax.MultiSteps around a loss scale
  jamp.step(tx, grads, opt_state, {**params, "act": jax.nn.gelu})
    TypeError: parameter at ['act']
  jamp.step(tx, nnx_grads, opt_state, model)
    ValueError: gradients
    > For NNX, write `scaler.step(optimizer, model, grads)`.

jamp.retry
  jamp.retry(opt_state)
    TypeError: step
  jamp.retry(retry_step, 0)
    ValueError: attempts
  jamp.retry(retry_step, 2.5)
    TypeError: attempts
  jamp.retry(retry_step, attempts=True)
    TypeError: attempts
  jamp.retry(retry_step)(params, x)
    ValueError: the state holds no loss scale
    > Pass `(params, opt_state)`, or another pytree with both.
  jamp.retry(retry_step)(({**params, "act": jax.nn.gelu}, opt_state), x)
    TypeError: the state at [0]['act']
  jamp.retry(lambda state, x: [*state])((params, opt_state), x)
    TypeError: (state, aux)
  jamp.retry(lambda state, x: 0.0)((params, opt_state), x)
    TypeError: (state, aux), or the state alone
  jamp.retry(lambda p, s, x: x)(params, opt_state, x)
    TypeError: step must return the state that it got
  jamp.retry(lambda state, x: (state[1], None))((params, opt_state), x)
    TypeError: structure
  jamp.retry(lambda state, x: ((half, state[1]), None))((params, opt_state), x)
    TypeError: it returned float16[3]
  jamp.retry(lambda state, x: ((grads | {"b": x}, state[1]), 0))((params, opt_state), x)
    TypeError: it returned float32[4, 2]
  jamp.retry(retry_step)((params, optax.MultiSteps(tx, 4).init(params)), x)
    ValueError: optax.MultiSteps around a loss scale
  jamp.retry(donating)(copied((params, opt_state)), x)
    ValueError: donated
  jamp.retry(nnx_step)(model, optimizer, x)
    ValueError: loss scale
  jamp.retry(nnx_donating)(*copied((model, optimizer, scaler)), x)
    ValueError: donated

jamp.find_loss_scale
  jamp.find_loss_scale(params, opt_state, x)
    TypeError: step
  jamp.find_loss_scale(retry_step, params, x)
    ValueError: the state holds no loss scale
  jamp.find_loss_scale(retry_step, (params, optax.MultiSteps(tx, 4).init(params)), x)
    ValueError: optax.MultiSteps around a loss scale
  jamp.find_loss_scale(retry_step, ({**params, "act": jax.nn.gelu}, opt_state), x)
    TypeError: the state at [0]['act']
  jamp.find_loss_scale(retry_step, (params, opt_state), x * jnp.nan)
    ValueError: the step overflows
  jamp.find_loss_scale(plain_step, (params, opt_state), x)
    ValueError: divided by the scale once too often
  jamp.find_loss_scale(lambda state, x: (x, state), (params, opt_state), x)
    ValueError: no parameter moves
  jamp.find_loss_scale(lambda state, x: (x, x), (params, opt_state), x)
    TypeError: structure
    > Write `return state, x`.
  jamp.find_loss_scale(clipping_step, (params, opt_state), x)
    ValueError: divided by the scale once too often
  jamp.find_loss_scale(hiding_step, (params, opt_state), x)
    ValueError: divided by the scale once too often
  jamp.find_loss_scale(nnx_step, model, optimizer, x)
    ValueError: loss scale
  jax.jit(lambda x: jamp.find_loss_scale(retry_step, (params, opt_state), x))(x)
    TypeError: a trace

jamp.loss_scale
  jamp.loss_scale(tx)
    ValueError: opt_state
    > Pass the state, not the transformation.
  jamp.loss_scale(optax.adam(0.1).init(params))
    ValueError: opt_state
  jamp.loss_scale((opt_state, opt_state))
    ValueError: opt_state
  jamp.loss_scale(opt_state._replace(loss_scale=None))
    ValueError: loss_scale of the state

jamp.metrics
  jamp.metrics(scaler.state_dict())
    ValueError: opt_state
    > Pass the scaler itself.
  jamp.metrics(opt_state, window=33)
    ValueError: window
  jamp.metrics(opt_state, window=16.0)
    TypeError: window
  jamp.metrics(opt_state, floor_steps=0)
    ValueError: floor_steps
  jamp.metrics(opt_state, skipped_share=1.0)
    ValueError: skipped_share
  jamp.metrics(opt_state, skipped_share=-0.1)
    ValueError: skipped_share
  jamp.metrics(opt_state, skipped_share="half")
    TypeError: skipped_share
  jamp.metrics(opt_state, skipped_share=50)
    ValueError: skipped_share
    > Pass a share: `0.5`.
  jax.jit(lambda n: jamp.metrics(opt_state, floor_steps=n))(8)
    TypeError: floor_steps
    > Make it static, with `static_argnums`.

jamp.scale_loss
  jamp.scale_loss(None, opt_state)
    TypeError: loss
    > Return the loss from the loss function.
  jamp.scale_loss((1.0, {}), opt_state)
    TypeError: loss
    > Scale the loss, not the pair with `aux`.
  jamp.scale_loss(loss_fn, opt_state)
    TypeError: loss
    > Call it: `loss_fn(params, x)`.
  jamp.scale_loss(opt_state, 1.0)
    ValueError: opt_state
    > The loss comes first.
  jamp.scale_loss(1.0, 65536.0)
    ValueError: opt_state
    > Pass the state that holds the scale.

jamp.unscale
  jamp.unscale({"w": loss_fn}, opt_state)
    TypeError: gradient at ['w']
  jamp.unscale(grads, 65536.0)
    ValueError: opt_state
    > Pass the state that holds the scale.
  jamp.unscale(opt_state, grads)
    ValueError: opt_state
    > The gradients come first.
  jamp.unscale(grads, jax.vmap(tx.init)({"w": jnp.ones((4, 2, 3)), "b": x}))
    ValueError: opt_state

jamp.value_and_grad
  jamp.value_and_grad(loss_fn)
    TypeError: positional argument: 'opt_state'
  jamp.value_and_grad(loss_fn, params)
    ValueError: opt_state
    > Pass `params` to the function that it returns.
  jamp.value_and_grad(opt_state, loss_fn)
    ValueError: opt_state
    > The function comes first.
  jamp.value_and_grad(loss_fn, (opt_state, opt_state))
    ValueError: opt_state
  jamp.value_and_grad(loss_fn(params, x), opt_state)
    TypeError: fun
    > Pass the function, not its result.
  jamp.value_and_grad(lambda model: jnp.mean(model(x)), opt_state)(model)
    TypeError: nnx.Module
  jamp.value_and_grad(lambda model: jnp.mean(model(x)), scaler)(model)
    TypeError: scaler.scale(loss)
  jamp.value_and_grad(lambda params: None, opt_state)(params)
    TypeError: fun
  jamp.value_and_grad(lambda params: 3, opt_state)(params)
    TypeError: fun
  jamp.value_and_grad(lambda params: params["w"] > 0, opt_state)(params)
    TypeError: fun
  jamp.value_and_grad(lambda params: params["w"], opt_state)(params)
    TypeError: scalar-output functions
    > Return the mean.
  jamp.value_and_grad(lambda params: (1.0, 2.0), opt_state)(params)
    TypeError: fun
    > Pass `has_aux=True`.
  jamp.value_and_grad(lambda params: 1.0, opt_state, has_aux=True)(params)
    TypeError: has_aux
  jamp.value_and_grad(loss_fn, opt_state)(as_type(jnp.int32, params), x)
    TypeError: real- or complex-valued inputs
  jamp.value_and_grad(loss_fn, opt_state)({**params, "act": jax.nn.gelu}, x)
    TypeError: argument 0 at ['act']
    > With Equinox's own `filter_value_and_grad`, scale the loss: `jamp.scale_loss`.

jamp.DynamicLossScaleState
  jamp.DynamicLossScaleState(8.0)
    TypeError: positional arguments: 'growth_tracker'
    > Let `tx.init(params)` make it.
  adam_tx.init(params).hyperparams
    AttributeError: hyperparams
    > Only a state of `optax.inject_hyperparams` has it.
  jamp.dynamic_loss_scale(optax.inject_hyperparams(optax.sgd)(0.1)).init(params).hyperparams
    AttributeError: hyperparams

jamp.master_weights
  jamp.master_weights(optax.adam)
    TypeError: inner
  jamp.master_weights(jamp.master_weights(optax.sgd(0.1))).init(params)
    ValueError: inner
  jamp.master_weights(jamp.dynamic_loss_scale(master_tx)).init(params)
    ValueError: inner
  jamp.master_weights(optax.sgd(0.1)).init(net)
    TypeError: parameter at the root
  master_tx.update(grads, master_tx.init(half))
    ValueError: params
  (m := jamp.dynamic_loss_scale(master_tx)).update(grads, m.init(half))
    ValueError: params
  master_tx.update(grads, opt_state, half)
    ValueError: state
  master_tx.update(grads, optax.adam(0.1).init(half), half)
    ValueError: state
  master_tx.update({"w": grads["w"]}, master_tx.init(half), half)
    ValueError: gradients
  master_tx.update({**grads, "c": x}, master_tx.init(half), half)
    ValueError: gradients
  master_tx.update({**grads, "w": grads["w"].T}, master_tx.init(half), half)
    ValueError: gradient
  master_tx.update(grads, master_tx.init(params), half)
    ValueError: state
    > Call `init` with the parameters that you train.
  master_tx.update(grads, master_tx.init({"w": half["w"]}), half)
    ValueError: state
  jamp.master_weights(optax.sgd(0.1), remainder="yes")
    TypeError: remainder
  rest_tx.init(as_type(jnp.float16, params))
    ValueError: remainder=True
  rest_tx.update(grads, master_tx.init(brain), brain)
    ValueError: state
  rest_tx.update(grads, rest_tx.init(brain), as_type(jnp.float16, params))
    ValueError: float16

jamp.master_params
  jamp.master_params(params, opt_state)
    ValueError: opt_state
  jamp.master_params({"w": brain["w"]}, rest_tx.init(brain))
    ValueError: opt_state
  jamp.master_params({**brain, "b": brain["b"][:2]}, rest_tx.init(brain))
    ValueError: ['b']

jamp.Policy
  jamp.Policy("float32", "float16")
    TypeError: positional argument: 'output_dtype'
  jamp.Policy("float32", "flaot16", "float32")
    ValueError: compute_dtype
  jamp.Policy("float32", None, "float32")
    ValueError: compute_dtype
  jamp.Policy("float32", jnp.int8, "float32")
    ValueError: compute_dtype
  jamp.Policy("float32", x, "float32")
    ValueError: compute_dtype
    > Pass a dtype, such as `x.dtype`.
  jamp.Policy("float32", "float16", "mixed_float16")
    ValueError: output_dtype
  jamp.get_policy("half").param_dtype = "float32"
    FrozenInstanceError: param_dtype
    > Make a new policy: this one is frozen.

jamp.Policy.with_output_dtype
  jamp.get_policy("half").with_output_dtype("int8")
    ValueError: output_dtype

jamp.Policy.wrap
  jamp.get_policy("half").wrap(net)
    TypeError: function
  jamp.get_policy("half").wrap(nn.Dense)
    TypeError: function
  jamp.get_policy("half").wrap(model.__call__)
    TypeError: function
  jamp.get_policy("half").wrap(loss_fn(params, x))
    TypeError: function
    > Pass the function, not its result.
  jamp.get_policy("half").wrap(loss_fn, float32_for="norms")
    TypeError: float32_for
    > Write `("norms",)`.
  jamp.get_policy("half").wrap(loss_fn, float32_for=("norm",))
    ValueError: float32_for
  jamp.get_policy("half").wrap(loss_fn, float32_for=None)
    TypeError: float32_for
    > Write `()` for none.

jamp.get_policy
  jamp.get_policy(jnp.float16)
    TypeError: policy_name
    > Pass `"float16"` or a `jamp.Policy`.
  jamp.get_policy("O2")
    ValueError: dtype 'O2'
    > For apex's O2, write `"params=half,compute=half"`.
  jamp.get_policy("param=float32")
    ValueError: key 'param'
  jamp.get_policy("c=f16,c=f32")
    ValueError: key 'c'
  jamp.get_policy("c=int8")
    ValueError: c: int8

jamp.half_dtype
  jamp.half_dtype("cuda")
    TypeError: 0 positional arguments
    > Leave it out: the dtype is the default device's.

jamp.cast_to_half
  jamp.cast_to_half(params, jnp.float16)
    TypeError: 1 positional argument
    > Use `jamp.Policy(...).cast_to_param`.

jamp.cast_to_full
  jamp.cast_to_full(params, jnp.float32)
    TypeError: 1 positional argument

jamp.dot_product_attention
  jamp.dot_product_attention(heads, heads, heads[:, :, :3])
    ValueError: value
  jamp.dot_product_attention(heads, heads, heads, mask=heads)
    ValueError: mask
  jamp.dot_product_attention(heads, heads, heads, scale="1")
    TypeError: scale
  jamp.dot_product_attention(heads, heads, heads, is_causal="no")
    TypeError: is_causal
  jax.jit(lambda s: jamp.dot_product_attention(heads, heads, heads, scale=s))(1.0)
    TypeError: scale
    > Multiply the query by it, and pass scale=1.

jamp.nnx.dot_product_attention
  jamp.nnx.dot_product_attention(heads, heads, heads[:, :, :3])
    ValueError: value

jamp.linen.dot_product_attention
  jamp.linen.dot_product_attention(heads, heads, heads[:, :, :3])
    ValueError: value

jamp.linen.with_policy
  jamp.linen.with_policy(model, "half")
    TypeError: module
  jamp.linen.with_policy(nn.Dense, "half")
    TypeError: module
    > Pass an instance: `nn.Dense(3)`.
  jamp.linen.with_policy("half", net)
    TypeError: module
    > The module comes first.
  jamp.linen.with_policy(lambda x: x, "half")
    TypeError: module
  jamp.linen.with_policy(net, jnp.float16)
    TypeError: policy
    > Write `"float16"`.
  jamp.linen.with_policy(net, "hlaf")
    ValueError: dtype 'hlaf'
  jamp.linen.with_policy(jamp.linen.with_policy(net, "half"), "full")
    ValueError: module
  jamp.linen.with_policy(net, "half", {"head": jnp.float32})
    TypeError: overrides
    > Write `"float32"`.
  jamp.linen.with_policy(net, "half", ["head"])
    TypeError: overrides
  jamp.linen.with_policy(net, "half", {"head": "int8"})
    ValueError: int8
  jamp.linen.with_policy(net, "half", {"(": "full"})
    ValueError: overrides
  jamp.linen.with_policy(net, "half", {3: "full"})
    TypeError: overrides
  jamp.linen.with_policy(net, "half", {"haed": "full"}).init(jax.random.key(0), x)
    ValueError: overrides
  jamp.linen.with_policy(net, "half", float32_for=3)
    TypeError: float32_for

jamp.linen.TrainState.create
  jamp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.adam)
    TypeError: tx
  jamp.linen.TrainState.create(apply_fn=None, params="params", tx=tx)
    TypeError: parameter at the root

jamp.linen.TrainState.apply_gradients
  state.apply_gradients(grads)
    TypeError: 1 positional argument
    > Pass them by name: `grads=grads`.
  state.apply_gradients(grads=None)
    ValueError: gradients
  state.apply_gradients(grads=(1.0, grads))
    ValueError: gradients
    > Unpack the pair: `value_and_grad` returns the loss first.
  state.apply_gradients(grads={"params": grads})
    ValueError: gradients
    > Pass `grads["params"]`, if the parameters are that tree.
  state.replace(opt_state=()).apply_gradients(grads=grads)
    ValueError: state

jamp.nnx.with_policy
  jamp.nnx.with_policy(net, "half")
    TypeError: module
  jamp.nnx.with_policy(nnx.state(model), "half")
    TypeError: module
  jamp.nnx.with_policy(jamp.nnx.with_policy(model, "half"), "full")
    ValueError: module
  jamp.nnx.with_policy(nnx.Sequential(model), "half", {"layer/0": "full"})
    ValueError: overrides
  jamp.nnx.with_policy(model, "half", {nnx.LayerNorm: "full"})
    ValueError: overrides
  jamp.nnx.with_policy(model, "half", float32_for=("softmx",))
    ValueError: float32_for

jamp.Float8
  jamp.Float8("fast")
    ValueError: recipe
  jamp.Float8(activations="no")
    TypeError: activations

jamp.calibrate
  jamp.calibrate(loss_fn(params, x))(params, x)
    TypeError: fn
  jamp.calibrate(loss_fn, params, x)
    TypeError: the function alone
  jamp.calibrate(loss_fn, dtype="fp6")
    ValueError: dtype
  jamp.calibrate(loss_fn, jnp.float32)
    ValueError: dtype
  jamp.calibrate(loss_fn, tolerance=5)
    ValueError: tolerance
  jamp.calibrate(loss_fn, tolerance=0)
    ValueError: tolerance
  jamp.calibrate(loss_fn, tolerance=float("nan"))
    ValueError: tolerance
  jamp.calibrate(loss_fn, tolerance="5 %")
    TypeError: tolerance
  jamp.calibrate(loss_fn, skip_small=None)
    TypeError: skip_small
  jamp.calibrate(lambda params, x: x @ params["w"])(params, x)
    TypeError: loss
  jamp.calibrate(lambda n: n * 1.0)(3)
    ValueError: first argument
  jamp.calibrate(loss_fn)(params, jax.eval_shape(lambda: x))
    TypeError: x

jamp.debug.Calibration
  bool(jamp.calibrate(loss_fn)(params, x))
    TypeError: report.found
  jax.jit(lambda x: jamp.calibrate(loss_fn)(params, x).tolerance)(x)
    TypeError: x

jamp.debug.Calibration.from_json
  jamp.debug.Calibration.from_json("{}")
    ValueError: to_json
  jamp.debug.Calibration.from_json('{"version": 9}')
    ValueError: to_json
  jamp.debug.Calibration.from_json("[1]")
    ValueError: to_json
  jamp.debug.Calibration.from_json("text")
    ValueError: to_json
  jamp.debug.Calibration.from_json(params)
    TypeError: to_json

jamp.debug.Calibration.plot
  jamp.calibrate(loss_fn)(params, x).plot("errors.png")
    TypeError: ax

jamp.nnx.named_scopes
  jamp.nnx.named_scopes(params)
    TypeError: NNX module

jamp.debug.explain
  jamp.debug.explain(loss_fn(params, x))(params, x)
    TypeError: fn
  jamp.debug.explain(loss_fn, params)
    TypeError: the function alone
  jamp.debug.explain(loss_fn, jnp.float32)
    ValueError: dtype
    > Leave it out to explain the function without a new region.
  jamp.debug.explain(loss_fn, rules={"head": None})
    ValueError: rules
  jamp.debug.explain(loss_fn, jnp.float16, rules={"head": None})(params, x)
    ValueError: rules

jamp.debug.Explanation
  bool(jamp.debug.explain(loss_fn)(params, x))
    TypeError: report.found
    > Read `.found`, which is empty if nothing was found.

jamp.debug.check_step
  jamp.debug.check_step(params, opt_state, x)
    TypeError: step
  jamp.debug.check_step(retry_step, params, x)
    ValueError: the state holds no loss scale
  jax.jit(lambda x: jamp.debug.check_step(retry_step, (params, opt_state), x).scale)(x)
    TypeError: a trace

jamp.debug.StepReport
  bool(jamp.debug.check_step(retry_step, (params, opt_state), x))
    TypeError: report.problems

jamp.debug.find_nonfinite
  jamp.debug.find_nonfinite(loss_fn(params, x))(params, x)
    TypeError: fn
  jamp.debug.find_nonfinite(loss_fn, params, x)
    TypeError: the function alone
  jamp.debug.find_nonfinite(loss_fn, when=jnp.ones(3, bool))(params, x)
    TypeError: when
  jamp.debug.find_nonfinite(loss_fn)(params, jax.eval_shape(lambda: x))
    TypeError: x
    > Pass an array. `jamp.debug.explain` needs no values.

jamp.debug.NonfiniteReport
  jax.jit(lambda x: jamp.debug.find_nonfinite(loss_fn)(params, x).found)(x)
    TypeError: NonfiniteReport
  bool(jamp.debug.find_nonfinite(loss_fn)(params, x))
    TypeError: report.found

jamp.debug.overflow_report
  jamp.debug.overflow_report({"w": loss_fn})
    TypeError: grads
  jamp.debug.overflow_report(jax.eval_shape(lambda: grads))
    TypeError: grads
    > Pass gradients with values.
  jamp.debug.overflow_report(grads, opt_state)
    TypeError: scale
  jamp.debug.overflow_report(grads, when=opt_state)
    TypeError: when
  jamp.debug.overflow_report(grads, when=jnp.ones(2, bool))
    TypeError: when

jamp.debug.OverflowReport
  jax.jit(lambda g: jamp.debug.overflow_report(g).found)(grads)
    TypeError: OverflowReport
  jamp.debug.overflow_report(grads)["w"]
    TypeError: OverflowReport
  jax.vmap(jamp.debug.overflow_report)({"w": x}).found
    ValueError: OverflowReport
  jax.vmap(jamp.debug.overflow_report)({"w": x})[9]
    IndexError: report[9]
  jax.vmap(jamp.debug.overflow_report)({"w": x})["w"]
    TypeError: report[i]

jamp.debug.underflow_report
  jamp.debug.underflow_report(grads, float("nan"))
    ValueError: scale
  jamp.debug.underflow_report(grads, 0.0)
    ValueError: scale
  jamp.debug.underflow_report(grads, jnp.array(True))
    TypeError: scale
  jamp.debug.underflow_report(grads, 1e300)
    ValueError: scale
  jamp.debug.underflow_report(grads, jnp.ones(3))
    ValueError: scale
  jamp.debug.underflow_report(grads, opt_state)
    TypeError: scale
  jamp.debug.underflow_report(8.0, grads)
    TypeError: scale
    > The gradients come first.
  jax.jit(lambda scale: jamp.debug.underflow_report(grads, scale))(1j)
    TypeError: scale

jamp.debug.UnderflowReport
  jax.jit(lambda g: jamp.debug.underflow_report(g, 8.0).to_dict())(grads)
    TypeError: UnderflowReport

jamp.debug.grad_histogram
  jamp.debug.grad_histogram(grads, -8.0)
    ValueError: scale
  jamp.debug.grad_histogram(grads, "8")
    TypeError: scale
  jamp.debug.grad_histogram(grads, when=1)
    TypeError: when

jamp.debug.GradHistogram
  jax.jit(lambda g: jamp.debug.grad_histogram(g).to_dict())(grads)
    TypeError: GradHistogram
  jax.vmap(jamp.debug.grad_histogram)({"w": x}).to_dict()
    ValueError: GradHistogram

jamp.debug.GradHistogram.plot
  jamp.debug.grad_histogram(grads).plot("file.png")
    TypeError: ax

jamp.debug.plot_scale
  jamp.debug.plot_scale({"loss": [1.0]})
    ValueError: history
  jamp.debug.plot_scale(jamp.metrics(opt_state))
    ValueError: loss_scale
    > Pass the metrics of all steps, in a `History`.
  jamp.debug.plot_scale({"loss_scale": [8.0], "found_inf": [True, False]})
    ValueError: found_inf
  jamp.debug.plot_scale({"loss_scale": [8.0], "found_inf": [True]}, "scale.png")
    TypeError: ax

jamp.debug.History
  jamp.debug.History(1.5)
    TypeError: every
  jamp.debug.History(0)
    ValueError: every
  jamp.debug.History(start=0.5)
    TypeError: start
  jamp.debug.History(np.array([3]))
    TypeError: every
  jax.jit(lambda n: jamp.debug.History(n))(3)
    TypeError: every
  jamp.debug.History(on_row="print")
    TypeError: on_row

jamp.debug.History.append
  history.append(3.0)
    TypeError: metrics
  history.append({})
    ValueError: names for the values
  history.append({1: 2.0})
    ValueError: names for the values
  history.append(opt_state)
    TypeError: metrics
    > Pass `jamp.metrics(opt_state)`.
  history.append({"loss": None})
    TypeError: loss
  history.append({"loss": {"a": 1}})
    TypeError: loss
  history.append({"loss": jax.random.key(0)})
    TypeError: loss
  history.append({"loss": x})
    ValueError: loss
  history.append({"step": 2**70})
    ValueError: step
  history.append({"loss": 1.0}); history.append({"lost": 1.0})
    ValueError: lost
  jax.jit(lambda loss: history.append({"loss": loss}))(1.0)
    TypeError: loss
  history["loss"]
    KeyError: loss

jamp.debug.History.extend
  history.extend({"loss": 1.0})
    ValueError: loss
  history.extend({"loss": ["a"]})
    TypeError: loss
  history.extend({"loss": [1.0, 2.0], "accuracy": [1.0]})
    ValueError: accuracy

jamp.debug.check
  jamp.debug.check({"loss_scale": 8.0})
    ValueError: metrics
  jamp.debug.check(params)
    ValueError: opt_state
  jamp.debug.check(opt_state, window=0)
    ValueError: window
  jamp.debug.check(jax.vmap(tx.init)({"w": jnp.ones((4, 2, 3)), "b": x}))
    ValueError: one number
  jamp.debug.check((opt_state, opt_state))
    ValueError: opt_state
  jax.jit(jamp.debug.check)(opt_state)
    TypeError: inside a trace
  history.append({"loss": 1.0}); jamp.debug.check(history)
    ValueError: metrics

jamp.sharding.gather
  jamp.sharding.gather(params, "data")
    ValueError: axis_name
    > Under plain jit there is nothing to gather.
  jamp.sharding.gather(params, None)
    TypeError: axis_name
  jamp.sharding.gather(params, "data", param_dtype="int8")
    TypeError: param_dtype
  jamp.sharding.gather(params, "data", reduce_dtype="float8_e5m2")
    TypeError: reduce_dtype
  jamp.sharding.gather(params, "data", reduce_dtype="int8", block=0)
    ValueError: block
  jamp.sharding.gather(params, "data", reduce_dtype="int8", block=0.5)
    TypeError: block
  jamp.sharding.gather(params, "data", "data")
    TypeError: specs
    > Pass `PartitionSpec("data")`.

jamp.sharding.mean
  jamp.sharding.mean(grads, "data")
    ValueError: axis_name
    > Under plain jit, gradients are already means.
  jamp.sharding.mean(grads, ())
    TypeError: axis_name
  jamp.sharding.mean(grads, "data", dtype="int16")
    TypeError: dtype
  jamp.sharding.mean(grads, "data", dtype="int8", block="all")
    TypeError: block

jamp.sharding.error_feedback
  jamp.sharding.error_feedback("data", 0)
    ValueError: devices
  jamp.sharding.error_feedback("data", "all")
    TypeError: devices
  jamp.sharding.error_feedback(None, 8)
    TypeError: axis_name
  jamp.sharding.error_feedback("data", 8, dtype="float16")
    TypeError: dtype
    > Use `jamp.sharding.mean`: float16 loses too little to need feedback.
  jamp.sharding.error_feedback("data", 8, block=-1)
    ValueError: block
  jamp.sharding.error_feedback("data", 8).update(grads, ())
    ValueError: axis_name

jamp.sharding.ErrorFeedbackState
  jamp.sharding.ErrorFeedbackState({})
    TypeError: positional argument: 'means'
    > Let `tx.init(params)` make it.
"""


def read(table: str) -> list[Case]:
    """Reads the table: a name, indented by 2 a call, by 4 its error and advice.

    An error is its type and the name of the argument, or other words of the message if
    there is no argument to name.
    """
    cases, name = [], ""
    for line in filter(None, map(str.rstrip, table.splitlines())):
        text = line.lstrip()
        indent = len(line) - len(text)
        if indent == 0:
            name = text
        elif indent == 2:
            cases.append(Case(name, text, "", ""))
        elif text.startswith("> "):
            cases[-1] = cases[-1]._replace(advice=text.removeprefix("> "))
        else:
            error, _, argument = text.partition(": ")
            cases[-1] = cases[-1]._replace(error=error, argument=argument)
    return cases


CASES = read(TABLE)


def after_setup() -> dict[str, Any]:
    """The names that the calls may use."""
    names = {"__name__": "setup"}
    exec(compile(FIRST_SETUP + SETUP, "setup", "exec"), names)
    return names


def copies(names: dict[str, Any]) -> dict[str, Any]:
    """The names for one call, which cannot change what another call gets."""
    own = nnx.clone({name: names[name] for name in MODULES})
    return names | own | {"history": copy.deepcopy(names["history"])}


def run(call: str, names: dict[str, Any]) -> None:
    exec(compile(call, "call", "exec"), names)


def message_of(case: Case, names: dict[str, Any]) -> str:
    """The message of a call, in one line.

    Raises:
      AssertionError: it does not raise what the table says.
    """
    return said(raised(case.call, case.error, names))


def first_message(first: First, names: dict[str, Any]) -> str:
    """The message of wrong code, with jamp's notes, or the symptom if it has none.

    Raises:
      AssertionError: it does not raise what it should, or the symptom is another one.
    """
    if not first.error:
        run(first.wrong, names)
        return first.symptom
    error = raised(first.wrong, first.error, names)
    notes = [n for n in getattr(error, "__notes__", ()) if "autocast" in n]
    return " ".join([f"{first.error}:", code(" ".join([shown(said(error)), *notes]))])


def raised(call: str, kind: str, names: dict[str, Any]) -> Exception:
    """The error of a call; AssertionError if it raises nothing, or another type."""
    try:
        run(call, names)
    except Exception as error:
        assert type(error).__name__ == kind, f"{call} raises {error!r}"
        return error
    raise AssertionError(f"{call} raises nothing")


def said(error: Exception) -> str:
    """An error's message, in one line."""
    text = str(error).partition("\n-----")[0]  # JAX adds a note on tracebacks
    text = re.sub(r"\n +.*", " ...", text, count=1, flags=re.DOTALL)  # an example
    return " ".join(text.split())


def names_argument(message: str, argument: str) -> bool:
    """Whether the first sentence of a message has these words."""
    first = SENTENCE_END.split(message)[0]
    return bool(re.search(rf"(?<!\w){re.escape(argument)}(?!\w)", first))


def shown(message: str) -> str:
    """A message on the page: the same in each run, and not too long."""
    for pattern, replacement in VARYING:
        message = re.sub(pattern, replacement, message)
    if len(message) <= LONGEST:
        return message
    ends = [end.start() + 1 for end in SENTENCE_END.finditer(message, 0, LONGEST)]
    return f"{message[: ends[-1] if ends else LONGEST]} ..."


def section(first: First, message: str) -> str:
    """One of the first ten on the page."""
    why = textwrap.fill(first.why, 88, break_on_hyphens=False)
    lines = [f"### {first.title}", "", f"> {message}", "", why, ""]
    return "\n".join([*lines, "```python", first.right.rstrip(), "```"])


def page(first: Sequence[str], messages: Sequence[str]) -> str:
    """The page of the documentation."""
    said = zip(CASES, messages, strict=True)
    return PAGE_TEXT.format(
        setup=FIRST_SETUP.rstrip(),
        first="\n\n".join(map(section, FIRST, first)),
        methods=by_name([row for row in said if row[0].name in ON_THE_PAGE]),
    )


def record(messages: Sequence[str]) -> str:
    """The messages of all calls."""
    return RECORD_TEXT.format(names=by_name(list(zip(CASES, messages, strict=True))))


def by_name(rows: Sequence[tuple[Case, str]]) -> str:
    """Calls and their messages, below the public names that they are about."""
    parts = []
    for name, group in itertools.groupby(rows, lambda row: row[0].name):
        parts += [f"## {name}", "\n".join(itertools.starmap(entry, group))]
    return "\n\n".join(parts)


def entry(case: Case, message: str) -> str:
    said = code(f"{case.error}: {shown(message)}")
    advice = f": {case.advice}" if case.advice else ""
    return f"- {code(case.call)}\n    - {said}{advice}"


def code(text: str) -> str:
    """Text as code."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.bad_input --write")
    if not WRITES_THE_PAGES:
        sys.exit(f"The page is written with JAX 0.10; this is {jax.__version__}.")
    names = after_setup()
    said_first = [first_message(first, copies(names)) for first in FIRST]
    said_by_all = [message_of(case, copies(names)) for case in CASES]
    PAGE.write_text(page(said_first, said_by_all))
    RECORD.write_text(record(said_by_all))

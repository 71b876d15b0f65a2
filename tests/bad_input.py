"""Bad input of every public function: the call, what it raises, and what to do.

`python -m tests.bad_input --write` writes docs/errors.md from this table. In a message
"..." stands for what may vary, and all white space is one blank.
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"

# What the calls may use; it is the first block of the page.
SETUP = """\
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jamp

x = jnp.ones((4, 2))
params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
grads = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
half = jamp.cast_to_half(params)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def batches():
    yield x


def as_type(dtype, tree):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


tx = jamp.dynamic_loss_scale(optax.sgd(0.1))
opt_state = tx.init(params)
adam_tx = jamp.dynamic_loss_scale(optax.adam(0.1))
axis_tx = jamp.dynamic_loss_scale(optax.sgd(0.1), axis_name="data")
off_tx = jamp.dynamic_loss_scale(optax.sgd(0.1), enabled=False)
master_tx = jamp.master_weights(optax.sgd(0.1))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(x)


net = Net()
state = jamp.linen.TrainState.create(apply_fn=None, params=params, tx=tx)

model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
scaler = jamp.GradScaler()
nnx_grads = nnx.grad(lambda model: scaler.scale(jnp.mean(model(x))))(model)

history = jamp.debug.History()
"""

INTRO = """\
# Errors

For those who got one, and for those who want to know what is refused. What jamp raises
says which argument it is about, what came, and mostly what to do. Below are calls that
are wrong, by public name: what they raise, and the message, where "..." stands for what
may vary. They run in the tests, each after these lines:
"""


class Case(NamedTuple):
    """A call that is wrong."""

    name: str  # the public name that it is about
    call: str
    error: str
    message: str
    advice: str = ""


TABLE = r"""
jamp.autocast
  jamp.autocast("cuda", jnp.float16)
    ValueError: autocast(dtype='cuda'): the dtype must be float16 or bfloat16. There is
    no device argument: write `with jamp.autocast(dtype=jnp.float16):`. To run in
    float32, write `enabled=False`.
    > There is no device: `jamp.autocast(jnp.float16)`.
  jamp.autocast("cuda", dtype=jnp.float16)
    TypeError: autocast takes no device, and no cache_enabled: write `with
    jamp.autocast(dtype=jnp.float16):`. ...
    > Leave the device out.
  jamp.autocast(device_type="cuda")
    TypeError: autocast takes no device, and no cache_enabled: ...
    > Leave it out.
  jamp.autocast(jnp.float16, cache_enabled=False)
    TypeError: autocast takes no device, and no cache_enabled: ...
    > Leave it out.
  jamp.autocast(jnp.float32)
    ValueError: autocast(dtype='float32'): the dtype must be float16 or bfloat16. ...
    > `enabled=False` runs in float32.
  jamp.autocast(True)
    ValueError: autocast(dtype=True): the dtype must be float16 or bfloat16. ...
    > `enabled=True` by name.
  jamp.autocast(x)
    ValueError: autocast(dtype=Array(...)): the dtype must be float16 or bfloat16. ...
    > `x.dtype`, if that is meant.
  jamp.autocast(loss_fn)
    ValueError: autocast(dtype=<function loss_fn...>): the dtype must be float16 or
    bfloat16. ...
    > `jamp.autocast(jnp.float16)(loss_fn)`.
  jamp.autocast(enabled="False")
    TypeError: autocast(enabled=...) must be a bool; got 'False' of type str.
    > A string from the command line is true.
  jax.jit(lambda on: jamp.autocast(enabled=on))(True)
    TypeError: autocast(enabled=...) must be a bool; got ... of type ....
    > Make it static: `static_argnums`.
  jamp.autocast(rules=["head"])
    TypeError: autocast(rules=...) must be a dict, got <class 'list'>
  jamp.autocast(rules={"head": "int8"})
    ValueError: autocast(rules={'head': ...}): cannot run in int8 A key is a JAX
    primitive (jax.lax.exp_p), a Python function (jax.nn.softmax), or a regular
    expression that is searched for in the module path ("lm_head"). A value is the dtype
    to run in: float16, bfloat16 or float32, or None to leave the op as it is.
  jamp.autocast(rules={"head": True})
    ValueError: autocast(rules={'head': ...}): True is not a dtype...
  jamp.autocast(rules={"(": None})
    ValueError: autocast(rules={'(': ...}): not a regular expression: missing ),
    unterminated subpattern at position 0...
  jamp.autocast(rules={net: None})
    ValueError: autocast(rules={Net(): ...}): Net is none of the three kinds of keys...
    > The class, `Net`, or its path, `"head"`.
  jamp.autocast(rules={lambda x: x: None})
    ValueError: autocast(rules={<function <lambda> at ...>: ...}): a function is known
    by its code, and a lambda may have that of another one on its line...
    > A path: put the ops into `with jax.named_scope("name"):`.
  with jamp.autocast(jnp.float16, rules={"decoder": None}): loss_fn(params, x)
    ValueError: autocast(rules=...): no op matched 'decoder'. A module path is searched
    for in the name stack, which Flax Linen, Haiku and jax.named_scope write; a function
    matches while it runs in the region.
    > Look at the paths with `jamp.debug.explain`.
  jamp.autocast(cast_inputs="int32")
    ValueError: autocast(cast_inputs='int32'): the dtype must be float16, bfloat16 or
    float32.
  jamp.autocast(cast_inputs=True)
    ValueError: autocast(cast_inputs=True): the dtype must be float16, bfloat16 or
    float32.
    > The dtype: `cast_inputs=jnp.float32`.
  with jamp.autocast(cast_inputs=jnp.float32): pass
    TypeError: autocast(cast_inputs=...) decorates a function, whose inputs it casts; it
    cannot be entered with `with`.
  jamp.autocast(jnp.float16)(None)
    TypeError: autocast(...) decorates a function; got None of type NoneType. Of a class
    decorate the method that computes. A generator or coroutine would leave the region
    open while other code runs: decorate the function that it calls.
  jamp.autocast(jnp.float16)(loss_fn(params, x))
    TypeError: autocast(...) decorates a function; got Array(4., dtype=float32) of type
    ArrayImpl. Of a class decorate the method that computes. A generator or coroutine
    would leave the region open while other code runs: decorate the function that it
    calls.
    > Decorate the function, then call it.
  jamp.autocast(jnp.float16)(Net)
    TypeError: autocast(...) decorates a function; got <class '...Net'> of type type. Of
    a class decorate the method that computes. A generator or coroutine would leave the
    region open while other code runs: decorate the function that it calls.
    > Decorate `__call__`.
  jamp.autocast(jnp.float16)(batches)
    TypeError: autocast(...) decorates a function; got <function batches...> of type
    function. Of a class decorate the method that computes. A generator or coroutine
    would leave the region open while other code runs: decorate the function that it
    calls.
    > Compute in a plain function, and decorate that.

jamp.is_autocast_enabled
  jamp.is_autocast_enabled("cuda")
    TypeError: is_autocast_enabled() takes 0 positional arguments but 1 was given
    > There is no device.

jamp.get_autocast_dtype
  jamp.get_autocast_dtype("cuda")
    TypeError: get_autocast_dtype() takes 0 positional arguments but 1 was given
    > There is no device.

jamp.GradScaler
  jamp.GradScaler("cuda")
    TypeError: init_scale must be a number; got 'cuda'. The device that
    torch.amp.GradScaler takes first has no counterpart: leave it out.
    > `jamp.GradScaler()`.
  jamp.GradScaler(device="cuda")
    TypeError: GradScaler.__init__() got an unexpected keyword argument 'device'...
    > Leave it out.
  jamp.GradScaler(init_scale=float("nan"))
    ValueError: init_scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got nan.
  jamp.GradScaler(init_scale=-1)
    ValueError: init_scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got -1.0.
  jamp.GradScaler(init_scale=1e300)
    ValueError: init_scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got 1e+300.
  jamp.GradScaler(init_scale=10**400)
    ValueError: init_scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got inf.
  jamp.GradScaler(init_scale=1e-45)
    ValueError: init_scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got 1e-45.
    > XLA flushes such numbers to zero.
  jamp.GradScaler(init_scale=None)
    TypeError: init_scale must be a number; got None of type NoneType.
  jamp.GradScaler(init_scale=True)
    TypeError: init_scale must be a number; got True of type bool.
  jamp.GradScaler(init_scale=np.array([8.0]))
    TypeError: init_scale must be a number; got array([8.]) of type ndarray.
    > `.item()` makes it a number.
  jax.jit(lambda scale: jamp.GradScaler(scale).get_scale())(jnp.ones(3))
    TypeError: init_scale must be a number; got ... of type ....
  jamp.GradScaler(growth_factor=1.0)
    ValueError: growth_factor must be finite and > 1; got 1.0.
  jax.jit(lambda factor: jamp.GradScaler(growth_factor=factor).get_scale())(2.0)
    TypeError: growth_factor of a GradScaler is static; got a traced value. Set it
    outside the jitted function, to a Python number.
  jamp.GradScaler(backoff_factor=2.0)
    ValueError: backoff_factor must be in (0, 1); got 2.0.
    > torch multiplies by it, and so does jamp: 0.5.
  jamp.GradScaler(growth_interval=0)
    ValueError: growth_interval must be >= 1 and < 2**31; got 0.
  jamp.GradScaler(growth_interval=2000.0)
    TypeError: growth_interval must be an integer; got 2000.0 of type float.
  jamp.GradScaler(growth_interval=2**40)
    ValueError: growth_interval must be >= 1 and < 2**31; got 1099511627776.
  jamp.GradScaler(enabled="False")
    TypeError: enabled must be a bool; got 'False' of type str.
    > A string from the command line is true.
  jax.jit(lambda on: jamp.GradScaler(enabled=on).get_scale())(True)
    TypeError: enabled must be a bool; got ... of type ....
  jamp.GradScaler(min_scale=-1.0)
    ValueError: min_scale must be in [0, 3.4e38]; got -1.0.
  jamp.GradScaler(min_scale=2.0, max_scale=1.0)
    ValueError: max_scale must be at least min_scale (2.0); got 1.0.
  jamp.GradScaler(max_scale=1.0)
    ValueError: init_scale must be at most max_scale (1.0); got 65536.0.
    > Give `init_scale` too.
  jamp.GradScaler(max_scale=float("nan"))
    ValueError: max_scale must be at least min_scale (0.0); got nan.
  jamp.GradScaler(hysteresis=0)
    ValueError: hysteresis must be >= 1 and < 2**31; got 0.
  jamp.GradScaler(axis_name=0)
    TypeError: axis_name must be a name or a sequence of names; got 0.
    > The axis of the mesh: `"data"`.

jamp.GradScaler.scale
  scaler.scale(None)
    ValueError: outputs must be an array or a nest of arrays; got None of type NoneType.
    > Return the loss from the loss function.
  scaler.scale(True)
    ValueError: outputs must be an array or a nest of arrays; got True of type bool.
  scaler.scale({"loss": loss_fn})
    ValueError: outputs must be an array or a nest of arrays; got <function loss_fn...>
    of type function.
    > Call it: `loss_fn(params, x)`.
  scaler.scale(jax.random.key(0))
    ValueError: outputs must be an array or a nest of arrays; got ... of type
    PRNGKeyArray.

jamp.GradScaler.unscale_
  scaler.unscale_(optimizer)
    TypeError: GradScaler.unscale_() missing 1 required positional argument: 'grads'
    > JAX's optimizers hold no gradients: pass them.
  scaler.unscale_(optimizer, None)
    TypeError: grads must be what nnx.grad returned; got None of type NoneType.
  scaler.unscale_(optimizer, {})
    RuntimeError: No inf checks were recorded for this optimizer.
  scaler.unscale_(optimizer, nnx.as_pure(nnx_grads))
    ValueError: grads holds no gradient of <class 'flax.nnx.variablelib.Param'>, which
    the optimizer updates; pass what nnx.grad returned, not nnx.as_pure of it.
  scaler.unscale_(optax.sgd(0.1), nnx_grads)
    TypeError: optimizer must be an nnx.Optimizer (nnx.ModelAndOptimizer is not
    supported); got GradientTransformationExtraArgs.
    > `nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)`.
  scaler.unscale_(nnx.Optimizer(model, tx, wrt=nnx.Param), nnx_grads)
    ValueError: optimizer already holds a loss scale, at the root, and would divide the
    gradients twice; use one of the two.
    > One loss scale is enough.
  scaler.unscale_(optimizer, as_type(jnp.float16, nnx_grads))
    ValueError: Attempting to unscale FP16 gradients. The gradient at ['bias'] is
    float16: keep the parameters in float32 and cast them on use, or use
    jamp.dynamic_loss_scale, which unscales in float32.
  scaler.unscale_(optimizer, as_type(jnp.int32, nnx_grads))
    RuntimeError: No inf checks were recorded for this optimizer.
  scaler.unscale_(optimizer, nnx_grads); scaler.unscale_(optimizer, nnx_grads)
    RuntimeError: unscale_() has already been called on this optimizer since the last
    update().
    > Call `scaler.update()` between.
  scaler.step(optimizer, model, nnx_grads); scaler.unscale_(optimizer, nnx_grads)
    RuntimeError: unscale_() is being called after step().
    > The other order.

jamp.GradScaler.step
  scaler.step(optimizer)
    TypeError: GradScaler.step() missing 2 required positional arguments: 'model' and
    'grads'
    > `scaler.step(optimizer, model, grads)`.
  scaler.step(optimizer, nnx_grads, model)
    TypeError: model must be the NNX module to update; got State({... of type State.
    Write scaler.step(optimizer, model, grads).
    > The model comes first.
  scaler.step(model, optimizer, nnx_grads)
    TypeError: optimizer must be an nnx.Optimizer (nnx.ModelAndOptimizer is not
    supported); got Linear.
    > The optimizer comes first.
  scaler.step(optimizer, None, nnx_grads)
    TypeError: model must be the NNX module to update; got None of type NoneType. Write
    scaler.step(optimizer, model, grads).
  scaler.step(optimizer, net, nnx_grads)
    TypeError: model must be the NNX module to update; got Net() of type Net. Write
    scaler.step(optimizer, model, grads).
    > Flax Linen: `jamp.linen.TrainState`.
  scaler.step(optimizer, model, None)
    TypeError: grads must be what nnx.grad returned; got None of type NoneType.
  scaler.step(optimizer, model, (1.0, nnx_grads))
    ValueError: GradScaler.step: the gradients have a leaf at [1]['bias'] and the
    parameters have none there; pass the gradients of these parameters. Parameter paths:
    ['bias'], ['kernel'].
    > `nnx.value_and_grad` returns the loss first.
  scaler.step(optimizer, nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx_grads)
    ValueError: GradScaler.step: at ['kernel'] the gradient has shape (2, 3) and the
    parameter has shape (5, 3); pass the gradients of these parameters.
  scaler.step(optimizer, model, nnx_grads, closure=lambda: 0)
    RuntimeError: Closure use is not currently supported if GradScaler is enabled.
  scaler.step(optimizer, model, nnx_grads); scaler.step(optimizer, model, nnx_grads)
    RuntimeError: step() has already been called since the last update().
    > Call `scaler.update()` between.
  scaler.unscale_(optimizer, nnx_grads); scaler.step(optimizer, model, nnx_grads)
    ValueError: step() got the gradients that went into unscale_(); pass the ones it
    returned: grads = scaler.unscale_(optimizer, grads).
  nnx.jit(lambda s, o, m, g: s.step(o, m, g))(scaler, optimizer, model, nnx_grads)
    RuntimeError: GradScaler crossed a trace boundary, or was copied or saved, in the
    middle of an iteration. ...

jamp.GradScaler.update
  scaler.update()
    RuntimeError: No inf checks were recorded prior to update.
  scaler.update(float("nan"))
    ValueError: the scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got nan.
  scaler.update(1e300)
    ValueError: the scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got 1e+300.
  scaler.update("2")
    TypeError: the scale must be a number; got '2' of type str.
  scaler.update(True)
    TypeError: the scale must be a number; got True of type bool.
  scaler.update(jnp.ones(3))
    ValueError: the scale must be a number or one element; got shape (3,).
  nnx.jit(lambda s, new: s.update(new))(scaler, jnp.array(True))
    TypeError: the scale must be a number; got ... of type ....
  jax.jit(lambda g: scaler.unscale_(optimizer, g))(nnx_grads); scaler.update()
    RuntimeError: GradScaler crossed a trace boundary, or was copied or saved, in the
    middle of an iteration. ...

jamp.GradScaler.set_growth_factor
  scaler.set_growth_factor(0.5)
    ValueError: growth_factor must be finite and > 1; got 0.5.
  nnx.jit(lambda s, factor: s.set_growth_factor(factor))(scaler, 2.0)
    TypeError: growth_factor of a GradScaler is static; got a traced value. Set it
    outside the jitted function, to a Python number.

jamp.GradScaler.set_backoff_factor
  scaler.set_backoff_factor(1.0)
    ValueError: backoff_factor must be in (0, 1); got 1.0.

jamp.GradScaler.set_growth_interval
  scaler.set_growth_interval(0)
    ValueError: growth_interval must be >= 1 and < 2**31; got 0.
  scaler.set_growth_interval(1.5)
    TypeError: growth_interval must be an integer; got 1.5 of type float.

jamp.GradScaler.state_dict
  nnx.jit(lambda s: s.state_dict())(scaler)
    RuntimeError: state_dict() needs the values of the scale and was called inside a
    trace; call it outside the jitted function.
  scaler.unscale_(optimizer, nnx_grads); scaler.state_dict()
    RuntimeError: GradScaler crossed a trace boundary, or was copied or saved, in the
    middle of an iteration. ...

jamp.GradScaler.load_state_dict
  scaler.load_state_dict({})
    RuntimeError: The source state dict is empty, possibly because it was saved from a
    disabled instance of GradScaler.
  scaler.load_state_dict({"scale": 8.0})
    ValueError: state_dict lacks _growth_tracker, backoff_factor, growth_factor,
    growth_interval; it has scale. Pass what state_dict() returned.
  scaler.load_state_dict(scaler)
    TypeError: state_dict must be a mapping; got GradScaler.
    > `other.state_dict()`.
  scaler.load_state_dict({**scaler.state_dict(), "scale": -1.0})
    ValueError: the scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got -1.0.
  scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "growth_interval": 1.5})
    TypeError: growth_interval must be an integer; got 1.5 of type float.
  scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": -1})
    ValueError: _growth_tracker must be >= 0 and < 2**31; got -1.

jamp.dynamic_loss_scale
  jamp.dynamic_loss_scale(optax.adam)
    TypeError: inner must be an optax.GradientTransformation or an optax.MultiSteps; got
    <function adam...> of type function. Call it first, with its arguments.
    > `optax.adam(1e-3)`.
  jamp.dynamic_loss_scale(optax.MultiSteps)
    TypeError: inner must be an optax.GradientTransformation or an optax.MultiSteps; got
    <class 'optax.transforms._accumulation.MultiSteps'> of type type. Call it first,
    with its arguments.
    > An instance.
  jamp.dynamic_loss_scale(optimizer)
    TypeError: inner must be an optax.GradientTransformation or an optax.MultiSteps; got
    Optimizer( ... of type Optimizer.
    > NNX: `jamp.GradScaler`.
  jamp.dynamic_loss_scale([optax.clip(1.0), optax.sgd(0.1)])
    TypeError: inner must be an optax.GradientTransformation or an optax.MultiSteps; got
    [... of type list.
    > `optax.chain(...)`.
  jamp.dynamic_loss_scale(optax.sgd(0.1), optax.clip(1.0))
    TypeError: init_scale must be a number; got GradientTransformation(... of type
    GradientTransformation.
  jamp.dynamic_loss_scale(optax.sgd(0.1), backoff_factor=-1)
    ValueError: backoff_factor must be in (0, 1); got -1.0.
  jamp.dynamic_loss_scale(optax.sgd(0.1), growth_interval=1e3)
    TypeError: growth_interval must be an integer; got 1000.0 of type float.
    > `1000`.
  jamp.dynamic_loss_scale(optax.sgd(0.1), enabled="no")
    TypeError: enabled must be a bool; got 'no' of type str.
  jamp.dynamic_loss_scale(optax.sgd(0.1), min_scale=float("inf"))
    ValueError: min_scale must be in [0, 3.4e38]; got inf.
  jamp.dynamic_loss_scale(optax.sgd(0.1), hysteresis=True)
    TypeError: hysteresis must be an integer; got True of type bool.
  jamp.dynamic_loss_scale(optax.sgd(0.1), axis_name=["data", 0])
    TypeError: axis_name must be a name or a sequence of names; got ['data', 0].
  jax.jit(lambda s: jamp.dynamic_loss_scale(optax.sgd(0.1), s).init(params))(True)
    TypeError: init_scale must be a number; got ... of type ....
  jamp.dynamic_loss_scale(tx).init(params)
    ValueError: inner already holds a loss scale, at the root, and would divide the
    gradients twice; use one of the two.
  jamp.dynamic_loss_scale(optax.chain(optax.clip(1.0), tx)).init(params)
    ValueError: inner already holds a loss scale, at [1], and would divide the gradients
    twice; use one of the two.
    > Clip inside: `dynamic_loss_scale(optax.chain(...))`.
  tx.init({"w": loss_fn})
    TypeError: dynamic_loss_scale's init: the parameter at ['w'] must be an array or a
    number; got <function loss_fn...> of type function.
  tx.init(net)
    TypeError: dynamic_loss_scale's init: the parameter at the root must be an array or
    a number; got Net() of type Net.
    > `net.init(key, x)` makes its parameters.
  tx.update(None, opt_state, params)
    ValueError: dynamic_loss_scale's update: the gradients must be a pytree; got None.
  tx.update(grads, params, opt_state)
    ValueError: dynamic_loss_scale's update: the state must be a DynamicLossScaleState,
    as made by this transformation's init; got a dict.
    > The state comes second.
  tx.update(grads, optax.adam(0.1).init(params), params)
    ValueError: dynamic_loss_scale's update: the state must be a DynamicLossScaleState,
    as made by this transformation's init; got ScaleByAdamState, EmptyState.
  tx.update(grads, optax.chain(tx).init(params), params)
    ValueError: dynamic_loss_scale's update: the state must be a DynamicLossScaleState,
    as made by this transformation's init; got DynamicLossScaleState, EmptyState.
    > Call `update` of the chain.
  tx.update(grads, opt_state._replace(loss_scale=jnp.ones(3)), params)
    ValueError: dynamic_loss_scale's update: loss_scale of the state must be one number;
    got shape (3,). For stacked states use jax.vmap.
  adam_tx.update(grads, opt_state, params)
    ValueError: dynamic_loss_scale's update: the state is of another optimizer, or of
    other parameters: at [0].count it has nothing, init makes shape (). Pass the state
    that this transformation's init made.
    > The state of this optimizer's `init`.
  adam_tx.update(grads, adam_tx.init({"w": x, "b": x}), params)
    ValueError: dynamic_loss_scale's update: the state is of another optimizer, or of
    other parameters: at [0].mu['b'] it has shape (4, 2), init makes shape (3,). Pass
    the state that this transformation's init made.
  tx.update((1.0, grads), opt_state, params)
    ValueError: dynamic_loss_scale's update: the gradients have a leaf at [0] and the
    parameters have none there; pass the gradients of these parameters. Parameter paths:
    ['b'], ['w'].
    > `value_and_grad` returns the loss first.
  tx.update({"w": grads["w"]}, opt_state, params)
    ValueError: dynamic_loss_scale's update: the parameters have a leaf at ['b'] and the
    gradients have none there; pass the gradients of all parameters, or None for a
    frozen one, with optax.masked inside the wrapper, not around it. Gradient paths:
    ['w'].
  tx.update({**grads, "c": x}, opt_state, params)
    ValueError: dynamic_loss_scale's update: the gradients have a leaf at ['c'] and the
    parameters have none there; pass the gradients of these parameters. Parameter paths:
    ['b'], ['w'].
  tx.update({**grads, "w": grads["w"].T}, opt_state, params)
    ValueError: dynamic_loss_scale's update: at ['w'] the gradient has shape (3, 2) and
    the parameter has shape (2, 3); pass the gradients of these parameters.
  tx.update({**grads, "w": "text"}, opt_state, params)
    TypeError: dynamic_loss_scale's update: the gradient at ['w'] must be an array or a
    number; got 'text' of type str.
  tx.update({**grads, "w": 1j * grads["w"]}, opt_state, params)
    ValueError: dynamic_loss_scale's update: at ['w'] the gradient is complex64 and the
    parameter is float32; pass the gradients of these parameters.
  axis_tx.update(grads, opt_state, params)
    ValueError: axis_name 'data' is not a mapped axis here. It is for shard_map and
    pmap; under plain jit leave it out: a sharded gradient is one array there.
  off_tx.update(grads, (), params)
    ValueError: dynamic_loss_scale's update: the state must be a DynamicLossScaleState,
    as made by this transformation's init; got a tuple.
    > The state has the same type with `enabled=False`.

jamp.static_loss_scale
  jamp.static_loss_scale(optax.sgd(0.1))
    TypeError: static_loss_scale() missing 1 required positional argument: 'loss_scale'
  jamp.static_loss_scale(optax.sgd(0.1), 0)
    ValueError: loss_scale must be finite and > 0, in float32's normal range [2**-126,
    3.4e38]; got 0.0.
  jamp.static_loss_scale(optax.sgd(0.1), "dynamic")
    TypeError: loss_scale must be a number; got 'dynamic' of type str.
    > `jamp.dynamic_loss_scale`.
  jamp.static_loss_scale(8.0, optax.sgd(0.1))
    TypeError: loss_scale must be a number; got GradientTransformationExtraArgs(... of
    type GradientTransformationExtraArgs.
    > The optimizer comes first.
  jamp.static_loss_scale(tx, 8.0).init(params)
    ValueError: inner already holds a loss scale, at the root, and would divide the
    gradients twice; use one of the two.

jamp.step
  jamp.step(tx, grads, opt_state)
    TypeError: step() missing 1 required positional argument: 'params'
  jamp.step(tx, grads, opt_state, None)
    ValueError: params must be the parameters to step; got None.
  jamp.step(tx, grads, params, opt_state)
    ValueError: jamp.step: the state must be a DynamicLossScaleState, as made by this
    transformation's init; got a dict.
    > The state comes before the parameters.
  jamp.step(grads, tx, opt_state, params)
    TypeError: tx must be an optax.GradientTransformation or an optax.MultiSteps; got
    {'... of type dict.
    > The optimizer comes first.
  jamp.step(optax.adam, grads, opt_state, params)
    TypeError: tx must be an optax.GradientTransformation or an optax.MultiSteps; got
    <function adam...> of type function. Call it first, with its arguments.
    > The instance that made the state.
  jamp.step(scaler, grads, opt_state, params)
    TypeError: tx must be an optax.GradientTransformation or an optax.MultiSteps; got
    GradScaler(... of type GradScaler.
    > NNX: `scaler.step(optimizer, model, grads)`.
  jamp.step(optax.adam(0.1), grads, opt_state, params)
    ValueError: jamp.step: the state is of another optimizer, or of other parameters: at
    [0].count it has nothing, init makes shape (). Pass the state that this
    transformation's init made.
    > The wrapped optimizer.
  jamp.step(tx, (1.0, grads), opt_state, params)
    ValueError: jamp.step: the gradients have a leaf at [0] and the parameters have none
    there; pass the gradients of these parameters. Parameter paths: ['b'], ['w'].
    > `value_and_grad` returns the loss first.
  jamp.step(optax.sgd(0.1), {"w": x}, optax.sgd(0.1).init(params), params)
    ValueError: jamp.step: the parameters have a leaf at ['b'] and the gradients have
    none there; pass the gradients of all parameters, or None for a frozen one, with
    optax.masked inside the wrapper, not around it. Gradient paths: ['w'].
  jamp.step(m := optax.masked(tx, {"w": 1, "b": 0}), grads, m.init(params), params)
    ValueError: jamp.step: the update at ['b'] is the scaled gradient itself: a mask
    around the loss scale (optax.masked) hands on what it leaves out. Put the loss scale
    outside: jamp.dynamic_loss_scale(optax.masked(...)). To freeze a parameter, give it
    optax.set_to_zero(), as one of the optimizers of optax.multi_transform.
  jamp.step(f := optax.apply_if_finite(tx, 9), grads, f.init(params), params)
    ValueError: optax.apply_if_finite around a loss scale keeps from it the overflows
    that it must back off at. Leave it out: jamp.dynamic_loss_scale skips such steps
    itself.
  jamp.step(tx, nnx_grads, opt_state, model)
    ValueError: jamp.step: the gradients have a leaf at ['bias'].value and the
    parameters have none there; pass the gradients of these parameters. Parameter paths:
    .bias.value, .kernel.value.
    > NNX: `scaler.step(optimizer, model, grads)`.

jamp.loss_scale
  jamp.loss_scale(tx)
    ValueError: opt_state holds no loss scale; found _LossScaledTransformation. Wrap the
    optimizer in jamp.dynamic_loss_scale and pass the state from its init.
    > The state, not the transformation.
  jamp.loss_scale(optax.adam(0.1).init(params))
    ValueError: opt_state holds no loss scale; found ScaleByAdamState, EmptyState. Wrap
    the optimizer in jamp.dynamic_loss_scale and pass the state from its init.
  jamp.loss_scale((opt_state, opt_state))
    ValueError: opt_state holds 2 loss scales, at [0], [1]; gradients that are scaled by
    one must not be divided by the other...
  jamp.loss_scale(opt_state._replace(loss_scale=None))
    ValueError: loss_scale of the state must be float32; got None of type NoneType. Pass
    the state as init made it.

jamp.metrics
  jamp.metrics(scaler.state_dict())
    ValueError: opt_state holds no loss scale; found a dict. Wrap the optimizer in
    jamp.dynamic_loss_scale and pass the state from its init.
    > The scaler itself.
  jamp.metrics(opt_state, window=64)
    ValueError: window must be in [1, 32]; got 64.
  jamp.metrics(opt_state, window=16.0)
    TypeError: window must be an integer; got 16.0 of type float.
  jamp.metrics(opt_state, floor_steps=-1)
    ValueError: floor_steps must be >= 1; got -1.
  jamp.metrics(opt_state, skipped_share=50)
    ValueError: skipped_share must be in [0, 1); got 50.0.
    > A share: `0.5`.
  jax.jit(lambda n: jamp.metrics(opt_state, floor_steps=n))(8)
    TypeError: floor_steps must be a Python number; got a traced value.
    > Make it static: `static_argnums`.

jamp.scale_loss
  jamp.scale_loss(None, opt_state)
    TypeError: loss must be an array or a number; got None of type NoneType.
    > Return the loss from the loss function.
  jamp.scale_loss((1.0, {}), opt_state)
    TypeError: loss must be an array or a number; got (1.0, {}) of type tuple.
    > Scale the loss, not the pair with `aux`.
  jamp.scale_loss(loss_fn, opt_state)
    TypeError: loss must be an array or a number; got <function loss_fn...> of type
    function.
    > Call it: `loss_fn(params, x)`.
  jamp.scale_loss(opt_state, 1.0)
    ValueError: opt_state holds no loss scale; found a float. Wrap the optimizer in
    jamp.dynamic_loss_scale and pass the state from its init.
    > The loss comes first.
  jamp.scale_loss(1.0, 65536.0)
    ValueError: opt_state holds no loss scale; found a float. Wrap the optimizer in
    jamp.dynamic_loss_scale and pass the state from its init.
    > The state that holds the scale.

jamp.unscale
  jamp.unscale({"w": loss_fn}, opt_state)
    TypeError: jamp.unscale: the gradient at ['w'] must be an array or a number; got
    <function loss_fn...> of type function.
  jamp.unscale(grads, 65536.0)
    ValueError: opt_state holds no loss scale; found a float. Wrap the optimizer in
    jamp.dynamic_loss_scale and pass the state from its init.
    > The state that holds the scale.
  jamp.unscale(opt_state, grads)
    ValueError: opt_state holds no loss scale; found a dict. Wrap the optimizer in
    jamp.dynamic_loss_scale and pass the state from its init.
    > The gradients come first.

jamp.value_and_grad
  jamp.value_and_grad(loss_fn)
    TypeError: value_and_grad() missing 1 required positional argument: 'opt_state'
  jamp.value_and_grad(loss_fn, params)
    ValueError: opt_state holds no loss scale; found a dict. Wrap the optimizer in
    jamp.dynamic_loss_scale and pass the state from its init.
    > `params` go to the function that is returned.
  jamp.value_and_grad(opt_state, loss_fn)
    ValueError: opt_state holds no loss scale; found a function. Wrap the optimizer in
    jamp.dynamic_loss_scale and pass the state from its init.
    > The function comes first.
  jamp.value_and_grad(loss_fn(params, x), opt_state)
    TypeError: fun must be a function of the loss; got Array(4., dtype=float32) of type
    ArrayImpl.
    > The function, not what it returned.
  jamp.value_and_grad(lambda model: jnp.mean(model(x)), opt_state)(model)
    TypeError: jamp.value_and_grad got an nnx.Module, and jax.grad would lose what its
    forward pass changes; use nnx.value_and_grad of lambda model:
    jamp.scale_loss(loss_fn(model), opt_state).
  jamp.value_and_grad(lambda params: None, opt_state)(params)
    TypeError: fun must return a floating scalar loss; got None of type NoneType.
  jamp.value_and_grad(lambda params: 3, opt_state)(params)
    TypeError: fun must return a floating scalar loss; got 3 of type int.
  jamp.value_and_grad(lambda params: params["w"] > 0, opt_state)(params)
    TypeError: fun must return a floating scalar loss; got an array of dtype bool.
  jamp.value_and_grad(lambda params: params["w"], opt_state)(params)
    TypeError: Gradient only defined for scalar-output functions. Output had shape: (2,
    3)....
    > Take the mean.
  jamp.value_and_grad(lambda params: (1.0, 2.0), opt_state)(params)
    TypeError: fun must return a floating scalar loss; got (1.0, 2.0) of type tuple.
    > `has_aux=True`.
  jamp.value_and_grad(lambda params: 1.0, opt_state, has_aux=True)(params)
    TypeError: with has_aux=True, fun must return (loss, aux); got float.
  jamp.value_and_grad(loss_fn, opt_state)(as_type(jnp.int32, params), x)
    TypeError: grad requires real- or complex-valued inputs ..., but got int32....

jamp.DynamicLossScaleState
  jamp.DynamicLossScaleState(8.0)
    TypeError: DynamicLossScaleState.__new__() missing 7 required positional arguments:
    'growth_tracker', 'found_inf', 'skipped_steps', 'hysteresis_tracker',
    'recent_skips', 'floor_steps', and 'inner_state'
    > `tx.init(params)` makes it.

jamp.master_weights
  jamp.master_weights(optax.adam)
    TypeError: inner must be an optax.GradientTransformation or an optax.MultiSteps; got
    <function adam...> of type function. Call it first, with its arguments.
    > `optax.adam(1e-3)`.
  jamp.master_weights(jamp.master_weights(optax.sgd(0.1))).init(params)
    ValueError: master_weights: inner keeps master weights already; wrap it once.
  jamp.master_weights(optax.sgd(0.1)).init(net)
    TypeError: master_weights's init: the parameter at the root must be an array or a
    number; got Net() of type Net.
  master_tx.update(grads, master_tx.init(half))
    ValueError: master_weights's update: params must be the parameters to step; got
    None. Write tx.update(grads, opt_state, params).
  master_tx.update(grads, opt_state, half)
    ValueError: master_weights's update: the state must be a MasterWeightsState, as made
    by this transformation's init; got DynamicLossScaleState, EmptyState.
  master_tx.update({"w": grads["w"]}, master_tx.init(half), half)
    ValueError: master_weights's update: the parameters have a leaf at ['b'] and the
    gradients have none there; pass the gradients of all parameters, or None for a
    frozen one, with optax.masked inside the wrapper, not around it. Gradient paths:
    ['w'].
  master_tx.update(grads, master_tx.init(params), half)
    ValueError: master_weights's update: the state is of another optimizer, or of other
    parameters: at .master['b'] it has nothing, init makes shape (3,). Pass the state
    that this transformation's init made.
    > `init` of the parameters that are trained.
  master_tx.update(grads, master_tx.init({"w": half["w"]}), half)
    ValueError: master_weights's update: the state is of another optimizer, or of other
    parameters: at .master['b'] it has nothing, init makes shape (3,). Pass the state
    that this transformation's init made.

jamp.Policy
  jamp.Policy("float32", "float16")
    TypeError: Policy.__init__() missing 1 required positional argument: 'output_dtype'
  jamp.Policy("float32", "flaot16", "float32")
    ValueError: Policy(compute_dtype=...): Unknown dtype 'flaot16'; the nearest names
    are float16, bfloat16, float64, mixed_float16.
  jamp.Policy("float32", None, "float32")
    ValueError: Policy(compute_dtype=...): Unknown dtype None; the nearest names are
    bf16, bfloat16, f16, float16, full, f32, float32, f64, float64, half, mixed_float16,
    mixed_bfloat16.
  jamp.Policy("float32", jnp.int8, "float32")
    ValueError: Policy(compute_dtype=...): int8 is not a floating dtype; take one of
    bfloat16, float16, float32, float64. Integers and bools are never cast.
  jamp.Policy("float32", x, "float32")
    ValueError: Policy(compute_dtype=...): Unknown dtype Array(...); the nearest names
    are bf16, bfloat16, f16, float16, full, f32, float32, f64, float64, half,
    mixed_float16, mixed_bfloat16.
    > `x.dtype`, if that is meant.
  jamp.Policy("float32", "float16", "mixed_float16")
    ValueError: Policy(output_dtype=...): 'mixed_float16' is a policy and no dtype;
    write get_policy('mixed_float16').
  jamp.get_policy("half").param_dtype = "float32"
    FrozenInstanceError: cannot assign to field 'param_dtype'
    > Make another one; it is frozen.

jamp.Policy.with_output_dtype
  jamp.get_policy("half").with_output_dtype("int8")
    ValueError: Policy(output_dtype=...): int8 is not a floating dtype; take one of
    bfloat16, float16, float32, float64. Integers and bools are never cast.

jamp.Policy.wrap
  jamp.get_policy("half").wrap(net)
    TypeError: policy.wrap: Net is not a function of arrays; for Flax there are
    jamp.linen.with_policy and jamp.nnx.with_policy.
  jamp.get_policy("half").wrap(nn.Dense)
    TypeError: policy.wrap: Dense is not a function of arrays; for Flax there are
    jamp.linen.with_policy and jamp.nnx.with_policy.
  jamp.get_policy("half").wrap(loss_fn(params, x))
    TypeError: policy.wrap: ArrayImpl is not a function of arrays; for Flax there are
    jamp.linen.with_policy and jamp.nnx.with_policy.
    > The function, not what it returned.
  jamp.get_policy("half").wrap(loss_fn, float32_for="norms")
    TypeError: float32_for must be a tuple of names, such as ('norms', 'softmax',
    'losses'); got 'norms'.
    > `("norms",)`.
  jamp.get_policy("half").wrap(loss_fn, float32_for=("norm",))
    ValueError: float32_for: unknown name 'norm', did you mean 'norms'? There are
    'norms', 'softmax', 'losses'.
  jamp.get_policy("half").wrap(loss_fn, float32_for=None)
    TypeError: float32_for must be a tuple of names, such as ('norms', 'softmax',
    'losses'); got None.
    > `()` for nothing.

jamp.get_policy
  jamp.get_policy(jnp.float16)
    TypeError: get_policy takes a string; got <class 'jax.numpy.float16'>.
    > `"float16"`, or `jamp.Policy(...)`.
  jamp.get_policy("O2")
    ValueError: get_policy('O2'): Policy: Unknown dtype 'O2'; the nearest names are f32.
    Write "params=float32,compute=float16,output=float32", shorter "c=float16,o=full",
    one dtype for all three ("half"), or "mixed_float16".
    > apex's O2 is `"params=half,compute=half"`.
  jamp.get_policy("param=float32")
    ValueError: get_policy('param=float32'): Unknown key 'param'; there are 'params',
    'compute', 'output'....
  jamp.get_policy("c=f16,c=f32")
    ValueError: get_policy('c=f16,c=f32'): Second value for key 'c'; there are 'params',
    'compute', 'output'....
  jamp.get_policy("c=int8")
    ValueError: get_policy('c=int8'): c: int8 is not a floating dtype; take one of
    bfloat16, float16, float32, float64. Integers and bools are never cast....

jamp.half_dtype
  jamp.half_dtype("cuda")
    TypeError: half_dtype() takes 0 positional arguments but 1 was given
    > It is that of the default device.

jamp.cast_to_half
  jamp.cast_to_half(params, jnp.float16)
    TypeError: cast_to_half() takes 1 positional argument but 2 were given
    > `jamp.Policy(...).cast_to_param`.

jamp.cast_to_full
  jamp.cast_to_full(params, jnp.float32)
    TypeError: cast_to_full() takes 1 positional argument but 2 were given

jamp.linen.with_policy
  jamp.linen.with_policy(model, "half")
    TypeError: jamp.linen.with_policy: what is given must be a module; got Linear( ...
    of type Linear. For Flax Linen there is jamp.linen.with_policy, for NNX
    jamp.nnx.with_policy, for functions policy.wrap.
    > NNX: `jamp.nnx.with_policy`.
  jamp.linen.with_policy(nn.Dense, "half")
    TypeError: jamp.linen.with_policy: what is given must be a module; got <class
    'flax.linen.linear.Dense'> of type type....
    > An instance: `nn.Dense(3)`.
  jamp.linen.with_policy("half", net)
    TypeError: jamp.linen.with_policy: what is given must be a module; got 'half' of
    type str....
    > The module comes first.
  jamp.linen.with_policy(net, jnp.float16)
    TypeError: jamp.linen.with_policy: policy must be a jamp.Policy or a string for
    jamp.get_policy; got <class 'jax.numpy.float16'>.
    > `"float16"`.
  jamp.linen.with_policy(net, "hlaf")
    ValueError: get_policy('hlaf'): Policy: Unknown dtype 'hlaf'; the nearest names are
    half....
  jamp.linen.with_policy(jamp.linen.with_policy(net, "half"), "full")
    ValueError: jamp.linen.with_policy: the module has a policy already; pass the plain
    module, and all overrides at once.
  jamp.linen.with_policy(net, "half", {"head": jnp.float32})
    TypeError: jamp.linen.with_policy: overrides['head']: <class 'jax.numpy.float32'> is
    no policy. A key is a regular expression that is searched for in the module's path
    ("encoder/.*", "^lm_head$") or a module class (nn.LayerNorm); a value is a policy or
    its string.
    > `"float32"`.
  jamp.linen.with_policy(net, "half", {"(": "full"})
    ValueError: jamp.linen.with_policy: overrides['(']: not a regular expression:
    missing ), unterminated subpattern at position 0....
  jamp.linen.with_policy(net, "half", {3: "full"})
    TypeError: jamp.linen.with_policy: overrides[3]: neither a string nor a class....
  jamp.linen.with_policy(net, "half", {"haed": "full"}).init(jax.random.key(0), x)
    ValueError: jamp.linen.with_policy: overrides match no module: 'haed'. Module paths
    nearest to them: 'head'.
  jamp.linen.with_policy(net, "half", float32_for=3)
    TypeError: float32_for must be a tuple of names, such as ('norms', 'softmax',
    'losses'); got 3.

jamp.linen.TrainState.create
  jamp.linen.TrainState.create(apply_fn=None, params=params, tx=optax.adam)
    TypeError: tx must be an optax.GradientTransformation or an optax.MultiSteps; got
    <function adam...> of type function. Call it first, with its arguments.
    > `optax.adam(1e-3)`.
  jamp.linen.TrainState.create(apply_fn=None, params="params", tx=tx)
    TypeError: dynamic_loss_scale's init: the parameter at the root must be an array or
    a number; got 'params' of type str.

jamp.linen.TrainState.apply_gradients
  state.apply_gradients(grads)
    TypeError: TrainState.apply_gradients() takes 1 positional argument but 2 were given
    > By name: `grads=grads`.
  state.apply_gradients(grads=None)
    ValueError: jamp.step: the gradients must be a pytree; got None.
  state.apply_gradients(grads=(1.0, grads))
    ValueError: jamp.step: the gradients have a leaf at [0] and the parameters have none
    there; pass the gradients of these parameters. Parameter paths: ['b'], ['w'].
    > `value_and_grad` returns the loss first.
  state.apply_gradients(grads={"params": grads})
    ValueError: jamp.step: the gradients have a leaf at ['params']['b'] and the
    parameters have none there; pass the gradients of these parameters. Parameter paths:
    ['b'], ['w'].
    > `grads["params"]`, if that is a tree of parameters.
  state.replace(opt_state=()).apply_gradients(grads=grads)
    ValueError: jamp.step: the state must be a DynamicLossScaleState, as made by this
    transformation's init; got a tuple.

jamp.nnx.with_policy
  jamp.nnx.with_policy(net, "half")
    TypeError: jamp.nnx.with_policy: what is given must be a module; got Net() of type
    Net....
    > Linen: `jamp.linen.with_policy`.
  jamp.nnx.with_policy(nnx.state(model), "half")
    TypeError: jamp.nnx.with_policy: what is given must be a module; got State({... of
    type State....
  jamp.nnx.with_policy(jamp.nnx.with_policy(model, "half"), "full")
    ValueError: jamp.nnx.with_policy: the module has a policy already; pass the plain
    module, and all overrides at once.
  jamp.nnx.with_policy(nnx.Sequential(model), "half", {"layer/0": "full"})
    ValueError: jamp.nnx.with_policy: overrides match no module: 'layer/0'....
  jamp.nnx.with_policy(model, "half", {nnx.LayerNorm: "full"})
    ValueError: jamp.nnx.with_policy: overrides match no module: "<class
    'flax.nnx.nn.normalization.LayerNorm'>"....
  jamp.nnx.with_policy(model, "half", float32_for=("softmx",))
    ValueError: float32_for: unknown name 'softmx', did you mean 'softmax'? There are
    'norms', 'softmax', 'losses'.

jamp.debug.explain
  jamp.debug.explain(loss_fn(params, x))(params, x)
    TypeError: explain(fn)(*args): fn must be a function; got Array(4., dtype=float32)
    of type ArrayImpl. Pass the function, and its arguments to the result.
  jamp.debug.explain(loss_fn, params)
    ValueError: autocast(dtype={...: the dtype must be float16 or bfloat16. ...
    > `jamp.debug.explain(loss_fn)(params, x)`.
  jamp.debug.explain(loss_fn, jnp.float32)
    ValueError: autocast(dtype='float32'): the dtype must be float16 or bfloat16. ...
    > Leave it out to explain the function as it is.
  jamp.debug.explain(loss_fn, rules={"head": None})
    ValueError: explain(rules=...): give dtype too; rules are of its region.
  jamp.debug.explain(loss_fn, jnp.float16, rules={"head": None})(params, x)
    ValueError: autocast(rules=...): no op matched 'head'. A module path is searched for
    in the name stack, which Flax Linen, Haiku and jax.named_scope write; a function
    matches while it runs in the region.

jamp.debug.Explanation
  bool(jamp.debug.explain(loss_fn)(params, x))
    TypeError: a report is neither true nor false; ask for report.found.
    > `.found` is empty if there is nothing to see.

jamp.debug.find_nonfinite
  jamp.debug.find_nonfinite(loss_fn(params, x))(params, x)
    TypeError: find_nonfinite(fn)(*args): fn must be a function; got Array(4.,
    dtype=float32) of type ArrayImpl. Pass the function, and its arguments to the
    result.
  jamp.debug.find_nonfinite(loss_fn, params, x)
    TypeError: find_nonfinite() takes 1 positional argument but 3 were given
    > `jamp.debug.find_nonfinite(loss_fn)(params, x)`.
  jamp.debug.find_nonfinite(loss_fn, when=jnp.ones(3, bool))(params, x)
    TypeError: when must be a bool or a bool array of shape []; got Array([ True, True,
    True], dtype=bool). jamp.metrics(opt_state)["found_inf"] and what scaler.step
    returns are.
  jamp.debug.find_nonfinite(loss_fn)(params, jax.eval_shape(lambda: x))
    TypeError: find_nonfinite runs the function: 'x' must be an array; got
    ShapeDtypeStruct(shape=(4, 2), dtype=float32).
    > `jamp.debug.explain` needs no values.

jamp.debug.NonfiniteReport
  jax.jit(lambda x: jamp.debug.find_nonfinite(loss_fn)(params, x).found)(x)
    TypeError: this NonfiniteReport is inside a trace, where it has no numbers; return
    it from the jitted function and read it outside.
  bool(jamp.debug.find_nonfinite(loss_fn)(params, x))
    TypeError: a report is neither true nor false; ask for report.found.

jamp.debug.overflow_report
  jamp.debug.overflow_report({"w": loss_fn})
    TypeError: overflow_report: grads must be a pytree of arrays; got <function
    loss_fn...> of type function at w.
  jamp.debug.overflow_report(jax.eval_shape(lambda: grads))
    TypeError: overflow_report: grads must be a pytree of arrays; got
    ShapeDtypeStruct(shape=(3,), dtype=float32) of type ShapeDtypeStruct at b.
    > Gradients with values.
  jamp.debug.overflow_report(grads, when=opt_state)
    TypeError: when must be a bool or a bool array of shape []; got
    DynamicLossScaleState(.... jamp.metrics(opt_state)["found_inf"] and what scaler.step
    returns are.

jamp.debug.OverflowReport
  jax.jit(lambda g: jamp.debug.overflow_report(g).found)(grads)
    TypeError: this OverflowReport is inside a trace, where it has no numbers; return it
    from the jitted function and read it outside.
  jamp.debug.overflow_report(grads)["w"]
    TypeError: this OverflowReport is of one step and cannot be indexed; to_dict() has
    its parts.
  jax.vmap(jamp.debug.overflow_report)({"w": x}).found
    ValueError: this OverflowReport is stacked, of 4 steps; index it first: report[i].
  jax.vmap(jamp.debug.overflow_report)({"w": x})[9]
    IndexError: report[9] of a report of 4 steps.
  jax.vmap(jamp.debug.overflow_report)({"w": x})["w"]
    TypeError: report[i] takes the number of a step; got 'w'.

jamp.debug.underflow_report
  jamp.debug.underflow_report(grads)
    TypeError: underflow_report() missing 1 required positional argument: 'scale'
  jamp.debug.underflow_report(grads, float("nan"))
    ValueError: underflow_report: scale must be finite and > 0, in float32's normal
    range [2**-126, 3.4e38]; got nan.
  jamp.debug.underflow_report(grads, 1e300)
    ValueError: underflow_report: scale must be finite and > 0, in float32's normal
    range [2**-126, 3.4e38]; got 1e+300.
  jamp.debug.underflow_report(grads, jnp.ones(3))
    ValueError: underflow_report: scale must be one number; got shape (3,).
  jamp.debug.underflow_report(grads, opt_state)
    TypeError: underflow_report: scale must be a number; got DynamicLossScaleState(...
    of type DynamicLossScaleState. jamp.loss_scale(opt_state) and scaler.get_scale()
    give it.
  jamp.debug.underflow_report(8.0, grads)
    TypeError: underflow_report: scale must be a number; got {'... of type dict.
    jamp.loss_scale(opt_state) and scaler.get_scale() give it.
    > The gradients come first.
  jax.jit(lambda scale: jamp.debug.underflow_report(grads, scale))(1j)
    TypeError: underflow_report: scale must be a number; got ... of type ....
    jamp.loss_scale(opt_state) and scaler.get_scale() give it.

jamp.debug.UnderflowReport
  jax.jit(lambda g: jamp.debug.underflow_report(g, 8.0).to_dict())(grads)
    TypeError: this UnderflowReport is inside a trace, where it has no numbers; return
    it from the jitted function and read it outside.

jamp.debug.grad_histogram
  jamp.debug.grad_histogram(grads, -8.0)
    ValueError: grad_histogram: scale must be finite and > 0, in float32's normal range
    [2**-126, 3.4e38]; got -8.0.
  jamp.debug.grad_histogram(grads, "8")
    TypeError: grad_histogram: scale must be a number; got '8' of type str.
    jamp.loss_scale(opt_state) and scaler.get_scale() give it.

jamp.debug.GradHistogram
  jax.jit(lambda g: jamp.debug.grad_histogram(g).to_dict())(grads)
    TypeError: this GradHistogram is inside a trace, where it has no numbers; return it
    from the jitted function and read it outside.
  jax.vmap(jamp.debug.grad_histogram)({"w": x}).to_dict()
    ValueError: this GradHistogram is stacked: counts (4, 256); take one step of it:
    jax.tree.map(lambda x: x[i], histogram).

jamp.debug.GradHistogram.plot
  jamp.debug.grad_histogram(grads).plot("file.png")
    TypeError: GradHistogram.plot: ax must be matplotlib Axes or None; got 'file.png' of
    type str. To write a file: ax.figure.savefig(path) of what is returned.

jamp.debug.plot_scale
  jamp.debug.plot_scale({"loss": [1.0]})
    ValueError: plot_scale: history needs "loss_scale" and "found_inf", as jamp.metrics
    has them; it has loss.
  jamp.debug.plot_scale(jamp.metrics(opt_state))
    ValueError: plot_scale: "loss_scale" and "found_inf" must be sequences of one
    length, with a value for each step; got shapes () and ().
    > The metrics of all steps: a `History`.
  jamp.debug.plot_scale({"loss_scale": [8.0], "found_inf": [True, False]})
    ValueError: plot_scale: "loss_scale" and "found_inf" must be sequences of one
    length, with a value for each step; got shapes (1,) and (2,).
  jamp.debug.plot_scale({"loss_scale": [8.0], "found_inf": [True]}, "scale.png")
    TypeError: plot_scale: ax must be matplotlib Axes or None; got 'scale.png' of type
    str. To write a file: ax.figure.savefig(path) of what is returned.

jamp.debug.History
  jamp.debug.History(1.5)
    TypeError: every must be an integer; got 1.5 of type float.
  jamp.debug.History(np.array([3]))
    TypeError: every must be an integer; got array([3]) of type ndarray.
  jax.jit(lambda n: jamp.debug.History(n))(3)
    TypeError: every must be an integer; got ... of type ....
  jamp.debug.History(on_row="print")
    TypeError: on_row must be a function of (step, row); got 'print' of type str.

jamp.debug.History.append
  history.append(3.0)
    TypeError: append needs a dict of name -> value; got 3.0 of type float.
  history.append(opt_state)
    TypeError: append needs a dict of name -> value; got DynamicLossScaleState(... of
    type DynamicLossScaleState.
    > `jamp.metrics(opt_state)`.
  history.append({"loss": None})
    TypeError: append: 'loss' must be a number or an array; got None of type NoneType.
  history.append({"loss": x})
    ValueError: append: 'loss' must have shape []; got (4, 2). Log its mean, say;
    several steps at once go to extend.
  history.append({"step": 2**70})
    ValueError: append: 'step' is an integer of more than 64 bits.
  history.append({"loss": 1.0}); history.append({"lost": 1.0})
    ValueError: append: every step needs the names of the first; missing: ['loss'], new:
    ['lost']. Use float('nan') where there is no value, or a second History.
  jax.jit(lambda loss: history.append({"loss": loss}))(1.0)
    TypeError: append: 'loss' is traced. History collects outside of jit: return the
    metrics from the jitted step, and append what it returns.
  history["loss"]
    KeyError: "History has no 'loss'; it has nothing, before the first append."

jamp.debug.History.extend
  history.extend({"loss": 1.0})
    ValueError: extend: 'loss' must have shape [steps]; got (). The scalars of one step
    go to append.
  history.extend({"loss": ["a"]})
    TypeError: History collects numbers and bools; got dtype <U1.
  history.extend({"loss": [1.0, 2.0], "accuracy": [1.0]})
    ValueError: extend: all values need one shape, [steps]; got {'loss': (2,),
    'accuracy': (1,)}.

jamp.debug.check
  jamp.debug.check({"loss_scale": 8.0})
    ValueError: check: the metrics lack scale_at_floor, scale_below_one, many_skips;
    pass what jamp.metrics(opt_state) returned, an optimizer state or a GradScaler.
    > `jamp.metrics(opt_state)`.
  jamp.debug.check(opt_state, window=0)
    ValueError: window must be in [1, 32]; got 0.
  jamp.debug.check((opt_state, opt_state))
    ValueError: opt_state holds 2 loss scales, at [0], [1]; gradients that are scaled by
    one must not be divided by the other...
  jax.jit(jamp.debug.check)(opt_state)
    TypeError: jamp.debug.check raises on values, and was called inside a trace; return
    jamp.metrics(opt_state) from the jitted function and check that.
  history.append({"loss": 1.0}); jamp.debug.check(history)
    ValueError: check: the history has neither found_inf nor scale_at_floor,
    scale_below_one, many_skips; append what jamp.metrics(opt_state) returned.

jamp.sharding.gather
  jamp.sharding.gather(params, "data")
    ValueError: axis_name 'data' is not a mapped axis here; call gather inside
    jax.shard_map over a mesh with that axis, in the loss function.
    > Call it inside `shard_map`; under plain jit there is nothing to gather.
  jamp.sharding.gather(params, None)
    TypeError: axis_name must name a mapped axis; got None.
  jamp.sharding.gather(params, "data", reduce_dtype="int8")
    TypeError: reduce_dtype must be a floating dtype or None; got 'int8' of type str.
  jamp.sharding.gather(params, "data", "data")
    TypeError: specs must be PartitionSpecs or None; got 'data'.
    > `PartitionSpec("data")`.

"""


def read(table: str) -> list[Case]:
    """Indented by 0: a public name, by 2: a call, by 4: what it raises, and advice."""
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
        elif not cases[-1].error:
            error, _, message = text.partition(": ")
            cases[-1] = cases[-1]._replace(error=error, message=message)
        else:
            cases[-1] = cases[-1]._replace(message=f"{cases[-1].message} {text}")
    return cases


CASES = read(TABLE)


def matches(message: str, text: str) -> bool:
    """Whether a text is what a message of the table says."""
    start, *parts = message.split("...")
    text = " ".join(text.split())
    if not (parts and text.startswith(start)):
        return text == message
    text = text.removeprefix(start)
    for part in parts[:-1]:
        before, found, after = text.partition(part)
        text = after if found else before
        if part and not found:
            return False
    return text.endswith(parts[-1])


def page() -> str:
    """The table as a page of the documentation."""
    lines = [INTRO, "```python", SETUP.rstrip(), "```"]
    for name, cases in itertools.groupby(CASES, lambda case: case.name):
        lines += [
            "",
            f"## {name}",
            "",
            "| call | raises | what to do |",
            "|---|---|---|",
        ]
        for case in cases:
            raised = f"{case.error}: {code(case.message)}"
            lines.append(f"| {code(case.call)} | {raised} | {case.advice} |")
    return "\n".join([*lines, ""])


def code(text: str) -> str:
    """Text as code in a cell of a Markdown table."""
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.bad_input --write")
    PAGE.write_text(page())

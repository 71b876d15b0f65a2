"""`GradScaler`: torch's object, for Flax NNX, over `arithmetic` and `rule`.

The scale and its trackers are `nnx.Variable`s, so that the scaler passes through
`nnx.jit` and into checkpoints like a model. The factors and the interval are static:
changing one retraces a jitted step that takes the scaler.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from .._checks import (
    axis_names,
    check_count,
    flag,
    is_traced,
    shown,
    without_device,
)
from .._tree import Flag, PyTree, T
from . import arithmetic, rule, skip
from .nnx_grads import (
    CONTEXT,
    Update,
    check_selected,
    select_gradients,
    with_selected,
)
from .optimizer_stages import Iteration, Record, references
from .rule import LossScaleConfig, LossScaleState
from .state import scalars_of
from .state_types import grown
from .traced import check_read
from .transformation import without_closures
from .watched import watch

NO_DEVICE = (
    "GradScaler takes no device, as torch.amp.GradScaler does first: leave it out. It "
    "works wherever JAX runs."
)

NO_STEP = (
    "No inf checks were recorded prior to update. Call scaler.step(optimizer, model, "
    "grads) first. It replaces optimizer.update(model, grads), which would apply "
    "gradients that are still scaled."
)


class GradScaler(nnx.Pytree):
    """Dynamic loss scaling as in `torch.amp.GradScaler`, for Flax NNX.

    It works eagerly and under `nnx.jit`. Several models and optimizers may share one
    scaler: each is skipped on its own, and `update` backs off if any of them
    overflowed.

    Args:
      init_scale: first scale, in float32's normal range.
      growth_factor: above 1; the scale is multiplied by it to grow.
      backoff_factor: in (0, 1); the scale is multiplied by it after an overflow.
      growth_interval: finite steps in a row before the scale grows, >= 1.
      enabled: if False, `scale` and `unscale_` are the identity, `step` always steps,
        `get_scale` is 1.0 and `state_dict` is empty. The scale that it holds does
        not change, so an enabled scaler that takes its `nnx.state` continues from it.
      min_scale: floor of the scale. These four are as in `jamp.dynamic_loss_scale`.
      max_scale: ceiling of the scale.
      hysteresis: how many overflows since the last growth it takes to back off.
      axis_name: mapped axis or axes over which an overflow counts for all replicas.

    Raises:
      ValueError: a value is out of its range. The message names it.
      TypeError: a value is not a number. Leave out torch's first argument, the device:
        it has no counterpart here.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> scaler = jamp.GradScaler()
      >>> @nnx.jit
      ... def train_step(model, optimizer, scaler, x):
      ...     loss_fn = lambda model: scaler.scale(jnp.mean(model(x) ** 2))
      ...     grads = nnx.grad(loss_fn)(model)
      ...     skipped = scaler.step(optimizer, model, grads)
      ...     scaler.update()
      ...     return skipped
      >>> print(train_step(model, optimizer, scaler, jnp.ones((4, 2))))
      False
      >>> print(train_step(model, optimizer, scaler, jnp.full((4, 2), jnp.inf)))
      True
      >>> scaler.get_scale()
      32768.0

    PyTorch: `torch.amp.GradScaler`. `unscale_` returns the gradients instead of
    writing into them. `step` takes the model and the gradients, and returns whether it
    was skipped.
    """

    loss_scale: nnx.Variable[jax.Array]
    growth_tracker: nnx.Variable[jax.Array]
    hysteresis_tracker: nnx.Variable[jax.Array]

    @without_device("init_scale", NO_DEVICE)
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        max_scale: float = float("inf"),
        hysteresis: int = 1,
        axis_name: str | Sequence[str] | None = None,
    ):
        if isinstance(init_scale, str):
            raise TypeError(
                f"init_scale must be a number; got {init_scale!r}. {NO_DEVICE}"
            )
        self._config = LossScaleConfig(init_scale=init_scale)
        self._configure(
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
        )
        self._enabled = flag("enabled", enabled)
        self._iteration = nnx.data(Iteration())
        for name, value in rule.init(self._config)._asdict().items():
            setattr(self, name, nnx.Variable(value))
        self._axis_name = axis_names(axis_name)

    def scale(self, outputs: PyTree) -> PyTree:
        """Multiplies an array, or every array of a nest, by the scale.

        A scalar is promoted to float32 at least, and an array with dimensions keeps its
        dtype. The product is formed in float32.

        Args:
          outputs: array or pytree of arrays, usually the loss.

        Raises:
          ValueError: `outputs` is neither.
        """
        if not self._enabled:
            return outputs
        loss_scale = self.loss_scale[...]
        self._iteration.note_scaling()

        def scale_leaf(leaf: ArrayLike) -> jax.Array:
            if not arithmetic.is_scalable(leaf):
                raise ValueError(
                    f"outputs must be an array or a nest of arrays; got {shown(leaf)}."
                )
            return arithmetic.scale(leaf, loss_scale)

        return jax.tree.map(scale_leaf, outputs, is_leaf=lambda leaf: leaf is None)

    def unscale_(self, optimizer: nnx.Optimizer[Any], grads: PyTree) -> PyTree:
        """Checks the gradients of one optimizer and divides them by the scale.

        It is optional, for clipping and logging between the backward pass and `step`.
        torch writes into the gradients. This returns new ones, so use those:

            grads = scaler.unscale_(optimizer, grads)   # right
            scaler.unscale_(optimizer, grads)           # wrong: grads are still scaled

        `step` raises an error if it gets the arrays that went in here, and warns about
        other arrays if a loss was scaled in between. It cannot recognize arrays that
        were made from them. If an exception ends an iteration early, call `update`.

        Args:
          optimizer: the optimizer that will step with these gradients.
          grads: scaled gradients from `nnx.grad`.

        Returns:
          The unscaled gradients; dtypes are kept.

        Raises:
          RuntimeError: it was called twice for this optimizer, or after `step`.
          ValueError: a gradient is float16 (the message names its path), or the
            optimizer holds a `jamp.dynamic_loss_scale` and would unscale again.
          TypeError: `optimizer` is not an `nnx.Optimizer`.
        """
        if not self._enabled:
            return grads
        record = self._iteration.record_of(optimizer)
        if record is not None and record.has_stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if record is not None:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last "
                "update()."
            )
        selected = select_gradients(optimizer, grads)
        finite = self._all_finite(selected)
        inverse = arithmetic.invert(self.loss_scale[...])
        watch(selected, self.loss_scale[...])
        new = arithmetic.unscale_as_before(selected, inverse)
        unscaled = with_selected(grads, new)
        record = Record(optimizer, finite)
        record.scaled, record.unscaled = references(selected), references(unscaled)
        self._iteration.add(record)
        return unscaled

    def step(
        self, optimizer: nnx.Optimizer[T], model: T, grads: PyTree, **kwargs: Any
    ) -> jax.Array:
        """`optimizer.update(model, grads)`, unless a gradient is inf or nan.

        It unscales first if `unscale_` was not called. A skip changes neither the model
        nor the optimizer, including its step count. A gradient that the optimizer does
        not read (`optax.set_to_zero`) is not checked, unless `unscale_` was called.

        Args:
          optimizer: the optimizer to step.
          model: the model it updates.
          grads: scaled gradients or, after `unscale_`, its result.
          **kwargs: passed on to `optimizer.update`. It may ignore a function to
            differentiate (`value_fn`) and a gradient (`grad`), and not use them.

        Returns:
          Whether the step was skipped: bool [].

        Raises:
          RuntimeError: it was called twice since the last `update`, or with a closure.
          ValueError: the gradients do not match the model's parameters, are float16,
            or are still those that went into `unscale_`.
        """
        if not self._enabled:
            optimizer.update(model, grads, **kwargs)
            return jnp.zeros([], jnp.bool_)
        if "closure" in kwargs:
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled."
            )
        record = self._iteration.record_of(optimizer)
        if record is not None and record.has_stepped:
            raise RuntimeError(
                "step() has already been called since the last update()."
            )
        selected = select_gradients(optimizer, grads)
        iteration = self._iteration
        # The model may hold the scaler.
        with iteration.set_aside(), nnx.update_context(CONTEXT):
            check_selected(optimizer, model, grads, selected)
            kwargs = without_closures(kwargs, "GradScaler.step")
            update = Update(optimizer, model, grads, kwargs)
            if record is None:
                watch(selected, self.loss_scale[...])
                inverse = arithmetic.invert(self.loss_scale[...])
                finite, run, shapes = check_read(
                    lambda scaled: update.run(
                        arithmetic.unscale_as_before(scaled, inverse)
                    ),
                    selected,
                    self._all_finite,
                )
            else:
                record.check_unscaled(selected)
                found = record.finite
                finite, run, shapes = check_read(update.run, selected, lambda _: found)
            held = grown(update.old, shapes)
            given = skip.harmless(finite, selected)
            new = skip.run_or_hold(finite, lambda: run(given), lambda _: held)
            update.write(new)
            self._iteration = iteration  # NNX puts a new one into a scaler it updates
        iteration.add(Record(optimizer, finite, has_stepped=True))
        return jnp.logical_not(finite)

    def _all_finite(self, grads: PyTree) -> Flag:
        finite = arithmetic.all_finite(grads, self._axis_name)
        is_scale = rule.usable(self.loss_scale[...], "GradScaler.step")
        return jnp.logical_and(finite, is_scale)

    def update(self, new_scale: ArrayLike | None = None) -> None:
        """Moves the scale, once every optimizer of the iteration has stepped.

        Args:
          new_scale: a number or float32 []. It becomes the scale, and the tracker does
            not change.

        Raises:
          RuntimeError: no optimizer was unscaled or stepped, and there is no
            `new_scale`.
          ValueError: `new_scale` is out of float32's normal range or not a scalar.
        """
        if not self._enabled:
            return
        self._iteration.check_trace()
        if new_scale is not None:
            scale = rule.as_scale("new_scale", new_scale)
            self.loss_scale[...] = jnp.full_like(self.loss_scale[...], scale)
        else:
            flags = [record.finite for record in self._iteration.records.values()]
            if not flags:
                raise RuntimeError(NO_STEP)
            found_inf = jnp.logical_not(functools.reduce(jnp.logical_and, flags))
            state = rule.advance(scalars_of(self), found_inf, self._config)
            self._set_scalars(state)
        self._iteration.records.clear()

    def __repr__(self) -> str:
        values = {"scale": self.get_scale(), "tracker": self.growth_tracker[...]}
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"GradScaler({shown}, enabled={self._enabled}, {self._config})"

    def __str__(self) -> str:
        return repr(self)

    def get_scale(self) -> float | jax.Array:
        """The scale: a Python float outside a trace, the traced array inside, 1.0 if
        disabled. An array if the scaler is stacked, as `nnx.vmap` makes it."""
        if not self._enabled:
            return 1.0
        loss_scale = self.loss_scale[...]
        is_array = is_traced(loss_scale) or loss_scale.ndim
        return loss_scale if is_array else loss_scale.item()

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self._config.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor to `new_factor`; ValueError unless it is > 1."""
        self._configure(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The factor that the scale is multiplied by after an overflow."""
        return self._config.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the backoff factor to `new_factor`; ValueError unless in (0, 1)."""
        self._configure(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """How many finite steps in a row make the scale grow."""
        return self._config.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval to `new_interval`; ValueError unless >= 1.

        The scale grows when the tracker *equals* the interval, as in torch. With an
        interval below the current tracker, it does not grow until an overflow resets
        the tracker.
        """
        self._configure(growth_interval=new_interval)

    def is_enabled(self) -> bool:
        """Whether scaling is enabled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state as Python scalars, with torch's five keys; `{}` if disabled.

        `torch.amp.GradScaler.load_state_dict` accepts it. With `hysteresis` above 1 it
        has a sixth key, `_hysteresis_tracker`, which torch ignores: overflows left
        before the scale backs off.

        Raises:
          RuntimeError: it was called inside a trace, or in the middle of an iteration.
          ValueError: the scaler is stacked, as `nnx.vmap` makes it.
        """
        if not self._enabled:
            return {}
        self._iteration.check_whole()
        state = scalars_of(self)
        if is_traced(state.loss_scale):
            raise RuntimeError(
                "state_dict() needs the values of the scale and was called inside a "
                "trace; call it outside the jitted function."
            )
        self._check_one("state_dict")
        result = {
            "scale": state.loss_scale.item(),
            "growth_factor": self._config.growth_factor,
            "backoff_factor": self._config.backoff_factor,
            "growth_interval": self._config.growth_interval,
            "_growth_tracker": state.growth_tracker.item(),
        }
        if self._config.hysteresis > 1:
            tracker = rule.adopted(state, self._config).hysteresis_tracker
            result["_hysteresis_tracker"] = self._config.hysteresis - tracker.item()
        return result

    def load_state_dict(self, state_dict: Mapping[str, ArrayLike]) -> None:
        """Loads what `state_dict` of this class or of torch's returned.

        A disabled scaler loads nothing.

        Raises:
          RuntimeError: the dict is empty, like that of a disabled scaler.
          ValueError, TypeError: a key is missing, or a value is out of its range or not
            a number, or the scaler is stacked. Then nothing is loaded.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict must be a mapping; got {type(state_dict).__name__}."
            )
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a "
                "disabled instance of GradScaler."
            )
        keys = ("scale", "growth_factor", "backoff_factor", "growth_interval")
        missing = {*keys, "_growth_tracker"} - state_dict.keys()
        if missing:
            raise ValueError(
                f"state_dict lacks {', '.join(sorted(missing))}; it has "
                f"{', '.join(map(str, state_dict))}. Pass what state_dict() returned."
            )
        self._check_one("load_state_dict")
        scale = rule.as_scale("scale", state_dict["scale"])
        key = "_growth_tracker"
        tracker = rule.one_number(key, state_dict[key], check_count)
        key, default = "_hysteresis_tracker", self._config.hysteresis
        left = rule.one_number(key, state_dict.get(key, default), check_count)
        self._configure(**{key: state_dict[key] for key in keys[1:]})
        self.loss_scale[...] = scale
        self.growth_tracker[...] = jnp.asarray(tracker, jnp.int32)
        self.hysteresis_tracker[...] = jnp.asarray(
            jnp.maximum(self._config.hysteresis - left, 0), jnp.int32
        )
        self._set_scalars(rule.adopted(scalars_of(self), self._config))

    def _check_one(self, caller: str) -> None:
        if shape := self.loss_scale[...].shape:
            raise ValueError(
                f"{caller}: this scaler is stacked, with numbers of shape {shape}, and "
                "torch's dict has one of each. Save and load nnx.state(scaler)."
            )

    def _configure(self, **changes: ArrayLike) -> None:
        for name, value in changes.items():
            if is_traced(value):
                raise TypeError(
                    f"{name} of a GradScaler is static; got a traced value. Set it "
                    "outside the jitted function, to a Python number."
                )
        self._config = dataclasses.replace(self._config, **changes)

    def _set_scalars(self, state: LossScaleState) -> None:
        for name, value in state._asdict().items():
            getattr(self, name)[...] = value

"""The data of a `GradScaler`: its scale and trackers, its factors, its state dict.

The scale and its trackers are `nnx.Variable`s, so that the scaler passes through
`nnx.jit` and into checkpoints like a model. The factors and the interval are static:
changing one retraces a jitted step that takes the scaler.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from .._checks import check_count, flag, is_traced, number
from . import rule
from .iteration import Iteration
from .rule import LossScaleConfig, LossScaleState
from .state import scalars_of


class ScalerState(nnx.Pytree):
    """The part of a `GradScaler` that is not about gradients."""

    loss_scale: nnx.Variable[jax.Array]
    growth_tracker: nnx.Variable[jax.Array]
    hysteresis_tracker: nnx.Variable[jax.Array]

    def __init__(self, enabled: bool, init_scale: float, **factors: float):
        self._config = LossScaleConfig(init_scale=init_scale)
        self._configure(**factors)
        self._enabled = flag("enabled", enabled)
        self._iteration = nnx.data(Iteration())
        for name, value in rule.init(self._config)._asdict().items():
            setattr(self, name, nnx.Variable(value))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "retried_steps"):  # pickled before there were retries
            self.retried_steps = nnx.Variable(jnp.zeros([], jnp.int32))

    def __repr__(self) -> str:
        values = {"scale": self.get_scale(), "tracker": self.growth_tracker[...]}
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"GradScaler({shown}, enabled={self._enabled}, {self._config})"

    def __str__(self) -> str:
        return repr(self)

    def get_scale(self) -> float | jax.Array:
        """The scale: a Python float outside a trace, the traced array inside, 1.0 if
        disabled."""
        if not self._enabled:
            return 1.0
        loss_scale = self.loss_scale[...]
        return loss_scale if is_traced(loss_scale) else float(loss_scale)

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

    def state_dict(self) -> dict[str, float]:
        """The state as Python scalars, with torch's five keys; `{}` if disabled.

        `torch.amp.GradScaler.load_state_dict` accepts it. With `hysteresis` above 1 it
        has a sixth key, `_hysteresis_tracker`, which torch ignores: overflows left
        before the scale backs off.

        Raises:
          RuntimeError: it was called inside a trace, or in the middle of an iteration.
        """
        if not self._enabled:
            return {}
        self._iteration.check_whole()
        state = self._scalars()
        if is_traced(state.loss_scale):
            raise RuntimeError(
                "state_dict() needs the values of the scale and was called inside a "
                "trace; call it outside the jitted function."
            )
        result = {
            "scale": float(state.loss_scale),
            "growth_factor": self._config.growth_factor,
            "backoff_factor": self._config.backoff_factor,
            "growth_interval": self._config.growth_interval,
            "_growth_tracker": int(state.growth_tracker),
        }
        if self._config.hysteresis > 1:
            tracker = rule.adopted(state, self._config).hysteresis_tracker
            left = self._config.hysteresis - rule.NONE_FORGIVEN + int(tracker)
            result["_hysteresis_tracker"] = left
        return result

    def load_state_dict(self, state_dict: Mapping[str, ArrayLike]) -> None:
        """Loads what `state_dict` of this class or of torch's returned.

        A disabled scaler loads nothing.

        Raises:
          RuntimeError: the dict is empty, like that of a disabled scaler.
          ValueError, TypeError: a key is missing, or a value is out of its range or not
            a number. Then nothing is loaded.
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
        scale = as_scale("scale", state_dict["scale"])
        tracker = check_count("_growth_tracker", state_dict["_growth_tracker"])
        left = state_dict.get("_hysteresis_tracker", self._config.hysteresis)
        left = check_count("_hysteresis_tracker", left)
        self._configure(**{key: state_dict[key] for key in keys[1:]})
        self.loss_scale[...] = scale
        self.growth_tracker[...] = jnp.asarray(tracker, jnp.int32)
        self.hysteresis_tracker[...] = jnp.asarray(left, jnp.int32)
        self._set_scalars(rule.adopted(self._scalars(), self._config))

    def _configure(self, **changes: ArrayLike) -> None:
        for name, value in changes.items():
            if is_traced(value):
                raise TypeError(
                    f"{name} of a GradScaler is static; got a traced value. Set it "
                    "outside the jitted function, to a Python number."
                )
        self._config = dataclasses.replace(self._config, **changes)

    def _scalars(self) -> LossScaleState:
        return scalars_of(self)

    def _set_scalars(self, state: LossScaleState) -> None:
        for name, value in state._asdict().items():
            getattr(self, name)[...] = value


def as_scale(name: str, value: ArrayLike) -> jax.Array:
    """A scale from the user, as float32 []."""
    if np.size(value) != 1:
        raise ValueError(
            f"{name} must be a number or one element; got shape {np.shape(value)}."
        )
    if is_traced(value):
        return number(name, jnp.reshape(value, []), float).astype(jnp.float32)
    value = np.asarray(value).item()
    return jnp.asarray(rule.check_scale(name, value), jnp.float32)

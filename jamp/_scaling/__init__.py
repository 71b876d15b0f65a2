"""Loss scaling: torch's `GradScaler`, as an optax wrapper and as an object for NNX.

`rule` says what a step does to a scale and its trackers. `arithmetic` scales, checks
and unscales. `value_and_grad` scales the loss. `wrapper` (for optax, with `step`,
`transformation`, `train_state`) and `grad_scaler` (for NNX, with `scaler_state`,
`iteration`, `nnx_grads`) check the gradients, unscale them, step or hold (`skip`, with
`donated` and `apart`), and move the scale. `dtypes` says what an optimizer's state is
made of, also one of another run.
`retry` (with `nnx_retry`, `find_scale`) runs a step again: `attempts` says how, `held`
what need not be held in between, and `influence` whether the scale matters to a step.
`state` is what a step leaves behind, `alarms` and `check` read it, and `match` checks
a step's arguments. `gather` and `mesh` are for sharded arrays, `mean`,
`error_feedback` and `eight_bits` for gradients that devices exchange, and
`master_weights` for float16 parameters.

May import: `_checks`, `_tree`. Nothing here uses JAX's private parts.
"""

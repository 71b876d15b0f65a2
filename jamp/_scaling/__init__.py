"""Loss scaling: torch's `GradScaler`, as an optax wrapper and as an object for NNX.

`rule` says what a step does to a scale and its trackers. `arithmetic` scales, checks
and unscales. `value_and_grad` scales the loss. `wrapper` (for optax, with `scaled`,
`step`, `transformation`, `train_state`) and `grad_scaler` (for NNX, with
`optimizer_stages`, `nnx_grads`) check the gradients, unscale them, step or hold
(`skip`, with `branching`), and move the scale. `dtypes` says what an optimizer's state
is made of, also one of another run, and `unread` what an optimizer reads of its
gradients, with `program`.
`retry` and `find_scale` run a step again, by `attempts`: `calls` (and `nnx_call`, for
NNX) makes the step a function of its state.
`state` is what a step leaves behind, `alarms` and `check` read it, and
`check_gradients` checks a step's arguments. `gather` and `mesh` are for sharded arrays,
`mean`, `error_feedback` and `eight_bits` for gradients that devices exchange, and
`master_weights` for float16 parameters.

May import: `_checks`, `_tree`. Nothing here uses JAX's private parts.
"""

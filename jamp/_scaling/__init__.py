"""Loss scaling: torch's `GradScaler`, as an optax wrapper and as an object for NNX.

`rule` says what a step does to a scale and its trackers. `arithmetic` scales, checks
and unscales. `value_and_grad` scales the loss. `wrapper` (for optax, with `step`,
`transformation`, `train_state`) and `grad_scaler` (for NNX, with `optimizer_stages`,
`nnx_grads`) check the gradients that an optimizer reads (`traced`), unscale them, step
or hold (`skip`), and move the scale. `state` is what a step leaves behind (see also
`state_types` and `foreign_state`), and `metrics` says what that means. `retry` and
`find_scale` run a step again: `calls` or `nnx_call`, by its style (`styles`), makes it
a function of its state, and `proof` runs that at several scales. `gather` and `mesh`
are for sharded arrays, `mean`, `error_feedback` and `eight_bits` for gradients of
several devices, and `master_weights` for half-precision parameters.

May import: `_checks`, `_targets`, `_tree`, `_jaxprs`. Nothing here uses private parts
of JAX.
"""

"""Loss scaling: torch's `GradScaler`, as an optax wrapper and as an object for NNX.

`arithmetic` is the rule: a scale, its trackers, and what an overflow does to them.
`value_and_grad` scales the loss; `wrapper` (with `step`) and `grad_scaler` check the
gradients, unscale them, step or hold (`skip`), and move the scale. `state` and `health`
are what a step leaves behind, `match` the checks of what it is given. `gather` and
`mesh` are for arrays that are split over devices, `master_weights` for float16
parameters.

May import: `_checks`, `_tree`. Nothing here uses JAX's private parts.
"""

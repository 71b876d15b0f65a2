"""autocast: each op in the dtype that suits it, by a JAX trace that casts.

`region` puts an `AutocastTrace` (`trace`) on top of the trace that is current. An op
that arrives there (`decision`) is looked up (`rules`, over the tables in `ops`), its
inputs are cast (`preparing`, `casting`), and it is bound on the trace below. An op that
holds jaxprs or Python functions goes to `nested`, `thunks`, `custom_calls`,
`custom_equations` or `writes`, and comes back to the trace, op by op (`rewriting`).
`notes` remember what a value was made of, for `bias`, `conversion` and `moves`;
`products`, `draws`, `refused` and `left_alone` handle ops of these kinds.
`float8_products` chooses the products that run in `float8`, `float8_arithmetic` has
their numbers, and `float8_derivative` their gradients. `scaled` has the float16
products whose cotangents are scaled.

May import: `_checks`, `_tree`, `_compat`.
"""

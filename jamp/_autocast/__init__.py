"""autocast: each op in the dtype that suits it, by a JAX trace that casts.

`region` puts an `AutocastTrace` (`trace`) on top of the trace that is current. An op
that arrives there (`decision`) is looked up (`rules`, over the tables in `ops`), its
inputs are cast (`preparing`, `casting`), and it is bound on the trace below. An op that
holds jaxprs or Python functions goes to `nested`, `thunks`, `custom_calls`,
`custom_equations` or `writes`, and comes back to the trace, op by op (`rewriting`).
`notes` remember what a value was made of, for `bias`, `conversion` and `moves`;
`products`, `draws`, `refused` and `left_alone` are about ops of these kinds.
Products in `float8` have their choice in `float8_products`, their numbers in
`float8_arithmetic` and their gradients in `float8_derivative`; float16 products whose
cotangents are scaled are in `scaled`.

May import: `_checks`, `_tree`, `_compat`.
"""

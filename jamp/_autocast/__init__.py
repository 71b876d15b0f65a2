"""autocast: each op in the dtype that suits it, by a JAX trace that casts.

`region` puts an `AutocastTrace` (`trace`) on top of the trace that is current. An op
that arrives there (`decision`) is looked up (`rules`, over the tables in `ops`), its
inputs are cast (`preparing`, `casting`), and it is bound on the trace below. An op that
holds jaxprs or Python functions goes to `nested`, `thunks`, `custom_calls`,
`custom_equations` or `writes`, and comes back to the trace, op by op (`rewriting`).
`notes` remember what a value was made of, for `bias`, `conversion` and `moves`;
`products`, `draws`, `refused` and `left_alone` handle ops of these kinds. A recipe
(`float8`, `scaled_float16`) says which products it takes, and runs them: over one
description of their dimensions (`contraction`), with numbers that have a scale
(`low_precision`), and with a derivative of their own (`derivatives`).

May import: `_checks`, `_tree`, `_compat`, `_targets`.
"""

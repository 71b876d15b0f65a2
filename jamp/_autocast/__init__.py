"""autocast: each op in the dtype that suits it, by a JAX trace that casts.

`region` puts an `AutocastTrace` (`trace`) on top of the trace that is current. An op
that arrives there is looked up (`rules`, over the tables in `ops`), its inputs are
cast, and it is bound on the trace below. An op that holds jaxprs or Python functions
goes to `nested`, `custom`, `thunks` or `writes`, and comes back to the trace, op by op.
`notes` remember what a value was made of, for `bias`, `products`, `draws`, `refused`.

May import: `_checks`, `_tree`, `_compat`.
"""

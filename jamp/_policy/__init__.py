"""Policies: which dtypes parameters, computation and results have, by module.

A `Policy` casts trees; `linen` and `nnx` run a model under one, with other policies
for its parts (`overrides`). What stays in float32 all the same (`float32_for`) does so
in an autocast region whose table holds these functions alone.

May import: `_checks`, `_tree`, `_autocast`, `_scaling`.
"""

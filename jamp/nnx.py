"""Flax NNX: a policy for a model and its parts."""

from ._nnx_policy import with_policy as with_policy

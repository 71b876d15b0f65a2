"""Flax NNX: a policy for a model and its parts."""

from ._policy.nnx import with_policy as with_policy

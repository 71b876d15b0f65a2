"""Parameters inside `shard_map`: whole on each device, gradients averaged back."""

from ._scaling.gather import gather as gather

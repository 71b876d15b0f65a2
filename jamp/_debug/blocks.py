"""Steps of a `History` on their way from the devices to the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .packing import Contents, OnHost, Packed, stack, unpack


class Block(NamedTuple):
    """Steps that are copied together."""

    contents: Contents
    words: list[list[Any]]  # arrays of each device, to be concatenated
    host: Mapping[str, OnHost | list[OnHost]]  # name -> [steps]
    steps: int

    def send(self) -> None:
        """Begins the copy."""
        # An intended transfer: a user's guard against implicit ones must allow it.
        with jax.transfer_guard_device_to_host("allow"):
            for array in (array for group in self.words for array in group):
                array.copy_to_host_async()

    def is_ready(self) -> bool:
        return all(array.is_ready() for group in self.words for array in group)

    def columns(self) -> dict[str, np.ndarray]:
        """The values by name, [steps], each in its dtype. Waits for the copy."""
        columns = {name: np.array(values) for name, values in self.host.items()}
        words = [
            np.concatenate([np.atleast_2d(rows) for rows in jax.device_get(arrays)])
            for arrays in self.words
        ]
        return columns | unpack(self.contents, words)


def of_rows(rows: Sequence[Packed], stacked: bool) -> Block:
    """Rows of single steps as one block.

    Args:
      stacked: whether to send one array per device, which compiles for their number.
    """
    words = [list(group) for group in zip(*(r.words for r in rows), strict=True)]
    if stacked:
        words = [[stack(group)] for group in words]
    host = {name: [row.host[name] for row in rows] for name in rows[0].host}
    return Block(rows[0].contents, words, host, len(rows))


def of_steps(row: Packed, steps: int) -> Block:
    """Several steps that were packed at once."""
    words = [[array] for array in row.words]
    return Block(row.contents, words, row.host, steps)

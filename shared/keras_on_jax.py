"""Keras with JAX as its backend, for the tests."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def _keras_home() -> Iterator[None]:
    """Keras on JAX, without the file that it writes into the home directory."""
    with tempfile.TemporaryDirectory() as home:
        settings = {"KERAS_BACKEND": "jax", "KERAS_HOME": home}
        with mock.patch.dict(os.environ, settings):
            yield


def import_keras() -> Any:
    """Keras, or RuntimeError if it has been imported with another backend."""
    with _keras_home():
        import keras
    if keras.backend.backend() != "jax":
        raise RuntimeError(f"Keras runs on {keras.backend.backend()}, not on JAX")
    return keras

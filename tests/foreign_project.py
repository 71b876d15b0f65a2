"""The tests of a made-up project, for `test_foreign`, which copies this file."""

import os
import unittest
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp._autocast.trace import AutocastTrace
from jamp._compat import current_trace

HALF = jnp.dtype("float16")


def in_region():
    return isinstance(current_trace(), AutocastTrace)


def test_passes():
    with Path(__file__).with_name("ran").open("a") as file:
        file.write("x")


def test_fails_plain():
    raise AssertionError("as it does without jamp")


def test_skips():
    pytest.skip("not here")


class Case(unittest.TestCase):
    def setUp(self):
        assert not in_region()  # a region holds the test alone

    def test_decides_nothing(self):
        x = jnp.ones((2, 2))
        got = (x @ x).dtype
        self.assertEqual(got == HALF, jamp.is_autocast_enabled())

    def test_crashes(self):
        if jamp.is_autocast_enabled():
            raise TypeError(f"got float16[3,4] at {id(self):#x}\nand more")

    def test_compares(self):
        self.assertFalse(jamp.is_autocast_enabled())

    def test_of_parts(self):
        for i in range(3):
            with self.subTest(i=i):
                if i == 1 and jamp.is_autocast_enabled():
                    raise KeyError("one")


def test_sets_a_mesh():
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert jnp.ones(2).sum() == 2


def test_looks_inside():
    if in_region():
        raise ValueError("a trace that JAX does not have")


def test_dies():
    if jamp.is_autocast_enabled():
        os._exit(7)


def test_after_it():
    pass

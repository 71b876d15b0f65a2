"""Tests of `jamp/_policy/`: casts by module."""

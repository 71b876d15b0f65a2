"""Tests of `jamp/_autocast/`: op-level casting."""

"""Tests of `jamp/_scaling/`: loss scaling, optimizers, master weights."""

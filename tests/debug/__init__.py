"""Tests of `jamp/_debug/`: reports, histories and pictures."""

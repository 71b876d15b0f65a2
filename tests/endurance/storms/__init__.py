"""Storms: random trees, optimizers, overflows and calls, against plain models.

Four kinds, each a strategy of Hypothesis and an oracle.

* `trees`: random trees, optimizers, nestings and settings, against the bare optimizer
  on gradients that NumPy unscaled;
* `calls`: random calls of a `GradScaler`, against a state machine of torch's;
* `garbage`: wrong arguments, each of which jamp must refuse with its own message;
* `programs`: random programs in autocast regions, against the same without caches.
"""

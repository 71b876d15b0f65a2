"""Other people's code under jamp: their tests, calls, models and training loops.

- `suites`: other projects' own tests, run as they are, inside jamp's regions
  (`python -m foreign --suite jax --source DIR`).
- `ecosystem`: calls of other libraries, each compared with float32
  (`python -m foreign --suite ecosystem`).
- `models`, `trainers`: models and whole training loops, in each dtype
  (`python -m foreign.train --source DIR`).
"""

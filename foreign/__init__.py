"""Other people's code under jamp: their tests, their calls and their training loops.

- `suites`: other projects' own tests, run as they are, inside jamp's regions
  (`python -m foreign --suite jax --source DIR`).
- `test_calls`: calls of other libraries (`calls.txt`), each compared with float32, and
  programs that train or draw samples (`programs`).
"""

"""What tests, benchmarks and the parity suite share; it does not import from them.

* `residuals`: what is saved for a backward pass, and models to measure it on.
* `hlo`: the kernels of a compiled program, and the bytes that they read and write.
* `collectives`: sharded trainings, and what their devices exchange.
* `master_weights`: a training that stalls in float16 without float32 copies.
* `processes`: a command that is ended with all its children.
* `guide`: the blocks and tables of the migration guide.
"""

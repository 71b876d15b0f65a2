"""Where torch runs: on a CPU, on CUDA, or on a CPU in the place of CUDA.

A rehearsal runs every line that runs with CUDA alone, with torch on the CPU, which it
lets answer as CUDA does. So none of them is new when there is a GPU.
"""

CPU, CUDA, REHEARSAL = NAMES = ("cpu", "cuda", "rehearsal")


def of_torch(device: str) -> str:
    """The device that torch is given."""
    return CUDA if device == CUDA else CPU

"""The data of both programs: where is the blob in a noisy image, and how wide is it?"""

import numpy as np

SIZE = 12
GLITCH_EVERY = 12  # steps; a label is then wrong
GLITCHES = 0, 2  # the first is that of a position, the second of a width


def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 1, SIZE, SIZE], channels first, and targets [n, 3], x, y and width."""
    targets = rng.uniform(-1, 1, (n, 3)).astype(np.float32)
    axis = np.linspace(-1.5, 1.5, SIZE, dtype=np.float32)
    x, y, width = (column[:, None, None] for column in targets.T)
    far = (axis[None, :, None] - x) ** 2 + (axis[None, None] - y) ** 2
    images = np.exp(-far / (0.3 + 0.1 * width))
    images += 0.1 * rng.standard_normal(images.shape, np.float32)
    return images[:, None].astype(np.float32), targets


def batches(steps: int, parts: int = 2, n: int = 16, seed: int = 0):
    """Yields lists of `parts` microbatches of n images."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        micro = [draw(rng, n) for _ in range(parts)]
        if step % GLITCH_EVERY == GLITCH_EVERY - 1:
            column = GLITCHES[step // GLITCH_EVERY % 2]
            micro[0][1][0, column] = 1e5  # its gradient overflows float16
        yield micro


def held_out(n: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Images and targets for evaluation."""
    return draw(np.random.default_rng(1), n)

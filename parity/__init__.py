"""jamp against live torch: the same streams of gradients through both, bit by bit."""

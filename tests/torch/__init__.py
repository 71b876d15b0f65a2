"""jamp beside torch: its golden files, its guide, and defects of others."""

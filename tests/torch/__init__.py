"""jamp beside torch: its golden file, the migration guide, and others' defects."""

"""jamp beside torch: golden files, the migration guide, and others' defects."""

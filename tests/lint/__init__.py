"""What reads files and runs nothing: `make lint` runs these, and no other target."""

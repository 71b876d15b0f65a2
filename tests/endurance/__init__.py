"""Long runs: storms of random cases, several processes, kills."""

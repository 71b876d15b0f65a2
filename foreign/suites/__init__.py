"""Other projects' own tests, run as they are, inside jamp's regions."""

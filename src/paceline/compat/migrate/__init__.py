"""`paceline migrate --check`: the distributed calls of a program, and what becomes of each here."""

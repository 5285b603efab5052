"""Each has `check(bench)`, which tells its rows one after the other."""

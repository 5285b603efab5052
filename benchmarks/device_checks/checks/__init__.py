"""Each has `ABOUT`, `LIMIT_S` (with a device) and `check(bench)`, which tells its rows one after the other."""

"""The command `paceline parity`: its options, its runs, the comparison and its table; imports cli.arguments, attempt
and launch.
"""

"""The command `paceline drill`: its options, its runs under faults, its verdict; imports cli.arguments and
paceline.testing.
"""

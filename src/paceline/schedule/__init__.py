"""Schedules as data: pipeline schedules, all-reduce rounds, placement, sample order, staleness.

Pure functions of numbers, without torch, processes or clocks. Imports nothing of paceline but the ground modules.
"""

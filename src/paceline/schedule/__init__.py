"""Who does what, when: pure functions of numbers, without torch, processes or clocks."""

"""Share the devices of a machine or an allocation among elastic runs: a pure function decides, without I/O."""

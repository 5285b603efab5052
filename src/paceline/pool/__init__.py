"""Share the devices of a machine or an allocation among elastic runs: what is decided is a pure function, without I/O."""
